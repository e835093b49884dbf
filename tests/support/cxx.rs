//! Libraries of `kernels/host`: the kernels, or a driver over them, compiled for the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

/// How a library is compiled.
const OPTIONS: [&str; 11] = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-Wno-unknown-pragmas",
    // The kernels read one type through another, as CUDA allows; and products are not to be fused in ways that a GPU would not.
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    // Several of these libraries live in one process: each with variables of its own.
    "-fno-gnu-unique",
    "-Wl,-Bsymbolic",
    // Fibers jump from stack to stack, which some distributions' default takes for an attack.
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=0",
];

/// Compiles `source` into the library `out`, or takes what the same compiler made of the same text before, which is kept beside
/// what cargo builds. An error is the compiler's.
pub fn library(source: &Path, out: &Path) -> Result<(), String> {
    let compiler = compiler().ok_or("no C++ compiler")?;
    let told = |path: &Path, error| format!("{}: {error}", path.display());
    let text = run(Command::new(&compiler).args(OPTIONS).args(["-E", "-P"]).arg(source))?;
    let version = run(Command::new(&compiler).arg("--version"))?;
    let mut hash = Sha256::new();
    [OPTIONS.concat().as_bytes(), &version, &text].into_iter().for_each(|part| hash.update(part));
    let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libraries");
    let kept = folder.join(name).with_extension("so");
    if !kept.exists() {
        std::fs::create_dir_all(&folder).map_err(|error| told(&folder, error))?;
        // Whole or not there, also where two tests compile the same.
        let made = tempfile::NamedTempFile::new_in(&folder).map_err(|error| told(&folder, error))?;
        run(Command::new(&compiler).args(OPTIONS).arg("-o").arg(made.path()).arg(source))?;
        made.persist(&kept).map_err(|error| error.to_string())?;
    }
    std::fs::copy(&kept, out).map(drop).map_err(|error| told(out, error))
}

/// What a command prints. An error is what it says where it fails.
fn run(command: &mut Command) -> Result<Vec<u8>, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into())
    }
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
