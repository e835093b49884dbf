//! `parity gate` as CI runs it: exit codes, baselines, shards, and the time that 200 cases take.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use tempfile::TempDir;

use crate::support::program;
use crate::support::samples::sample;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const EPOCH: &str = "1795219200";

fn parity() -> Command {
    let mut command = program::parity(&[]);
    command.env("SOURCE_DATE_EPOCH", EPOCH);
    command
}

/// A folder with a suite over the shipped model.
struct Folder(TempDir);

impl Folder {
    fn new(cases: &str) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write(cases);
        folder
    }

    fn write(&self, cases: &str) {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
        let head = format!(
            "name = \"test\"\nbaseline = \"baseline.json\"\n[models]\ntiny = {model:?}\nabsent = \"no.gguf\"\n\
             [prompts]\nread_lines = \"def read_lines(path):\"\n"
        );
        std::fs::write(self.path("suite.toml"), head + cases).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn gate(&self, flags: &[&str]) -> (i32, String) {
        let output = parity().arg("gate").arg(self.path("suite.toml")).args(flags).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    }
}

const CLEAN: &str = "[[case]]\nname = \"clean\"\nmodel = \"tiny\"\nprompt = \"read_lines\"\nn_predict = 2\n";

#[test]
fn a_baseline_is_made_by_accept_and_never_by_a_failing_run() {
    let folder = Folder::new(CLEAN);
    let (code, text) = folder.gate(&[]);
    assert_eq!(code, 2, "no baseline yet: {text}");
    assert!(text.contains("next: parity gate") && text.contains("suite.toml --accept"), "{text}");
    let (code, text) = folder.gate(&["--accept"]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(folder.gate(&[]).0, 0);
    let accepted = std::fs::read_to_string(folder.path("baseline.json")).unwrap();
    // A fault that is not expected: the run fails, and the baseline stays as it is.
    folder.write(&CLEAN.replace("n_predict = 2", "n_predict = 2\nchunk = 1\nnumerics = \"f32\""));
    std::fs::write(folder.path("baseline.json"), shrunk(&accepted)).unwrap();
    let (code, text) = folder.gate(&[]);
    assert_eq!(code, 1, "a baseline ten times better than today: {text}");
    assert!(text.contains("times)"), "{text}");
    let (code, text) = folder.gate(&["--accept"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("stays as it is"), "{text}");
    assert_eq!(std::fs::read_to_string(folder.path("baseline.json")).unwrap(), shrunk(&accepted));
    std::fs::write(folder.path("old.json"), shrunk(&accepted)).unwrap();
    let since = folder.path("old.json");
    let (code, text) = folder.gate(&["--since", since.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(
        text.contains("local error") || text.contains("distance"),
        "the checkpoint that moved is named: {text}"
    );
}

#[test]
fn a_case_that_the_suite_lost_is_missing_whatever_was_chosen() {
    let other = CLEAN.replace("\"clean\"", "\"other\"");
    let folder = Folder::new(&format!("{CLEAN}{other}"));
    assert_eq!(folder.gate(&["--accept"]).0, 0);
    assert_eq!(folder.gate(&["--case", "clean"]).0, 0, "what was not chosen is not missing");
    folder.write(CLEAN);
    let shards = ["one", "two"].map(|name| folder.path(name));
    for (flags, at) in [(["--case", "clean"], &shards[0]), (["--shard", "1/1"], &shards[1])] {
        let (code, text) = folder.gate(&[&flags[..], &["--report", at.to_str().unwrap()]].concat());
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("UNDECIDED other") && text.contains("the suite has no such case"), "{text}");
    }
    let results = std::fs::read_to_string(shards[1].join("gate.json")).unwrap();
    assert!(results.contains("missing-case"), "{results}");
    let merged = parity().args(["gate", "merge"]).arg(&shards[1]).output().unwrap();
    assert_eq!(merged.status.code(), Some(2));
    // Who accepts the suite as it is takes it out.
    assert_eq!(folder.gate(&["--accept"]).0, 0);
    assert_eq!(folder.gate(&[]).0, 0);
}

/// Every number a tenth of what it is.
fn shrunk(baseline: &str) -> String {
    let mut value: serde_json::Value = serde_json::from_str(baseline).unwrap();
    fn divide(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Array(items) => items.iter_mut().for_each(divide),
            serde_json::Value::Object(fields) => {
                fields.iter_mut().filter(|(key, _)| *key != "runs").for_each(|(_, value)| divide(value));
            }
            serde_json::Value::Number(number) => *value = (number.as_f64().unwrap() / 10.0).into(),
            _ => {}
        }
    }
    divide(&mut value);
    value.to_string()
}

#[test]
fn exit_codes_fit_git_bisect() {
    let allowed = "allow = [\"missing-baseline\"]\n";
    let clean = format!("{CLEAN}{allowed}");
    assert_eq!(Folder::new(&clean).gate(&["--bisect"]).0, 0);
    let absent = clean.replace("model = \"tiny\"", "model = \"absent\"");
    let folder = Folder::new(&absent);
    let (code, text) = folder.gate(&[]);
    assert!(code == 2 && text.contains("no.gguf; PARITY_MODELS, the folder"), "a missing model: {text}");
    assert_eq!(folder.gate(&["--bisect"]).0, 125, "a revision that cannot be tested");
    let injected =
        format!("{clean}inject = \"rope.base@2\"\nexpect = \"divergence\"\nfault = \"injected\"\n");
    let (code, text) = Folder::new(&injected).gate(&[]);
    assert_eq!(code, 0, "the injected fault is found: {text}");
    let mistaken = injected.replace("fault = \"injected\"", "fault = \"norm.eps\"");
    assert_eq!(Folder::new(&mistaken).gate(&["--bisect"]).0, 1);
}

#[test]
fn the_shipped_suite_passes() {
    let out = tempfile::tempdir().unwrap();
    let output = parity()
        .args(["gate", "suites/shipped.toml", "--jobs", "2", "--report"])
        .arg(out.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let junit = std::fs::read_to_string(out.path().join("junit.xml")).unwrap();
    let parsed = quick_junit::Report::deserialize_from_str(&junit).unwrap();
    assert_eq!((parsed.failures, parsed.errors), (0, 0));
    assert!(parsed.tests > 30);
}

/// Processor time of all programs that were spawned so far: what wall time would be on one idle core. Other
/// tests' programs count in, so that it is rather too much.
fn cpu_seconds() -> f64 {
    // SAFETY: zeros are a valid rusage, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage
    };
    [usage.ru_utime, usage.ru_stime].iter().map(|t| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6).sum()
}

/// Two hundred cases: 100 lengths of prefill pieces in two arithmetics. In a sample fewer.
fn two_hundred() -> String {
    let chunks = sample("lengths of pieces", 20, 1..=100);
    let chunks: Vec<String> = chunks.iter().map(i32::to_string).collect();
    format!(
        "{CLEAN}allow = [\"missing-baseline\"]\nnumerics = [\"f32\", \"llama-cpu\"]\nchunk = [{}]\n",
        chunks.join(", ")
    )
}

#[test]
fn two_hundred_cases_take_less_than_a_minute_and_shards_add_up() {
    let folder = Folder::new(&two_hundred());
    let at = |name: &str| folder.path(name).to_str().unwrap().to_owned();
    let start = cpu_seconds();
    let (code, text) = folder.gate(&["--jobs", "2", "--report", &at("whole")]);
    let took = (cpu_seconds() - start) / 2.0;
    println!("{took} s on two cores");
    assert_eq!(code, 0, "{text}");
    assert!(took < 60.0, "{took} s");
    for k in 1..=3 {
        let shard = format!("{k}/3");
        assert_eq!(
            folder.gate(&["--shard", &shard, "--jobs", "2", "--report", &at(&format!("part{k}"))]).0,
            0
        );
    }
    let parts = [at("part2"), at("part3"), at("part1")];
    parity().args(["gate", "merge"]).args(&parts).args(["--report", &at("merged")]).assert().code(0);
    for name in ["gate.json", "junit.xml", "summary.md"] {
        let read = |dir: &str| std::fs::read_to_string(folder.path(dir).join(name)).unwrap();
        assert_eq!(read("whole"), read("merged"), "{name}");
    }
    parity().args(["gate", "merge"]).args(&parts[..2]).assert().code(2);
}

#[test]
fn reports_are_the_same_bytes_and_can_be_compared() {
    let out = tempfile::tempdir().unwrap();
    let run = |name: &str, flags: &[&str]| {
        let dir = out.path().join(name);
        let mut command = parity();
        command.args(["run", "-p", "def read_lines(path):", "--report"]).arg("out").args(flags);
        // The command line is part of the report: both runs have the same one, in folders of their own.
        std::fs::create_dir_all(&dir).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        command
            .current_dir(&dir)
            .env("PARITY_REFERENCE_DUMPS", root.join("reference-dumps"))
            .output()
            .unwrap();
        dir.join("out")
    };
    let (first, second) = (run("first", &[]), run("second", &[]));
    for name in ["report.json", "report.csv", "report.html", "junit.xml", "summary.md"] {
        let read = |dir: &Path| std::fs::read_to_string(dir.join(name)).unwrap();
        assert!(read(&first) == read(&second), "{name} differs between two runs");
    }
    let broken = run("broken", &["--inject", "rope.base@2"]);
    parity()
        .arg("diff-reports")
        .args([&first, &second])
        .assert()
        .code(0)
        .stdout(predicates::str::starts_with("SAME"));
    parity()
        .arg("diff-reports")
        .args([&first, &broken])
        .assert()
        .code(1)
        .stdout(predicates::str::starts_with("WORSE, first at blk.2."));
    parity()
        .arg("diff-reports")
        .args([&broken, &first])
        .assert()
        .code(0)
        .stdout(predicates::str::starts_with("BETTER"));
    parity().arg("diff-reports").args([&first, &broken]).args(["--allow", "*"]).assert().code(0);
    let missing = out.path().join("nothing");
    parity().arg("diff-reports").args([&first, &missing]).assert().code(2);
}
