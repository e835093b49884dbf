//! Files that do not mean well, and options without limits: refused, or shown so that they can only be read.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

use crate::support::program;

const PROMPT: &str = "def read_lines(path):";

fn parity(args: &[&str]) -> Command {
    let mut command = program::parity(args);
    command.timeout(std::time::Duration::from_secs(120));
    command
}

/// A dump whose manifest says what its maker chose: escapes, bells, ends of lines, commands to a CI runner.
fn obscene() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump").to_str().unwrap().to_owned();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--no-audit", "--dump", &path];
    parity(&run).assert().failure();
    let manifest = Path::new(&path).join("manifest.json");
    let mut value: serde_json::Value = serde_json::from_str(&fs::read_to_string(&manifest).unwrap()).unwrap();
    let evil = "x\u{1b}[2J\u{7}\u{9b}31m\n::error::owned\n##[set-env name=A]b\u{202e}";
    value["producer"]["name"] = evil.into();
    value["producer"]["version"] = evil.into();
    value["model"]["name"] = evil.into();
    value["model"]["file"] = evil.into();
    value["model"]["architecture"] = evil.into();
    fs::write(&manifest, value.to_string()).unwrap();
    (dir, path)
}

/// Whether nothing in an output is obeyed by a terminal or a CI runner.
fn harmless(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let hidden = |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c);
    let ours = ["::error title=parity::", "::notice title=parity::", "::warning title=parity::"];
    let command = |line: &str| {
        let line = line.trim_start();
        (line.starts_with("::") && !ours.iter().any(|own| line.starts_with(own))) || line.starts_with("##[")
    };
    !text.contains(hidden) && !text.lines().any(command)
}

#[test]
fn what_a_dump_says_of_itself_is_only_read() {
    let (_dir, dump) = obscene();
    for format in ["table", "markdown"] {
        for runner in [None, Some("true")] {
            let mut command = parity(&["diff", &dump, &dump, "--format", format]);
            runner.map(|value| command.env("GITHUB_ACTIONS", value));
            let output = command.output().unwrap();
            assert!(!output.stdout.is_empty());
            assert!(harmless(&output.stdout), "{}", String::from_utf8_lossy(&output.stdout).escape_debug());
            assert!(harmless(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr).escape_debug());
        }
    }
}

#[test]
fn an_error_shows_a_file_name_and_does_not_obey_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a\u{1b}[31m\n::error::b");
    fs::write(&path, "no dump").unwrap();
    let output = parity(&["inspect", path.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(harmless(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr).escape_debug());
}

#[test]
fn texts_are_regular_files_of_bounded_size() {
    let refused = || contains("a regular file").and(contains("/dev/zero"));
    parity(&["run", "--device", "cpu", "-f", "/dev/zero"]).assert().code(2).stderr(refused());
    parity(&["gate", "/dev/zero"]).assert().code(2).stderr(refused());
}

#[test]
fn threads_and_retries_have_limits() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "-t", "1000000"];
    parity(&run).assert().code(2).stderr(contains("--threads").and(contains("at most")));
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.toml");
    fs::write(&suite, "name = \"x\"\n[[case]]\nid = \"a\"\nprompt = \"b\"\nretries = 1000000000\n").unwrap();
    parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stderr(contains("retries"));
}

/// Runs `parity` under a shell's limits (`ulimit`): megabytes of address space, or blocks of a file.
fn limited(limit: &str, args: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new("bash");
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "parity", env!("CARGO_BIN_EXE_parity")]);
    command.args(args).env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent");
    command.output().unwrap()
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn threads_that_cannot_be_started_are_done_without() {
    let inspect = ["inspect", "reference-dumps/models/qwen2-tiny-py-F16.gguf"];
    // Somewhere in there the program has memory, and its threads have none.
    for kilobytes in (30_000..100_000).step_by(500) {
        let output = limited(&format!("-v {kilobytes}"), &inspect);
        // In less the program is not even begun: Rust itself finds no room before `main`.
        let is_begun = !said(&output).contains("failed to allocate an alternative stack");
        assert!(!is_begun || !said(&output).contains("panicked"), "{kilobytes}: {}", said(&output));
    }
    assert_eq!(limited("-v 100000", &inspect).status.code(), Some(0));
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "-t", "128"];
    let refused = limited("-v 150000", &run);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("not all threads could be started"), "{}", said(&refused));
}

#[test]
fn steps_beyond_the_context_length_are_refused() {
    for n in ["9223372036854775808", "18446744073709551615", "1000000000", "2044"] {
        let run = ["run", "--device", "cpu", "-p", PROMPT, "-n", n, "--no-audit"];
        parity(&run)
            .assert()
            .code(2)
            .stderr(contains("context length").and(contains("at most 2048 positions")));
    }
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.toml");
    let case = "name = \"x\"\n[prompts]\np = \"def f():\"\n[[case]]\nname = \"a\"\nprompt = \"p\"\nn_predict = 1000000000\n";
    fs::write(&suite, case).unwrap();
    parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stdout(contains("context length"));
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--chunk", "18446744073709551615"];
    parity(&run).assert().code(0);
}

#[test]
fn what_a_run_needs_is_told_before_it_begins() {
    let tokens = vec!["7"; 2000].join(",");
    let run = ["run", "--device", "cpu", "--tokens", &tokens, "--no-audit"];
    let needs = contains("needs more memory than there is").and(contains("PARITY_MEMORY"));
    parity(&run).env("PARITY_MEMORY", "4M").assert().code(2).stderr(needs);
    parity(&run).env("PARITY_MEMORY", "much").assert().code(2).stderr(contains("PARITY_MEMORY"));
}

#[test]
fn a_stored_reference_that_cannot_be_read_is_told() {
    let cache = tempfile::tempdir().unwrap();
    let manifest = cache.path().join("model/prompt/manifest.json");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    fs::write(&manifest, "{").unwrap();
    let told = contains("passed over").and(contains(manifest.to_str().unwrap()));
    let run = |tokens| parity(&["run", "--device", "cpu", "--tokens", tokens, "--layer", "0"]);
    run("5,4,3").env("PARITY_CACHE", cache.path()).assert().code(2).stderr(told);
    // Where there is another one, nobody needs it.
    let stored = parity(&["run", "--device", "cpu", "-p", PROMPT, "--layer", "0"])
        .env("PARITY_CACHE", cache.path())
        .assert()
        .code(0);
    stored.stderr(contains("passed over").not());
}

#[test]
fn a_model_that_cannot_be_opened_is_told_where_none_fits() {
    let folder = tempfile::tempdir().unwrap();
    let (dump, models) = (folder.path().join("dump"), folder.path().join("models"));
    let run = ["run", "--device", "cpu", "--tokens", "5,4,3", "--no-audit", "--dump", dump.to_str().unwrap()];
    parity(&run).output().unwrap();
    fs::create_dir(&models).unwrap();
    let broken = models.join("broken.gguf");
    fs::write(&broken, "GGUF").unwrap();
    let manifest = dump.join("manifest.json");
    let audit = || {
        let mut audit = parity(&["audit", dump.to_str().unwrap()]);
        audit.env("PARITY_MODELS", &models);
        audit
    };
    // Its own is among the shipped ones.
    audit().assert().code(0).stderr(contains("passed over").not());
    let text = fs::read_to_string(&manifest).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&text).unwrap();
    other["model"]["fingerprint"] = "0".repeat(64).into();
    fs::write(&manifest, other.to_string()).unwrap();
    let told = contains("passed over").and(contains(broken.to_str().unwrap()));
    audit().assert().code(2).stderr(told.and(contains("not at hand")));
}

#[test]
fn a_long_prompt_is_refused_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let texts = ["def f(x): return x + 1\n".repeat(4700), "a".repeat(100_000)];
    for (index, text) in texts.iter().enumerate() {
        let file = dir.path().join(format!("prompt-{index}"));
        fs::write(&file, text).unwrap();
        let output =
            limited("-v 1500000", &["run", "--device", "cpu", "-t", "2", "-f", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("context length"), "{}", said(&output));
    }
}

#[test]
fn memory_that_runs_out_is_an_error() {
    // From too little to load the program up to enough for the run.
    let run = ["run", "--device", "cpu", "-t", "1", "-p", PROMPT];
    let outputs: Vec<_> = (8..=40)
        .map(|step| limited(&format!("-v {}; export PARITY_MEMORY=1T", step * 5000), &run))
        // Below a limit the loader itself finds no room.
        .skip_while(|output| !matches!(output.status.code(), Some(0 | 2)))
        .collect();
    for output in &outputs {
        let (code, error) = (output.status.code(), said(output));
        assert!(matches!(code, Some(0 | 2)), "{code:?} {error}");
        assert!(code == Some(0) || error.contains("emory"), "{error}");
    }
    let ended = |code| outputs.iter().filter(|output| output.status.code() == Some(code)).count();
    assert!(ended(0) > 0 && ended(2) > 0, "{} ran, {} did not", ended(0), ended(2));
}

#[test]
fn a_suite_of_more_cases_than_can_be_run_is_refused_before_they_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.toml");
    let names: Vec<String> = (0..200).map(|i| format!("p{i}")).collect();
    let prompts: String = names.iter().map(|name| format!("{name} = \"x\"\n")).collect();
    let models: String = names.iter().map(|name| format!("{name} = \"x.gguf\"\n")).collect();
    let axis = format!("{names:?}");
    let chunks: Vec<usize> = (1..=200).collect();
    let faults: Vec<String> = (1..=200).map(|i| format!("embed.scaled={i}")).collect();
    let text = format!(
        "name = \"x\"\n[prompts]\n{prompts}[models]\n{models}[[case]]\nname = \"a\"\nexpect = \"divergence\"\n\
         prompt = {axis}\nmodel = {axis}\nchunk = {chunks:?}\ninject = {faults:?}\n"
    );
    fs::write(&suite, text).unwrap();
    let output = limited("-v 1000000", &["gate", suite.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("1600000000"), "{}", said(&output));
}

#[test]
fn tokens_of_a_sparse_file_are_counted_before_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.safetensors");
    let header = format!(
        r#"{{"tokens":{{"dtype":"I32","shape":[{0}],"data_offsets":[0,{1}]}},"embed":{{"dtype":"F32","shape":[3,4],"data_offsets":[{1},{2}]}}}}"#,
        1u64 << 30,
        1u64 << 32,
        (1u64 << 32) + 48
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(&path, &bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(bytes.len() as u64 + (1 << 32) + 48).unwrap();
    let output = limited("-v 6000000", &["inspect", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("1073741824"), "{}", said(&output));
}

#[test]
fn manifests_and_models_are_regular_files() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("manifest.json")).unwrap();
    parity(&["inspect", dir.path().to_str().unwrap()]).assert().code(2).stderr(contains("a regular file"));
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for args in [["inspect", "PIPE"], ["diff-reports", "PIPE"], ["run", "--names"], ["run", "-m"]] {
        let args = args.map(|arg| if arg == "PIPE" { pipe.to_str().unwrap() } else { arg });
        let mut command = parity(&args);
        if matches!(args[0], "diff-reports" | "run") {
            command.arg(&pipe);
        }
        command.timeout(std::time::Duration::from_secs(20)).assert().code(2);
    }
}

#[test]
fn a_dump_is_replaced_by_force_alone_and_a_reference_never() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump");
    let path = path.to_str().unwrap();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--dump", path];
    let code = |extra: &[&str]| parity(&run).args(extra).output().unwrap().status.code();
    assert_eq!(code(&[]), Some(0));
    let manifest = Path::new(path).join("manifest.json");
    let before = fs::read(&manifest).unwrap();
    parity(&run).assert().code(2).stderr(contains("--force").and(contains(path)));
    assert_eq!(code(&["--force"]), Some(0));
    let itself = ["run", "--device", "cpu", "--reference", path, "--dump", path, "--no-audit"];
    parity(&itself).assert().code(2);
    parity(&itself).arg("--force").assert().code(2).stderr(contains("the reference itself"));
    assert_eq!(fs::read(&manifest).unwrap(), before);
}

#[test]
fn tolerances_bound_something() {
    let dir = tempfile::tempdir().unwrap();
    for value in ["nan", "-1.0", "-inf"] {
        let file = dir.path().join("tolerances.toml");
        fs::write(&file, format!("[[tolerance]]\ncheckpoint = \"*\"\natol = {value}\n")).unwrap();
        let run =
            ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--tolerances", file.to_str().unwrap()];
        parity(&run).assert().code(2).stderr(contains("is no tolerance"));
        let suite = dir.path().join("suite.toml");
        let rule = format!("[[case.tolerance]]\ncheckpoint = \"*\"\nrtol = {value}\n");
        fs::write(&suite, format!("name = \"x\"\n[[case]]\nname = \"a\"\n{rule}")).unwrap();
        parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stderr(contains("is no tolerance"));
    }
}

#[test]
fn faults_and_names_that_mean_nothing_are_refused() {
    for fault in ["embed.row_shift=1e12", "embed.row_shift=4096", "attn.mask_shift=1e12", "embed.scaled=nan"]
    {
        let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--inject", fault];
        parity(&run).assert().code(2).stderr(contains("error:"));
    }
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.toml");
    for name in ["", "  ", ".", "..", "a\\u001b[31m"] {
        fs::write(&suite, format!("name = \"x\"\n[[case]]\nname = \"{name}\"\n")).unwrap();
        parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stderr(contains("is no name of a case"));
    }
    fs::write(&suite, "name = \"x\"\n[[case]]\nname = \"a\"\nchunk = []\n").unwrap();
    parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stderr(contains("at least one value"));
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_no_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (dump, report) = (dir.path().join("dump"), dir.path().join("report"));
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--no-audit"];
    for flag in [["--dump", dump.to_str().unwrap()], ["--report", report.to_str().unwrap()]] {
        let output = limited("-f 8", &[&run[..], &flag].concat());
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("File too large"), "{}", said(&output));
    }
    assert!(!report.join("report.json").exists() && !report.join("report.html").exists());
}

#[test]
fn closed_pipes_end_nothing() {
    let run = format!("{} run --device cpu -p '{PROMPT}' --layer 0", env!("CARGO_BIN_EXE_parity"));
    for redirection in ["2>&- | true", ">&- 2>&-", "| head -c 1 >/dev/null", "2>/dev/full"] {
        let mut bash = std::process::Command::new("bash");
        bash.current_dir(env!("CARGO_MANIFEST_DIR")).env("PARITY_LLAMA", "none");
        let status = bash.args(["-c", &format!("set -o pipefail; {run} {redirection}")]).status().unwrap();
        assert_eq!(status.code(), Some(0), "{redirection}");
    }
}
