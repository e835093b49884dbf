//! Libraries of `kernels/host`: the kernels, or a driver over them, compiled for the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Compiles `source` into the library `out`. An error is the compiler's.
pub fn library(source: &Path, out: &Path) -> Result<(), String> {
    let compiler = compiler().ok_or("no C++ compiler")?;
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas"])
        // The kernels read one type through another, as CUDA allows; and products are not to be fused
        // in ways that a GPU would not.
        .args(["-fno-strict-aliasing", "-ffp-contract=off"])
        // Several of these libraries live in one process: each with variables of its own.
        .args(["-fno-gnu-unique", "-Wl,-Bsymbolic"])
        // Fibers jump from stack to stack, which some distributions' default takes for an attack.
        .args(["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"])
        .arg(source)
        .arg("-o")
        .arg(out)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Says that a test was left out for want of a compiler; an error where `PARITY_REQUIRE_CXX=1` forbids that.
pub fn skip(why: &str) {
    assert!(std::env::var_os("PARITY_REQUIRE_CXX").is_none_or(|value| value != "1"), "{why}");
    eprintln!("SKIP: {why}");
}

/// g++ or what `CXX` names, if it runs. (Fibers need GNU/Linux; `_Float16` a compiler of this decade.)
pub fn compiler() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
            let mut build = cc::Build::new();
            build.cpp(true).target(&target).host(&target).opt_level(2).cargo_metadata(false);
            let path = build.try_get_compiler().ok()?.path().to_owned();
            let runs = Command::new(&path).arg("--version").output().ok()?.status.success();
            (cfg!(target_os = "linux") && runs).then_some(path)
        })
        .clone()
}
