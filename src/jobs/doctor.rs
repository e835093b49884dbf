//! What is here, and what to install for what is not.

use std::ffi::OsStr;
use std::path::Path;

use serde::Serialize;

use crate::engine::device::{self, Device};
use crate::error::Result;
use crate::settings::{self, ALL};
use crate::{memory, record, references};

/// One thing that parity can use.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What it is.
    pub what: &'static str,
    /// Whether it is here and can be used.
    pub here: bool,
    /// What was found.
    pub found: String,
    /// What it is good for, and what to do where it is not here; null where it is, or where nothing is to be said.
    pub advice: Option<String>,
}

impl Finding {
    fn new(what: &'static str, found: std::result::Result<String, String>, advice: &str) -> Finding {
        let here = found.is_ok();
        let advice = (!here && !advice.is_empty()).then(|| advice.to_owned());
        Finding { what, here, found: found.unwrap_or_else(|why| why), advice }
    }
}

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    vec![
        Finding::new("parity", Ok(build()), ""),
        processor(),
        Finding::new("memory", Ok(room()), ""),
        gpu(),
        shipped(),
        llama(),
        models(),
        recordings(),
        Finding::new("settings", Ok(set()), ""),
    ]
}

/// Which ways of recording fit a program.
///
/// # Errors
/// A program that is not there.
pub fn examine_program(program: &OsStr) -> Result<Vec<Finding>> {
    let (fits, known) = record::ways(program)?;
    let mut findings: Vec<Finding> =
        fits.into_iter().map(|fit| Finding::new(fit.way, fit.command, "")).collect();
    if findings.iter().all(|finding| !finding.here) {
        const OTHERS: &str = "record another program of the same llama.cpp (docs/recording.md), or the one that can be built \
             into parity: parity record -m MODEL -p PROMPT";
        findings.push(Finding::new("otherwise", Ok(OTHERS.to_owned()), ""));
    }
    findings.extend(known.map(|what| Finding::new("known of it", Ok(what.to_owned()), "")));
    Ok(findings)
}

/// Version and features.
fn build() -> String {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("hub", cfg!(feature = "hub")),
        ("llama-cpp", cfg!(feature = "llama-cpp")),
    ];
    let with = |on: bool| features.iter().filter(|f| f.1 == on).map(|f| f.0).collect::<Vec<_>>().join(", ");
    let none = |names: String| if names.is_empty() { "none".to_owned() } else { names };
    format!("{}; features {}; left out: {}", env!("CARGO_PKG_VERSION"), none(with(true)), none(with(false)))
}

fn processor() -> Finding {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    #[cfg(target_arch = "x86_64")]
    let found =
        [("AVX-512", is_x86_feature_detected!("avx512f")), ("AVX2", is_x86_feature_detected!("avx2"))];
    #[cfg(not(target_arch = "x86_64"))]
    let found: [(&str, bool); 0] = [];
    let vector = found.iter().find(|(_, here)| *here).map_or("no AVX2: runs are slow", |(name, _)| name);
    let vector = if cfg!(target_arch = "x86_64") { vector } else { std::env::consts::ARCH };
    Finding::new("processor", Ok(format!("{threads} threads, {vector}")), "")
}

fn room() -> String {
    match memory::available() {
        Ok(Some((limit, bytes))) => format!("{} ({limit})", memory::size(bytes)),
        Ok(None) => "the system does not say".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn gpu() -> Finding {
    let gpus = (0..).take_while(|&ordinal| device::is_present(&Device::Cuda(vec![ordinal]))).count();
    let found = match gpus {
        0 => Err("none".to_owned()),
        n => Ok(format!("{n} that CUDA sees")),
    };
    Finding::new(
        "NVIDIA GPU",
        found,
        "not needed; for --device cuda: a GPU of the Turing generation or later and driver 525 or later",
    )
}

fn shipped() -> Finding {
    let found = references::default_model()
        .map(|path| path.display().to_string())
        .map_err(|_| "not found".to_owned());
    Finding::new(
        "shipped model and dumps",
        found,
        "for runs without -m: the folder reference-dumps of the repository, here or named by PARITY_REFERENCE_DUMPS",
    )
}

fn llama() -> Finding {
    let found = match references::program() {
        None => Err("none".to_owned()),
        Some(path) => match record::can_record(&path) {
            Ok(()) => Ok(path.display().to_string()),
            Err(error) => Err(error.to_string().replace('\n', "; ")),
        },
    };
    Finding::new(
        "llama.cpp to record with",
        found,
        "not needed for recorded references; else `llama-completion` on the PATH, or another program of llama.cpp named \
         by PARITY_LLAMA; prebuilt ones: https://github.com/ggml-org/llama.cpp/releases",
    )
}

fn models() -> Finding {
    let found = match std::env::var_os(references::MODELS_VARIABLE) {
        None => Err("PARITY_MODELS is not set".to_owned()),
        Some(folder) => match count(Path::new(&folder)) {
            Ok(n) => Ok(format!("{n} GGUF files in {}", Path::new(&folder).display())),
            Err(error) => Err(format!("{}: {error}", Path::new(&folder).display())),
        },
    };
    Finding::new(
        "folder of models",
        found,
        "not needed; with it, `parity audit DUMP` finds the model of a dump, and suites can name models",
    )
}

fn count(folder: &Path) -> std::io::Result<usize> {
    let is_model = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|ext| ext == "gguf");
    Ok(std::fs::read_dir(folder)?.flatten().filter(is_model).count())
}

fn recordings() -> Finding {
    let found = match references::kept() {
        None => Err("no folder: neither PARITY_CACHE nor HOME is set".to_owned()),
        Some(folder) => Ok(format!(
            "{}{}",
            folder.display(),
            if folder.is_dir() { "" } else { ", made when it is needed" }
        )),
    };
    Finding::new(
        "folder of kept recordings",
        found,
        "for references that are recorded once: name one with PARITY_CACHE",
    )
}

/// The file of settings, and what is set.
fn set() -> String {
    let file = settings::file().filter(|path| path.is_file());
    let file = file.map_or("no file of settings".to_owned(), |path| path.display().to_string());
    let value = |name: &str| Some(format!("{name}={}", std::env::var_os(name)?.to_string_lossy()));
    let values: Vec<String> = ALL.iter().filter_map(|setting| value(setting.variable)).collect();
    if values.is_empty() {
        format!("{file}; no variable is set")
    } else {
        format!("{file}; {}", values.join(" "))
    }
}
