//! The one error type: what failed, what was expected and found, and what to type next.
//!
//! A divergence is data, never an error. An [`Error`] means that parity could not judge (exit code 2).

use std::fmt;
use std::path::Path;

use crate::text::{printable, printable_lines};

/// The result of everything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why parity could not do what it was asked to.
///
/// Prints as `subject: message`, then `expected:`, `found:` and `hint:` lines where known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Error {
    subject: String,
    message: String,
    expected: Option<String>,
    found: Option<String>,
    hint: Option<String>,
}

impl Error {
    /// An error about `subject` (a file or a checkpoint); `message` is a lower-case fragment.
    pub fn new(subject: impl fmt::Display, message: impl fmt::Display) -> Self {
        Error { subject: subject.to_string(), message: message.to_string(), ..Error::default() }
    }

    /// An error about a file.
    pub fn file(path: &Path, message: impl fmt::Display) -> Self {
        Error::new(path.display(), message)
    }

    /// Says what would have been right.
    #[must_use]
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self
    }

    /// Says what was there instead.
    #[must_use]
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.found = Some(found.to_string());
        self
    }

    /// Says what to do about it, with a command where there is one.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// What is wrong with the subject, and with what was found, in one line.
    pub fn cause(&self) -> String {
        let found = self.found.as_ref().map_or_else(String::new, |found| format!(" ({})", printable(found)));
        format!("{}{found}", printable(&self.message))
    }

    /// The file or checkpoint that the error is about.
    pub fn subject(&self) -> &str {
        &self.subject
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", printable(&self.subject), printable_lines(&self.message))?;
        for (label, text) in [("expected", &self.expected), ("found", &self.found), ("hint", &self.hint)] {
            if let Some(text) = text {
                write!(f, "\n  {:<10}{}", format!("{label}:"), printable_lines(text))?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
