//! Settings: environment variables, and a file of the user's that stands in for those that are not set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;

/// Names the file of settings.
pub const FILE_VARIABLE: &str = "PARITY_CONFIG";

/// One setting.
pub struct Setting {
    /// Its name in the file; `None` of what is another program's, or makes no sense for every run.
    pub key: Option<&'static str>,
    /// Its environment variable.
    pub variable: &'static str,
    /// What it says, for the table in docs/settings.md.
    pub meaning: &'static str,
    /// Whether the value in the file is a path, relative to the file's folder.
    is_path: bool,
}

const fn own(key: &'static str, variable: &'static str, is_path: bool, meaning: &'static str) -> Setting {
    Setting { key: Some(key), variable, meaning, is_path }
}

const fn foreign(variable: &'static str, meaning: &'static str) -> Setting {
    Setting { key: None, variable, meaning, is_path: false }
}

/// Everything that the environment can say.
pub const ALL: [Setting; 23] = [
    own(
        "models",
        "PARITY_MODELS",
        true,
        "folder of GGUF models: dumps find their model there, suites name it `$PARITY_MODELS/…`",
    ),
    own(
        "reference-dumps",
        "PARITY_REFERENCE_DUMPS",
        true,
        "folder of models and reference dumps, in place of the shipped one",
    ),
    own(
        "cache",
        "PARITY_CACHE",
        true,
        "folder in which recordings are kept for later runs; `~/.cache/parity` where it is not set",
    ),
    own(
        "remote-size",
        "PARITY_REMOTE_SIZE",
        false,
        "most bytes of dumps from `s3://` and `https://` that the cache keeps, as `512M`, `8G`; `10G` where it is not set",
    ),
    own(
        "llama",
        "PARITY_LLAMA",
        false,
        "llama.cpp program that records references; `llama-completion` on the PATH where it is not set, `none` forbids it",
    ),
    own(
        "memory",
        "PARITY_MEMORY",
        false,
        "most memory that a run may need, in bytes or as `512M`, `8G`; what the system has available where it is not set",
    ),
    own(
        "kernels",
        "PARITY_KERNELS",
        true,
        "folder of CUDA kernels, an edited copy of `kernels/`, in place of the built-in ones",
    ),
    foreign(FILE_VARIABLE, "file of settings; `~/.config/parity/config.toml` where it is not set"),
    foreign("PARITY_API_KEY", "key of the server that `parity guess --url` asks"),
    foreign(
        "PARITY_COMMIT",
        "commit that `parity gate --history` writes down; GitHub's, GitLab's or git's where it is not set",
    ),
    foreign(
        "PARITY_MACHINE",
        "machine that `parity gate --history` writes down; the host's name where it is not set",
    ),
    foreign(
        "AWS_ACCESS_KEY_ID",
        "with `AWS_SECRET_ACCESS_KEY`: credentials for `s3://`; nothing is signed where they are not set",
    ),
    foreign("AWS_SECRET_ACCESS_KEY", "never printed"),
    foreign("AWS_SESSION_TOKEN", "of temporary credentials"),
    foreign("AWS_REGION", "region of the bucket"),
    foreign("AWS_ENDPOINT_URL", "another server with S3's interface"),
    foreign("HF_HOME", "Hugging Face's cache, for `-hf`; `~/.cache/huggingface` where it is not set"),
    foreign("HF_ENDPOINT", "address of the hub, for `-hf`; `https://huggingface.co` where it is not set"),
    foreign("HF_HUB_OFFLINE", "`1`: `-hf` looks into the cache only"),
    foreign("XDG_CACHE_HOME", "folder of caches, in place of `~/.cache`"),
    foreign("NO_COLOR", "no colours"),
    foreign(
        "GITHUB_ACTIONS",
        "`true`: the answer is an annotation too, and no line of the output is a command to the runner",
    ),
    foreign(
        "SOURCE_DATE_EPOCH",
        "time that reports carry, in seconds since 1970, so that equal runs write equal bytes",
    ),
];

/// Where the file of settings is looked for.
pub fn file() -> Option<PathBuf> {
    let named = std::env::var_os(FILE_VARIABLE).map(PathBuf::from);
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    named.or_else(|| config.or_else(home).map(|dir| dir.join("parity/config.toml")))
}

/// Reads the file, if there is one, and sets the variables that it names and that are not set. A file of the current
/// folder is never read: a cloned repository must not choose the programs that are run.
///
/// # Errors
/// A file that was named and is not there, or says what parity does not know.
///
/// # Safety
/// No other thread may be running: the environment belongs to all of them.
pub unsafe fn load() -> Result<()> {
    let Some(path) = file() else { return Ok(()) };
    if !path.exists() && std::env::var_os(FILE_VARIABLE).is_none() {
        return Ok(());
    }
    for (variable, value) in read(&path)? {
        if std::env::var_os(variable).is_none() {
            // SAFETY: the caller's promise.
            unsafe { std::env::set_var(variable, value) };
        }
    }
    Ok(())
}

/// The variables that a file sets, and their values.
fn read(path: &Path) -> Result<Vec<(&'static str, String)>> {
    let text = files::read(path, files::TEXT_BYTES_MAX)?;
    let known = || ALL.iter().filter_map(|setting| setting.key).collect::<Vec<_>>().join(", ");
    let table: BTreeMap<String, String> = toml::from_str(&text).map_err(|e| {
        Error::file(path, format!("is no file of settings: {e}"))
            .expected(format!("lines such as `models = \"/data/models\"`: {}", known()))
    })?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let setting = |(key, value): (String, String)| {
        let setting = ALL.iter().find(|setting| setting.key == Some(&key)).ok_or_else(|| {
            Error::file(path, format!("sets `{key}`, which is no setting")).expected(known())
        })?;
        let value = if setting.is_path { folder.join(value).display().to_string() } else { value };
        Ok((setting.variable, value))
    };
    table.into_iter().map(setting).collect()
}

/// The table of docs/settings.md.
pub fn markdown() -> String {
    let row = |setting: &Setting| {
        let key = setting.key.map_or(String::new(), |key| format!("`{key}`"));
        format!("| `{}` | {key} | {} |\n", setting.variable, setting.meaning)
    };
    let rows: String = ALL.iter().map(row).collect();
    format!("| variable | in the file | what it says |\n|---|---|---|\n{rows}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_sets_what_parity_knows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "models = \"m\"\nllama = \"none\"\n").unwrap();
        let models = dir.path().join("m").display().to_string();
        let expected = [("PARITY_LLAMA", "none".to_owned()), ("PARITY_MODELS", models)];
        assert_eq!(read(&path).unwrap(), expected);
        for wrong in ["colour = \"red\"", "models = 3", "models"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains("models"), "{wrong}");
        }
    }

    #[test]
    fn the_table_is_the_one_in_the_docs() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
        assert!(std::fs::read_to_string(docs).unwrap().contains(&markdown()), "\n{}", markdown());
    }
}
