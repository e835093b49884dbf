//! What can be wrong with a dump on disk.

use std::fmt;
use std::path::{Path, PathBuf};

/// A dump that cannot be read or written: which file, what was expected and found, what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpError {
    /// The file or folder.
    pub path: PathBuf,
    /// A lower-case fragment.
    pub message: String,
    /// What would have been right, where known.
    pub expected: Option<String>,
    /// What was there instead, where known.
    pub found: Option<String>,
    /// What to do about it, where known.
    pub hint: Option<String>,
}

impl DumpError {
    /// An error about the file or folder `path`.
    pub fn new(path: &Path, message: impl fmt::Display) -> Self {
        DumpError { path: path.into(), message: message.to_string(), expected: None, found: None, hint: None }
    }

    /// Says what would have been right and what was there instead.
    #[must_use]
    pub fn expected_found(mut self, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self.found = Some(found.to_string());
        self
    }

    /// Says what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }
}

impl fmt::Display for DumpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.message)?;
        for (label, text) in [("expected", &self.expected), ("found", &self.found), ("hint", &self.hint)] {
            if let Some(text) = text {
                write!(f, "\n  {label}: {text}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for DumpError {}
