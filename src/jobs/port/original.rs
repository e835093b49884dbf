//! The original, run by transformers under `parity_dump`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// What Python is given.
const SCRIPT: &str = include_str!("original.py");
/// What installs everything that it needs.
const INSTALL: &str = "pip install ./python torch transformers";
/// What adapters need beside.
const PEFT: &str = "peft";
/// Lines of a failure of Python's that are shown.
const SHOWN: usize = 6;

/// A Python with transformers.
pub struct Python {
    program: PathBuf,
}

impl Python {
    /// Tries a Python, one that loads adapters where it has to.
    ///
    /// # Errors
    /// No such program, or one that lacks a package: with the line that installs it.
    pub fn find(program: &Path, with_adapter: bool) -> Result<Python> {
        let python = Python { program: program.to_owned() };
        let peft = with_adapter.then_some(PEFT);
        let lacks = |what: String| {
            let (and, too) =
                peft.map_or_else(Default::default, |peft| (format!(", {peft}"), format!(" {peft}")));
            Error::file(program, what)
                .expected(format!("a Python with torch, transformers{and} and parity_dump"))
                .hint(format!("{INSTALL}{too}; --python PROGRAM names another Python"))
        };
        let out = python
            .command()
            .arg("--probe")
            .args(peft)
            .output()
            .map_err(|e| lacks(format!("cannot be run: {e}")))?;
        let said = String::from_utf8_lossy(&out.stdout).trim().to_owned();
        match (out.status.success(), said.is_empty()) {
            (true, true) => Ok(python),
            (true, false) => Err(lacks("cannot run the original".to_owned()).found(format!("no {said}"))),
            (false, _) => Err(lacks("cannot run the original".to_owned()).found(last_lines(&out.stderr))),
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // The model is a folder: nothing is looked up elsewhere.
        command.args(["-c", SCRIPT]).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
        command
    }

    /// Runs a model on these tokens in f32, matrices rounded to the type that the file `stores` them in, with an adapter and
    /// its strength where there is one, and writes a dump.
    ///
    /// # Errors
    /// Whatever Python says.
    pub fn run(
        &self,
        (folder, adapter): (&Path, Option<(&Path, f32)>),
        dump: &Path,
        tokens: &[u32],
        prompt: &str,
        stores: &str,
    ) -> Result<()> {
        let tokens = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let out = self
            .command()
            .args([folder, dump])
            .args([tokens.as_str(), prompt, stores])
            .args(
                adapter
                    .into_iter()
                    .flat_map(|(path, scale)| [path.into(), OsString::from(scale.to_string())]),
            )
            .output()
            .map_err(|e| Error::file(&self.program, format!("cannot be run: {e}")))?;
        match out.status.success() {
            true => Ok(()),
            false => Err(Error::file(folder, "transformers could not run the original")
                .found(last_lines(&out.stderr))
                .hint("python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained(\"FOLDER\")' must work")),
        }
    }
}

fn last_lines(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}
