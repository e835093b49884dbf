//! The engine on a driver that runs everything on the CPU (`kernels/host/driver.cpp`), as late as a GPU may: what is found
//! with a held reference is that of the step also where events of a graph are marked late, and where no graph can be made.

use std::path::Path;
use std::process::Command;

use crate::root;

/// Set for tests that run on it: each launch takes long.
pub const VARIABLE: &str = "PARITY_EMULATED";
/// Token rows then, at most: more than are decoded one by one.
const ROWS_MAX: usize = 10;

/// Whether this process runs on the driver.
pub fn is_emulated() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// `rows`, or fewer where they are computed on the CPU.
pub fn few(rows: usize) -> usize {
    if is_emulated() { rows.min(ROWS_MAX) } else { rows }
}

/// Builds the driver as the library that a program looks for.
fn build(folder: &Path) -> Result<(), String> {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas"])
        .args(["-fno-strict-aliasing", "-ffp-contract=off"])
        .arg(root().join("kernels/host/driver.cpp"))
        .arg("-o")
        .arg(folder.join("libcuda.so.1"))
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn held_references_on_a_driver_that_is_late() {
    if is_emulated() || !cfg!(target_os = "linux") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    if let Err(error) = build(folder.path()) {
        let required = std::env::var_os("PARITY_REQUIRE_CXX").is_some_and(|value| value == "1");
        assert!(!required, "{error}");
        eprintln!("SKIP: no C++ compiler that builds the driver");
        return;
    }
    for (events, graphs) in [("late", ""), ("", "none")] {
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--test-threads=1", "--nocapture", "gpu::held::what_is"])
            .env(VARIABLE, "1")
            .env("PARITY_REQUIRE_GPU", "1")
            .env("LD_LIBRARY_PATH", folder.path())
            .env("PARITY_DRIVER_EVENTS", events)
            .env("PARITY_DRIVER_GRAPHS", graphs)
            .output()
            .unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(
            run.status.success() && said.contains("2 passed"),
            "events {events}, graphs {graphs}: {said}"
        );
        // What was tested is what was meant.
        let launched_no_graph = said.contains(" 0 graphs");
        assert_eq!(launched_no_graph, graphs == "none", "{said}");
    }
}
