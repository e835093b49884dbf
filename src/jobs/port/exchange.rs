//! The files of llama.cpp's guide to conversions (examples/model-conversion): logits of the last token, tokens, prompt.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files::{OUTPUT_BYTES_MAX, TEXT_BYTES_MAX, read};

/// What one side computed of the last token, and of which tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// (V,)
    pub logits: Vec<f32>,
    /// (T,)
    pub tokens: Vec<u32>,
}

/// `DIR/pytorch-NAME`, `DIR/llamacpp-NAME`: what all files of a side begin with.
pub fn stem(dir: &Path, side: &str, model: &Path) -> PathBuf {
    let name = model.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.strip_suffix(".gguf").map_or(name.clone(), str::to_owned);
    dir.join(format!("{side}-{name}"))
}

fn with(stem: &Path, ending: &str) -> PathBuf {
    let mut path = stem.as_os_str().to_owned();
    path.push(ending);
    PathBuf::from(path)
}

impl Output {
    /// Writes the four files of a side: `.bin`, `.txt`, `-tokens.bin`, `-prompt.txt`.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn write(&self, stem: &Path, prompt: &str) -> Result<()> {
        let bytes: Vec<u8> = self.logits.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut text = String::new();
        for (index, value) in self.logits.iter().enumerate() {
            let _ = writeln!(text, "{index}: {value:.6}");
        }
        let tokens: Vec<u8> = self.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let ids: Vec<String> = self.tokens.iter().map(u32::to_string).collect();
        let said = format!("prompt: {prompt}\nn_tokens: {}\ntoken ids: {}\n", ids.len(), ids.join(", "));
        let files: [(&str, &[u8]); 4] = [
            (".bin", &bytes),
            (".txt", text.as_bytes()),
            ("-tokens.bin", &tokens),
            ("-prompt.txt", said.as_bytes()),
        ];
        if let Some(dir) = stem.parent() {
            std::fs::create_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be created: {e}")))?;
        }
        for (ending, bytes) in files {
            whole(&with(stem, ending), bytes)?;
        }
        Ok(())
    }

    /// Reads what a side's own script wrote; nothing where there is no such file.
    ///
    /// # Errors
    /// Files of another size than numbers have.
    pub fn read(stem: &Path) -> Result<Option<Output>> {
        let (logits, tokens) = (with(stem, ".bin"), with(stem, "-tokens.bin"));
        if !logits.exists() || !tokens.exists() {
            return Ok(None);
        }
        let logits = words(&logits)?.into_iter().map(f32::from_bits).collect();
        Ok(Some(Output { logits, tokens: words(&tokens)? }))
    }
}

/// The prompt that a side's own script wrote down.
///
/// # Errors
/// A file that is no text.
pub fn prompt(stem: &Path) -> Result<Option<String>> {
    let path = with(stem, "-prompt.txt");
    if !path.exists() {
        return Ok(None);
    }
    let text = read(&path, TEXT_BYTES_MAX)?;
    let prompt = text.strip_prefix("prompt: ").and_then(|text| text.rsplit_once("\nn_tokens: "));
    Ok(prompt.map(|(prompt, _)| prompt.to_owned()))
}

/// Words of 32 bits.
fn words(path: &Path) -> Result<Vec<u32>> {
    let size = std::fs::metadata(path).map_or(0, |data| data.len());
    if !(size <= OUTPUT_BYTES_MAX && size.is_multiple_of(4)) {
        return Err(Error::file(path, "is no file of numbers of 32 bits").found(format!("{size} bytes")));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Writes a file that appears whole or not at all.
fn whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |e: &dyn std::fmt::Display| Error::file(path, format!("cannot be written: {e}"));
    let dir = path.parent().unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(dir).map_err(|e| failed(&e))?;
    std::fs::write(file.path(), bytes).map_err(|e| failed(&e))?;
    file.persist(path).map(drop).map_err(|e| failed(&e.error))
}

/// The error that llama.cpp's check-nmse.py takes: mean square of the differences over the variance of the original.
pub fn nmse(original: &[f32], converted: &[f32]) -> Option<f64> {
    let n = original.len() as f64;
    if original.is_empty() || original.len() != converted.len() {
        return None;
    }
    let mean = original.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let variance = original.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
    let square =
        original.iter().zip(converted).map(|(a, b)| (f64::from(*b) - f64::from(*a)).powi(2)).sum::<f64>();
    Some(square / n / variance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_side_are_read_as_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let stem = stem(&dir.path().join("data"), "llamacpp", Path::new("/m/tiny.gguf"));
        let output = Output { logits: vec![1.5, -2.0, 0.25], tokens: vec![7, 300] };
        assert_eq!(Output::read(&stem).unwrap(), None);
        output.write(&stem, "two\nlines").unwrap();
        assert_eq!(Output::read(&stem).unwrap(), Some(output));
        assert_eq!(prompt(&stem).unwrap().as_deref(), Some("two\nlines"));
        let path = dir.path().join("data/llamacpp-tiny.txt");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "0: 1.500000\n1: -2.000000\n2: 0.250000\n");
        std::fs::write(dir.path().join("data/llamacpp-tiny.bin"), [0; 5]).unwrap();
        assert!(Output::read(&stem).is_err());
    }

    #[test]
    fn the_error_is_that_of_the_guide() {
        // numpy: mean((b - a)²) / var(a)
        let error = nmse(&[1.0, 2.0, 3.0], &[1.0, 2.0, 4.0]).unwrap();
        assert!((error - 0.5).abs() < 1e-15, "{error}");
        assert_eq!(nmse(&[1.0], &[1.0, 2.0]), None);
    }
}
