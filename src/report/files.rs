//! `--report DIR`: every format beside the others, written under temporary names and renamed.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{Report, csv, html, json, junit, markdown, sarif};
#[cfg(not(unix))]
use crate::elsewhere::readable_by_all;
use crate::error::{Error, Result};

/// A file of a report folder, and what renders it.
type Renderer = (&'static str, fn(&Report) -> Result<String>);

/// Every file. A new format is one file in this folder and one line here.
const FORMATS: [Renderer; 6] = [
    ("report.json", json::render),
    ("report.csv", csv::render),
    ("report.html", html::render),
    ("junit.xml", junit::render),
    ("report.sarif", sarif::render),
    ("summary.md", |report| Ok(markdown::render(report))),
];

/// A folder that reports can be written to.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Creates the folder where it is not there, and tries it: a run of minutes must not end with an
    /// unwritable folder.
    pub fn create(path: &Path) -> Result<Folder> {
        fs::create_dir_all(path).map_err(|e| unwritable(path, &e))?;
        tempfile::NamedTempFile::new_in(path).map_err(|e| unwritable(path, &e))?;
        Ok(Folder { path: path.to_owned() })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the report in every format. Returns the files.
    pub fn write(&self, report: &Report) -> Result<Vec<PathBuf>> {
        // All of them are rendered before the first is renamed: a folder never mixes two reports.
        let rendered = FORMATS.iter().map(|(name, render)| Ok((*name, render(report)?)));
        let rendered: Vec<(&str, String)> = rendered.collect::<Result<_>>()?;
        rendered.iter().map(|(name, text)| self.write_file(name, text)).collect()
    }

    /// Writes one file, in the folder of its path.
    pub fn write_path(path: &Path, text: &str) -> Result<PathBuf> {
        let folder = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Folder::create(folder)?.write_file(&name, text)
    }

    /// Writes one file of the folder under a temporary name, then renames it.
    pub fn write_file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        let mut file = tempfile::Builder::new()
            .prefix(&format!(".{name}."))
            .suffix(".part")
            .tempfile_in(&self.path)
            .map_err(|e| unwritable(&path, &e))?;
        file.write_all(text.as_bytes()).map_err(|e| unwritable(&path, &e))?;
        readable_by_all(file.path()).map_err(|e| unwritable(&path, &e))?;
        file.persist(&path).map_err(|e| unwritable(&path, &e.error))?;
        Ok(path)
    }
}

/// Temporary files are private to their owner; a report is to be served and archived.
#[cfg(unix)]
fn readable_by_all(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
}

fn unwritable(path: &Path, cause: &std::io::Error) -> Error {
    Error::file(path, format!("cannot be written: {cause}")).hint("choose another folder with --report DIR")
}

/// Now, in UTC as RFC 3339; the time that `SOURCE_DATE_EPOCH` names (seconds since 1970), where it is set.
pub fn timestamp() -> String {
    let fixed = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok());
    let now =
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    rfc3339(fixed.unwrap_or_else(now))
}

/// Days to civil date after Howard Hinnant, "chrono-compatible low-level date algorithms".
pub(crate) fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_795_219_199), "2026-11-20T23:59:59Z");
    }

    #[test]
    fn a_file_in_the_way_fails_before_any_work() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report");
        fs::write(&path, "").unwrap();
        let error = Folder::create(&path).unwrap_err().to_string();
        assert!(error.contains("cannot be written"), "{error}");
    }
}
