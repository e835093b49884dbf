//! `parity record --load`: ggml loads the recorder, and what is recorded is what is recorded by preload. SKIP where no shared
//! libraries of a llama.cpp are named (`PARITY_TEST_LLAMA`, `PARITY_TEST_LLAMA_OLDER`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use crate::support::driven::{ANSWER, LIBRARIES, OLDER, PROMPT, driver, libraries, linked, model};
use crate::support::program::{flat, manifest, output, parity};

/// A run of the driver: its flags of the environment, its batches, and flags of parity.
struct Run {
    environment: &'static [(&'static str, &'static str)],
    batches: &'static str,
    flags: &'static [&'static str],
}

const PLAIN: Run = Run { environment: &[], batches: "5", flags: &[] };
const RUNS: [Run; 4] = [
    PLAIN,
    Run { environment: &[], batches: "5", flags: &["--observe", "nodes"] },
    Run { environment: &[], batches: "3,2", flags: &["--own-rows", "--verify"] },
    // Sequences, copies, a rollback and a shift: calls of the program on its cache.
    Run {
        environment: &[("DRIVER_SEQUENCES", "3")],
        batches: "b0:5,1:3 c0>2 b0:1,1:1,2:1 r0@4 b0:2 s1@1,2 b1:1",
        flags: &[],
    },
];

/// Records a program that drives libraries, in this way.
fn record(program: &Path, libraries: &Path, out: &Path, run: &Run, way: &[&str]) {
    let mut command = parity(&["record", "-o"]);
    command.arg(out).args(way).args(run.flags).envs(run.environment.iter().copied());
    let at: [&OsStr; 2] = [libraries.as_os_str(), OsStr::new(run.batches)];
    command.arg("--").arg(program).args([at[0], OsStr::new(&model("Q4_K_M")), at[1]]);
    let done = command.args(PROMPT).args(ANSWER).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{way:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Files of a dump whose bytes have to be the same: all but what the manifest says of when it was made.
fn files(dump: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dump).unwrap().flatten();
    let mut files: Vec<(String, Vec<u8>)> = entries
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap()))
        .filter(|(name, _)| name != "manifest.json")
        .collect();
    files.sort();
    files
}

#[test]
fn what_ggml_loads_records_what_is_recorded_by_preload() {
    for variable in [LIBRARIES, OLDER] {
        let Some(libraries) = libraries(variable) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let program = linked(&libraries, dir.path());
        for (number, run) in RUNS.iter().enumerate() {
            let [preloaded, loaded] = [("preloaded", &[][..]), ("loaded", &["--load"])].map(|(name, way)| {
                let out = dir.path().join(format!("{name}-{number}"));
                record(&program, &libraries, &out, run, way);
                out
            });
            let [a, b] = [&preloaded, &loaded].map(|dump| files(dump));
            assert!(a.len() > 3, "{} files", a.len());
            assert!(a == b, "{variable}, {}: other bytes", run.batches);
            let [a, b] = [&preloaded, &loaded].map(|dump| {
                let mut manifest = manifest(dump);
                manifest.as_object_mut().unwrap().remove("provenance");
                manifest
            });
            assert_eq!(a, b);
            assert_eq!(b["complete"], true);
        }
    }
}

#[test]
fn functions_that_a_program_looks_up_itself_are_not_seen_and_its_graphs_are() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    record(driver().unwrap(), &libraries, &out, &PLAIN, &["--load"]);
    let manifest = manifest(&out);
    assert_eq!(manifest["tokens"].as_array().unwrap().len(), PROMPT.len() + ANSWER.len());
    // No row was added: the prompt has logits of its last token.
    assert_eq!(manifest["steps"].as_array().unwrap().len(), 1 + ANSWER.len());
    assert!(
        manifest["rows"]["logits"].as_array().is_some_and(|rows| rows.len() == 1 + ANSWER.len()),
        "{manifest}"
    );
}

#[test]
fn a_program_that_has_no_backends_loaded_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let (code, said) = output(&["record", "--load", "-o", out.to_str().unwrap(), "--", "true"]);
    assert_eq!(code, 2, "{said}");
    assert!(flat(&said).contains("one that did not load the recorder"), "{said}");
    assert!(flat(&said).contains("record without --load"), "{said}");
    let mut taken = parity(&["record", "--load", "-o"]);
    let done = taken.arg(&out).args(["--", "true"]).env("GGML_BACKEND_PATH", "libmine.so").output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("libmine.so") && said.contains("GGML_BACKEND_PATH is set already"), "{said}");
}

#[test]
fn the_doctor_says_which_way_fits_a_program() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let program = linked(&libraries, dir.path());
    let (code, said) = output(&["doctor", program.to_str().unwrap()]);
    assert_eq!(code, 0, "{said}");
    let said = flat(&said);
    for line in ["ok preloaded parity record -- ", "ok loaded by ggml parity record --load -- "] {
        assert!(said.contains(line), "{line}: {said}");
    }
}
