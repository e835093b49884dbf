//! The ways in for other people's engines: include/parity_dump.h under C and C++ compilers, the example engine
//! in C++, and the Python package without torch. What is not here is said: SKIP, or an error where
//! `PARITY_REQUIRE_CXX=1` or `PARITY_REQUIRE_PYTHON=1`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use parity_dump::{Checkpoint, Dump, Element};
use serde_json::Value;

/// Every warning is an error: a header is compiled with other people's flags.
const STRICT: [&str; 6] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wshadow", "-Wconversion"];

/// One of the ways to compile the header.
#[derive(Clone, Copy, Debug)]
struct Language {
    name: &'static str,
    cpp: bool,
    standard: &'static str,
    /// With `PARITY_DUMP_CUDA`, on a CUDA whose device is the host.
    cuda: bool,
}

const LANGUAGES: [Language; 4] = [
    Language { name: "c", cpp: false, standard: "-std=c99", cuda: false },
    Language { name: "c with cuda", cpp: false, standard: "-std=c99", cuda: true },
    Language { name: "c++", cpp: true, standard: "-std=c++11", cuda: false },
    Language { name: "c++ with cuda", cpp: true, standard: "-std=c++20", cuda: true },
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Says that a test was left out; an error where `variable` forbids that.
fn skip(variable: &str, why: &str) {
    assert!(std::env::var_os(variable).is_none_or(|value| value != "1"), "{why}");
    eprintln!("SKIP: {why}");
}

/// The C or C++ compiler (`CC`, `CXX`, or the system's), if it runs; `None` (said) where it does not.
fn compiler(cpp: bool) -> Option<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut build = cc::Build::new();
    build.cpp(cpp).target(&target).host(&target).opt_level(2).cargo_metadata(false);
    let path = build.try_get_compiler().ok().map(|compiler| compiler.path().to_owned());
    let runs = |path: &PathBuf| {
        let version = Command::new(path).arg("--version").output();
        cfg!(target_os = "linux") && version.is_ok_and(|output| output.status.success())
    };
    let found = path.filter(runs);
    if found.is_none() {
        skip("PARITY_REQUIRE_CXX", "no C and C++ compiler");
    }
    found
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// tests/record/engines/header.c, compiled into `dir`; `None` (said) without a compiler.
fn header(language: Language, dir: &Path) -> Option<PathBuf> {
    let program = dir.join(language.name.replace(' ', "-"));
    let mut command = Command::new(compiler(language.cpp)?);
    command.args(["-x", if language.cpp { "c++" } else { "c" }, language.standard, "-O1"]).args(STRICT);
    if language.cuda {
        command.arg("-DPARITY_DUMP_CUDA").arg("-I").arg(root().join("tests/record/engines/cuda_on_host"));
    }
    command.arg("-I").arg(root().join("include")).arg(root().join("tests/record/engines/header.c"));
    succeed(command.arg("-o").arg(&program));
    Some(program)
}

/// The programs of all languages, compiled once.
fn headers() -> &'static [(Language, PathBuf)] {
    static BUILT: OnceLock<Vec<(Language, PathBuf)>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap().keep();
        LANGUAGES.iter().filter_map(|&language| Some((language, header(language, &dir)?))).collect()
    })
}

fn id(id: &str) -> Checkpoint {
    id.parse().unwrap()
}

fn counting(from: usize, count: usize) -> Vec<f32> {
    (from..from + count).map(|i| i as f32).collect()
}

/// Runs the built program, `parity COMMAND … --format json`.
fn parity(arguments: &[&str], code: i32) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(root()).args(arguments).args(["--format", "json"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command:?}\n{said}");
    serde_json::from_slice(&output.stdout).expect("standard output is one JSON document")
}

#[test]
fn what_c_writes_is_what_is_read() {
    for (language, program) in headers() {
        let dir = tempfile::tempdir().unwrap();
        succeed(Command::new(program).arg("two-steps").arg(dir.path()));
        let dump = Dump::open(dir.path()).unwrap();
        let manifest = dump.manifest();
        assert!(manifest.complete, "{language:?}");
        assert_eq!(manifest.producer.name, "header \"test\"");
        assert_eq!(manifest.producer.numerics.as_deref(), Some("f32"));
        assert_eq!(dump.tokens(), [312, 863, 2039, 7]);
        assert_eq!(manifest.steps[1].positions, [3]);
        let rows = |name: &str, positions: &[u32]| dump.gather(id(name), positions).unwrap();
        assert_eq!(rows("embed", &[0, 1, 2, 3]), counting(0, 16));
        assert_eq!(rows("blk.0.ffn_norm", &[0, 1, 2]), counting(1, 6));
        assert_eq!(rows("blk.11.ffn_norm", &[0, 1, 2]), counting(1, 6));
        assert_eq!(dump.get(id("blk.11.ffn_norm")).unwrap().parts()[0].element, Element::Bf16);
        // (H, T, E) = (2, 3, 4) as (T, H, E)
        let heads = [counting(0, 4), counting(12, 4), counting(4, 4), counting(16, 4)].concat();
        assert_eq!(rows("blk.0.q_rope", &[0, 1]), heads);
        assert_eq!(dump.get(id("blk.0.q_rope")).unwrap().row_shape(), [2, 4]);
        assert_eq!(rows("blk.0.attn_out", &[1]), counting(10, 4));
        assert_eq!(rows("blk.0.ffn_out", &[1]), [1., 4., 7., 10.]);
        assert_eq!(dump.get(id("blk.0.attn_probs")).unwrap().row_shape(), [2, 3]);
        assert_eq!(dump.get(id("logits")).unwrap().positions().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(rows("logits", &[2, 3]), counting(100, 10));
        let device = dump.gather(id("blk.0.attn_norm"), &[3]);
        assert_eq!(device, language.cuda.then(|| counting(7, 4)));
        parity(&["inspect", dir.path().to_str().unwrap()], 0);
    }
}

#[test]
fn a_header_grows_beyond_what_was_reserved() {
    for (_, program) in headers() {
        let dir = tempfile::tempdir().unwrap();
        succeed(Command::new(program).arg("many").arg(dir.path()));
        let dump = Dump::open(dir.path()).unwrap();
        for layer in 0..4000 {
            let values = dump.gather(id(&format!("blk.{layer}.ffn_out")), &[0]).unwrap();
            assert_eq!(values, counting(layer, 3));
        }
        assert_eq!(dump.gather(id("blk.5.ffn_out"), &[1]).unwrap(), counting(0, 3));
    }
}

/// Mistakes of a caller, and what is said of them.
const MISTAKES: [(&str, &str); 13] = [
    ("no-step", "q: no step is open: call parity_dump_begin_step first"),
    ("no-end", "end_step: no step is open"),
    ("no-token", "begin_step: a step has one token or more"),
    ("twice-begun", "begin_step: the step before is not finished"),
    ("shape", "blk.0.q: expected 2 rows on axis 0, one for each position; found shape (3, 2, 4)"),
    ("empty", "found shape (2, 0, 4)"),
    ("name", "`q rope` is no name for a tensor: one without blanks, quotes and slashes, such as q_rope"),
    ("twice", "blk.0.q: a second time in one step"),
    ("rows", "logits: 9 is no position of the step"),
    ("device", "v: invalid argument"),
    ("unfinished", "close: the last step is not finished"),
    ("changes", "blk.0.q: its rows change their shape from step to step"),
    ("none", ""),
];

#[test]
fn a_mistake_in_c_is_said_and_no_dump_is_complete() {
    for (language, program) in headers() {
        for (mistake, message) in MISTAKES.iter().filter(|(name, _)| *name != "device" || language.cuda) {
            let dir = tempfile::tempdir().unwrap();
            let output = Command::new(program).arg(mistake).arg(dir.path()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(i32::from(!message.is_empty())), "{mistake}: {said}");
            assert!(said.contains(message), "{mistake}: {said}");
            assert_eq!(said.lines().count(), usize::from(!message.is_empty()), "one error: {said}");
            assert_eq!(Dump::open(dir.path()).unwrap().manifest().complete, message.is_empty(), "{mistake}");
            let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
            assert!(names.into_iter().all(|name| !name.to_string_lossy().contains(".part")), "{mistake}");
        }
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    for (_, program) in headers() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        for folder in [file.join("out"), file, dir.path().join("no/such")] {
            let output = Command::new(program).arg("two-steps").arg(&folder).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1));
            assert!(said.contains(folder.to_str().unwrap()) && said.contains("cannot be"), "{said}");
        }
    }
}

#[test]
fn a_second_dump_replaces_the_first() {
    for (_, program) in headers() {
        let dir = tempfile::tempdir().unwrap();
        for (scenario, steps) in [("two-steps", 2), ("unfinished", 0), ("two-steps", 2)] {
            let _ = Command::new(program).arg(scenario).arg(dir.path()).output().unwrap();
            assert_eq!(Dump::open(dir.path()).unwrap().manifest().steps.len(), steps);
            let files = std::fs::read_dir(dir.path()).unwrap().count();
            assert_eq!(files, steps + 1, "the manifest and the steps of the last dump");
        }
    }
}

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const REFERENCE: &str = "reference-dumps/qwen2-tiny-py-F16/read_lines";

/// What the example engine can be told to do wrong, and what parity says of it.
const BUGS: [(&str, &str, &str); 6] = [
    ("norm-eps", "blk.0.attn_norm", "norm.eps"),
    ("rope-base", "blk.0.q_rope", "rope.base"),
    ("decode-position", "blk.0.q_rope", "rope.decode_shift"),
    ("no-v-bias", "blk.0.v", "linear.no_bias"),
    ("kv-head", "blk.0.attn_ctx", "attn.kv_head"),
    ("gelu", "blk.0.ffn_act", "ffn.gelu"),
];

#[test]
fn the_example_engine_is_at_parity_and_its_bugs_are_named() {
    let Some(compiler) = compiler(true) else { return };
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("engine");
    let source = root().join("examples/engines/cpp/engine.cpp");
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root().join("include"));
    succeed(command.arg(source).arg("-o").arg(&program));
    let out = dir.path().join("out");
    let dump = out.to_str().unwrap();
    let engine = |bug: &[&str]| {
        let mut command = Command::new(&program);
        command.current_dir(root()).args([MODEL, "312,863,2039,1444,1518", "--decode", "8", "--dump", dump]);
        String::from_utf8(succeed(command.args(bug)).stdout).unwrap()
    };
    // The tokens that llama.cpp chose.
    assert_eq!(engine(&[]), "285,314,511,435,408,280,285,314\n");
    // Its matmuls add the bias as they store: what is before it cannot be dumped.
    let report = parity(&["diff", dump, REFERENCE, "-m", MODEL], 0);
    assert_eq!(report["verdict"], "parity");
    for (bug, checkpoint, fault) in BUGS {
        engine(&["--bug", bug]);
        let report = parity(&["audit", dump, "-m", MODEL, "--allow-missing"], 1);
        let first = &report["first_divergence"];
        assert_eq!(first["checkpoint"], checkpoint, "{bug}");
        assert_eq!(first["diagnosis"][0]["fault"], fault, "{bug}");
    }
}

/// `PARITY_PYTHON`, or python3, if it has numpy.
fn python() -> Option<PathBuf> {
    let program = std::env::var_os("PARITY_PYTHON").map_or(PathBuf::from("python3"), PathBuf::from);
    let has_numpy = Command::new(&program).args(["-c", "import numpy"]).output();
    if has_numpy.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    skip("PARITY_REQUIRE_PYTHON", "no Python 3 with numpy (PARITY_PYTHON names one)");
    None
}

#[test]
fn the_python_package_passes_its_own_tests() {
    let Some(python) = python() else { return };
    let mut command = Command::new(python);
    command.args(["-m", "unittest", "discover", "-s", "tests", "-p", "test_save.py"]);
    command.current_dir(root().join("python")).env("PYTHONPATH", ".").env("PYTHONDONTWRITEBYTECODE", "1");
    let said = succeed(&mut command).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("\nOK") && !said.contains("Ran 0 tests"), "{said}");
}

#[test]
fn what_python_writes_is_what_is_read() {
    let Some(python) = python() else { return };
    let dir = tempfile::tempdir().unwrap();
    let script = "import sys, numpy as np, parity_dump\n\
                  x = np.arange(24, dtype=np.float32).reshape(3, 8)\n\
                  q = x.reshape(3, 2, 4).transpose(1, 0, 2)[None]\n\
                  parity_dump.save([{'embed': x[:2], 'blk.0.q_rope': q[:, :, :2], 'logits': x[1:2]},\n\
                  {'embed': x[2:], 'blk.0.q_rope': q[:, :, 2:], 'logits': x[2:]}], sys.argv[1],\n\
                  tokens=[5, 6, 7], producer='mine', numerics='f32', layouts={'q_rope': 'BHTE'})";
    let mut command = Command::new(python);
    command.args(["-c", script]).arg(dir.path()).env("PYTHONPATH", root().join("python"));
    succeed(command.env("PYTHONDONTWRITEBYTECODE", "1"));
    let dump = Dump::open(dir.path()).unwrap();
    assert!(dump.manifest().complete);
    assert_eq!(dump.gather(id("embed"), &[0, 1, 2]).unwrap(), counting(0, 24));
    assert_eq!(dump.gather(id("blk.0.q_rope"), &[0, 1, 2]).unwrap(), counting(0, 24));
    assert_eq!(dump.gather(id("logits"), &[1, 2]).unwrap(), counting(8, 16));
    parity(&["inspect", dir.path().to_str().unwrap()], 0);
}
