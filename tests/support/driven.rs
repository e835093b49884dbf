//! A real llama.cpp to record: shared libraries of a release, and `scripts/record/driver.c` that evaluates tokens with them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Folder of the shared libraries of a llama.cpp release.
pub const LIBRARIES: &str = "PARITY_TEST_LLAMA";
/// The same of an older release.
pub const OLDER: &str = "PARITY_TEST_LLAMA_OLDER";

/// Tokens of `def read_lines(path):` and of what the shipped model says after it: prompt and answer.
pub const PROMPT: [&str; 5] = ["312", "863", "2039", "1444", "1518"];
pub const ANSWER: [&str; 4] = ["285", "314", "511", "435"];

/// The libraries that an environment variable names; `None` (said) without it, or without a C compiler.
pub fn libraries(variable: &str) -> Option<PathBuf> {
    let folder = env::var_os(variable).map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        eprintln!("SKIP: {variable} names no folder of a llama.cpp's shared libraries (.ci/run has one)");
    }
    folder.filter(|_| driver().is_some())
}

/// The driver, built once for all tests of a process.
pub fn driver() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<(tempfile::TempDir, PathBuf)>> = OnceLock::new();
    let build = || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("driver");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/record/driver.c");
        let mut command = Command::new(env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
        command.args(["-O1", "-o"]).arg(&path).arg(source).arg("-ldl");
        let Ok(output) = command.output() else {
            assert!(env::var_os("PARITY_REQUIRE_CXX").is_none_or(|v| v != "1"), "no C compiler");
            eprintln!("SKIP: no C compiler");
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some((dir, path))
    };
    BUILT.get_or_init(build).as_ref().map(|(_, path)| path.as_path())
}

/// Another program of `scripts/record`, which is built into a folder; `None` (said) without a C compiler.
pub fn program(name: &str, dir: &Path) -> Option<PathBuf> {
    driver()?;
    let (path, source) = (dir.join(name), Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/record"));
    let mut command = Command::new(env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    command.args(["-std=gnu17", "-O1", "-o"]).arg(&path).arg(source.join(format!("{name}.c"))).arg("-ldl");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(path)
}

/// The driver as a program that is linked with the libraries of a folder: the system's loader binds it to their functions.
pub fn linked(libraries: &Path, dir: &Path) -> PathBuf {
    let path = dir.join("linked");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/record/driver.c");
    let entries: Vec<PathBuf> =
        std::fs::read_dir(libraries).unwrap().flatten().map(|entry| entry.path()).collect();
    let named = |start: &str| {
        let is = |path: &&PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(start);
        entries.iter().find(is).expect("a llama.cpp's folder has it")
    };
    let mut command = Command::new(env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    command.args(["-O1", "-DLINKED", "-o"]).arg(&path).arg(source).arg("-Wl,--no-as-needed");
    command.args(["libllama.", "libggml."].map(named));
    command.args(["-ldl", "-Wl,-z,now"]);
    command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-Wl,--allow-shlib-undefined");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

/// The shipped model in a quantisation.
pub fn model(quant: &str) -> String {
    format!("reference-dumps/models/qwen2-tiny-py-{quant}.gguf")
}

/// Runs a script; `None` (said) without a Python that has numpy and gguf.
pub fn python(script: &[&str]) -> Option<()> {
    let Some(python) = env::var_os("PARITY_PYTHON") else {
        assert!(env::var_os("PARITY_REQUIRE_PYTHON").is_none_or(|value| value != "1"), "no Python");
        eprintln!("SKIP: PARITY_PYTHON names no Python with numpy and gguf (.ci/run has one)");
        return None;
    };
    let done = Command::new(python).args(script).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(())
}
