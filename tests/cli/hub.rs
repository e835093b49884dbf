//! Models by name: a hub of one repository, what is fetched of it, and what is cached.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use predicates::prelude::*;
use predicates::str::contains;

use crate::first_minute::{PROMPT, models, parity};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

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
