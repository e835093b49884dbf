//! What a new user meets first: what is here, models by name, settings, completions, and a report in sentences.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;

use crate::support::program;

const PROMPT: &str = "def read_lines(path):";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The program with nothing of this machine's settings.
fn parity(args: &[&str]) -> Command {
    let mut command = program::parity(args);
    command.env("HOME", "/nonexistent");
    for variable in ["PARITY_CONFIG", "XDG_CONFIG_HOME", "PARITY_MEMORY"] {
        command.env_remove(variable);
    }
    command.timeout(std::time::Duration::from_secs(120));
    command
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models")
}

/// A hub with one repository, as hub clients see it: a list of files, and files by ranges.
fn serve(files: Vec<(&'static str, Vec<u8>)>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let downloads = Arc::new(AtomicUsize::new(0));
    let counted = downloads.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            answer(stream, &files, &counted);
        }
    });
    (address, downloads)
}

fn answer(mut stream: TcpStream, files: &[(&str, Vec<u8>)], downloads: &AtomicUsize) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(request)) = lines.next() else { return };
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let path = request.split(' ').nth(1).unwrap_or_default();
    let first_byte_only = headers.iter().any(|line| line.eq_ignore_ascii_case("range: bytes=0-0"));
    let mut send = |status: &str, extra: &str, body: &[u8]| {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{extra}\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    if path.starts_with("/api/models/some/model") {
        let names: Vec<String> =
            files.iter().map(|(name, _)| format!("{{\"rfilename\":\"{name}\"}}")).collect();
        let list = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", names.join(","));
        return send("200 OK", "Content-Type: application/json\r\n", list.as_bytes());
    }
    let name = path.strip_prefix("/some/model/resolve/main/").unwrap_or_default();
    let Some((_, bytes)) = files.iter().find(|(known, _)| *known == name) else {
        return send("404 Not Found", "", b"");
    };
    let about = format!("ETag: \"e-{name}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
    let (last, body) = if first_byte_only { (0, &bytes[..1]) } else { (bytes.len() - 1, &bytes[..]) };
    downloads.fetch_add(usize::from(!first_byte_only), Ordering::Relaxed);
    send("206 Partial Content", &format!("{about}Content-Range: bytes 0-{last}/{}\r\n", bytes.len()), body)
}

#[test]
#[cfg(feature = "hub")]
fn a_model_of_the_hub_is_fetched_once() {
    let q4 = fs::read(models().join("qwen2-tiny-py-Q4_K_M.gguf")).unwrap();
    let f16 = fs::read(models().join("qwen2-tiny-py-F16.gguf")).unwrap();
    let files = vec![("README.md", b"x".to_vec()), ("tiny-F16.gguf", f16), ("tiny-Q4_K_M.gguf", q4)];
    let (address, downloads) = serve(files);
    let home = tempfile::tempdir().unwrap();
    let run = |spec: &str, endpoint: &str| {
        let mut command = parity(&["run", "--device", "cpu", "-hf", spec, "-p", PROMPT, "--layer", "0"]);
        command.env("HF_HOME", home.path()).env("HF_ENDPOINT", endpoint);
        command
    };
    run("some/model", &address).assert().code(0).stdout(contains("tiny-Q4_K_M.gguf"));
    run("some/model:f16", &address).assert().code(0).stdout(contains("tiny-F16.gguf"));
    assert_eq!(downloads.load(Ordering::Relaxed), 2);
    // From now on the cache, as other programs lay it out, is enough.
    assert!(
        home.path().join("hub/models--some--model/snapshots").join(COMMIT).join("tiny-F16.gguf").is_file()
    );
    run("some/model", &address).assert().code(0);
    run("some/model", "http://127.0.0.1:9").assert().code(0);
    run("some/model:F16", &address).env("HF_HUB_OFFLINE", "1").assert().code(0);
    assert_eq!(downloads.load(Ordering::Relaxed), 2);
    let lists = contains("tiny-F16.gguf").and(contains("Q8_0"));
    run("some/model:Q8_0", &address).assert().code(2).stderr(lists);
    run("some/other", &address).assert().code(2).stderr(contains("-hf some/other"));
    run("model", &address).assert().code(2).stderr(contains("USER/REPO"));
}

#[test]
fn the_doctor_says_what_is_here_and_what_to_install() {
    let text = parity(&["doctor"]).assert().code(0).stdout(contains("ok shipped model and dumps"));
    text.stdout(contains("-- llama.cpp to record with").and(contains("PARITY_LLAMA")));
    let output = parity(&["doctor", "--format", "json"]).env("PARITY_MODELS", models()).output().unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of =
        |what: &str| findings.as_array().unwrap().iter().find(|finding| finding["what"] == what).unwrap();
    assert_eq!(of("folder of models")["here"], true);
    assert!(of("folder of models")["found"].as_str().unwrap().starts_with("2 GGUF files"));
    assert_eq!(
        (&of("llama.cpp to record with")["here"], of("memory")["here"].as_bool()),
        (&false.into(), Some(true))
    );
    let script = parity(&["doctor"]).env("PARITY_LLAMA", "/etc/passwd").output().unwrap();
    assert!(String::from_utf8_lossy(&script.stdout).contains("-- llama.cpp to record with"));
}

#[test]
fn a_file_of_settings_stands_in_for_variables() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    fs::write(&file, format!("models = {:?}\nmemory = \"1K\"\n", models())).unwrap();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0"];
    parity(&run).env("PARITY_CONFIG", &file).assert().code(2).stderr(contains("PARITY_MEMORY"));
    // A variable goes before the file.
    parity(&run).env("PARITY_CONFIG", &file).env("PARITY_MEMORY", "8G").assert().code(0);
    parity(&["doctor"]).env("PARITY_CONFIG", &file).assert().code(0).stdout(contains("2 GGUF files"));
    parity(&run).env("PARITY_CONFIG", "/nonexistent").assert().code(2);
    fs::write(&file, "colour = \"red\"\n").unwrap();
    parity(&run).env("PARITY_CONFIG", &file).assert().code(2).stderr(contains("`colour`"));
    // The file that is found without being named.
    let folder = dir.path().join("parity");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.toml"), "memory = \"1K\"\n").unwrap();
    parity(&run).env("XDG_CONFIG_HOME", dir.path()).assert().code(2).stderr(contains("PARITY_MEMORY"));
}

#[test]
fn completions_and_man_pages_are_made() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        parity(&["completions", shell]).assert().code(0).stdout(contains("hf-repo"));
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man1");
    parity(&["man", folder.to_str().unwrap()]).assert().code(0);
    let page = fs::read_to_string(folder.join("parity-run.1")).unwrap();
    assert!(page.starts_with(".ie") || page.contains(".TH"), "{page}");
    assert!(page.contains("hf\\-repo") && folder.join("parity.1").is_file());
}

#[test]
fn a_report_is_explained_in_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().to_str().unwrap();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--inject", "rope.base=10000@2", "--report", report];
    parity(&run).assert().code(1);
    let first = contains("blk.2.q_rope is a node of layer 2")
        .and(contains("RoPE base is 10000"))
        .and(contains("rope.cu"));
    parity(&["explain", "--in", report]).assert().code(0).stdout(first.and(contains("It reads blk.2.q.")));
    let later =
        contains("the error came from before, first at blk.2.q_rope").and(contains("the node is healthy"));
    parity(&["explain", "blk.3.attn_ctx", "--in", report]).assert().code(0).stdout(later);
    parity(&["explain", "blk.9.q", "--in", report]).assert().code(2).stderr(contains("no such checkpoint"));
    let meant = |typed| parity(&["explain", typed, "--in", report]).assert().code(2);
    meant("blk.2.qrope").stderr(contains("parity explain blk.2.q_rope"));
    meant("q_rope").stderr(contains("parity explain blk.0.q_rope"));
    parity(&["explain", "--in", "/nonexistent"]).assert().code(2);
}

#[test]
fn a_node_is_explained_without_a_report() {
    let rope = contains("blk.2.q_rope is a node of layer 2")
        .and(contains("y0 = x0·cos a"))
        .and(contains("Rounding explains 8·u"))
        .and(contains("It reads blk.2.q."))
        .and(contains("freq_base 1000000"))
        .and(contains("rope.base (RoPE base is 10000"))
        .and(contains("--inject"));
    parity(&["explain", "blk.2.q_rope"]).assert().code(0).stdout(rope);
    let inside = contains("softmax").and(contains("scale"));
    parity(&["explain", "blk.0.attn_probs"]).assert().code(0).stdout(inside);
    let recorded = ["explain", "blk.0.attn_out", "--of", "tests/data/backends/cuda-Q4_K_M"];
    parity(&recorded).assert().code(0).stdout(contains("blk.0.attn_output.weight").and(contains("4·√n·u")));
    parity(&["explain", "blk.2.qrope"]).assert().code(2).stderr(contains("parity explain blk.2.q_rope"));
}
