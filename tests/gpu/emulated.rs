//! The engine on a driver that runs everything on the CPU (`kernels/host/driver.cpp`), as late as GPUs may be: what is found
//! with a held reference is that of the step also where events of a graph are marked late, and where no graph can be made;
//! two GPUs have the bits of one; and tokens that the GPU chooses are those that the host would.

use std::process::{Child, Command, Stdio};

use crate::samples::sample;
use crate::{NUMERICS, cxx, root};

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

/// All arithmetics, or the fast one alone where a launch takes long.
pub fn arithmetics() -> &'static [&'static str] {
    if is_emulated() { &["f16"] } else { &NUMERICS }
}

/// Tests that run on the driver, how many there are, when its events are marked, what graphs it makes, and whether what
/// computes is as late as the rest or ahead of it.
const RUNS: [(&str, usize, [&str; 3]); 8] = [
    ("held::what_is_not_compared", 1, ["late", "", ""]),
    ("held::what_is_not_compared", 1, ["", "none", "eager"]),
    ("held::what_is_found", 1, ["late", "", ""]),
    ("held::what_is_found", 1, ["", "none", "eager"]),
    ("multiplier::products_of_several_lanes", 1, ["", "", ""]),
    ("cards::two_gpus", 1, ["late", "", ""]),
    ("the_gpu_chooses_the_tokens", 1, ["", "none", "eager"]),
    ("the_gpu_chooses_the_tokens", 1, ["late", "", ""]),
];

#[test]
fn on_a_driver_that_is_late() {
    if is_emulated() {
        return;
    }
    if cxx::compiler().is_none() {
        return cxx::skip("no C++ compiler to build the driver with");
    }
    let folder = tempfile::tempdir().unwrap();
    cxx::library(&root().join("kernels/host/driver.cpp"), &folder.path().join("libcuda.so"))
        .unwrap_or_else(|error| panic!("the driver does not compile for the host:\n{error}"));
    let runs = sample("tests on the driver", 2, RUNS);
    let run = |(tests, _, [events, graphs, streams]): &(&str, usize, [&str; 3])| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--test-threads=1", "--nocapture", tests])
            .env(VARIABLE, "1")
            .env("PARITY_REQUIRE_GPU", "1")
            .env("PARITY_REQUIRE_GPUS", "2")
            .env("LD_LIBRARY_PATH", folder.path())
            .env("PARITY_DRIVER_EVENTS", events)
            .env("PARITY_DRIVER_GRAPHS", graphs)
            .env("PARITY_DRIVER_STREAMS", streams)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = runs.iter().map(run).collect();
    for ((tests, n, [events, graphs, streams]), child) in runs.into_iter().zip(children) {
        let run = child.wait_with_output().unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(
            run.status.success() && said.contains(&format!("{n} passed")),
            "{tests}, events {events}, graphs {graphs}, streams {streams}: {said}"
        );
        // What was tested is what was meant: the driver tells how much it did.
        assert!(said.contains(" copies between GPUs"), "{tests} ran on another driver: {said}");
        // A step that also copies values to the host is no graph, nor is a single product.
        let is_single = ["what_is_not_compared", "multiplier"].iter().any(|one| tests.contains(one));
        let is_graph = graphs != "none" && !is_single;
        assert_eq!(said.contains(" 0 graphs"), !is_graph, "{said}");
        assert_eq!(said.contains(" 0 copies"), !tests.contains("two_gpus"), "{said}");
    }
}
