//! `parity record` beside other libraries that are preloaded and stand in for the same function. SKIP without a C
//! compiler, an error where `PARITY_REQUIRE_CXX=1`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles one of tests/record/preload; `false` (said) without a compiler.
fn compile(name: &str, dir: &Path, flags: &[&str], out: &str) -> bool {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/record/preload").join(name);
    let mut command = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    command.current_dir(dir).args(["-O1", "-fPIC", "-Wall", "-Werror", "-o", out]).arg(source).args(flags);
    let Ok(output) = command.output() else {
        assert!(std::env::var_os("PARITY_REQUIRE_CXX").is_none_or(|v| v != "1"), "no C compiler");
        eprintln!("SKIP: no C compiler");
        return false;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

/// The program, its library and the shim, in a folder; `None` (said) without a compiler.
fn built() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let all = compile("library.c", at, &["-shared"], "libreal.so")
        && compile("shim.c", at, &["-shared", "-ldl"], "libshim.so")
        && compile("program.c", at, &["-L.", "-lreal", "-ldl", "-Wl,-rpath,$ORIGIN"], "program");
    all.then_some(dir)
}

/// What the program prints, recorded with `preload` in the environment.
fn recorded(dir: &Path, program: PathBuf, preload: Option<PathBuf>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.args(["record", "-o"]).arg(dir.join("out")).arg("--").arg(program);
    preload.map(|library| command.env("LD_PRELOAD", library));
    let output = command.output().unwrap();
    // Nothing of this library can be recorded, which is said and is no judgement.
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn each_library_is_called_once_for_each_graph() {
    let Some(dir) = built() else { return };
    let at = dir.path();
    assert_eq!(recorded(at, at.join("program"), None), "library 2 shim 0\n");
    // parity's library first, the shim behind it.
    assert_eq!(recorded(at, at.join("program"), Some(at.join("libshim.so"))), "library 2 shim 2\n");
    // The shim first, as a wrapper script of the user's may have it.
    let script = at.join("wrapped");
    let text = format!("#!/bin/sh\nLD_PRELOAD={0}/libshim.so:$LD_PRELOAD exec {0}/program\n", at.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(recorded(at, script, None), "library 2 shim 2\n");
}
