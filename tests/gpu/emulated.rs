//! The engine on a driver that runs everything on the CPU (`kernels/host/driver.cpp`), as late as a GPU may: what is found
//! with a held reference is that of the step also where events of a graph are marked late, and where no graph can be made.

use std::process::Command;

use crate::{cxx, root};

/// Set for tests that run on it: each launch takes long.
const VARIABLE: &str = "PARITY_EMULATED";
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

#[test]
fn held_references_on_a_driver_that_is_late() {
    if is_emulated() {
        return;
    }
    if cxx::compiler().is_none() {
        return cxx::skip("no C++ compiler to build the driver with");
    }
    let folder = tempfile::tempdir().unwrap();
    cxx::library(&root().join("kernels/host/driver.cpp"), &folder.path().join("libcuda.so.1"))
        .unwrap_or_else(|error| panic!("the driver does not compile for the host:\n{error}"));
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
