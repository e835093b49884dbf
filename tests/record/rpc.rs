//! What is recorded between a client and a ggml-rpc-server: from small peers everywhere, and from llama.cpp's own where they
//! are named (`PARITY_TEST_RPC`: folders of llama.cpp's shared libraries with libggml-rpc and ggml-rpc-server, by colons).

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parity::record::rpc::wire::{Version, WireGraph};

use crate::peers::{Client, Flaw, server};
use crate::support::driven::{ANSWER, PROMPT, driver, model};
use crate::support::program::{audit, manifest, output};

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const TOKENS: [u32; 4] = [312, 863, 2039, 1444];

/// Every release whose messages differ, with a major of which not all is known.
const VERSIONS: [(u8, u8, u8); 6] = [(3, 6, 1), (4, 0, 3), (5, 0, 0), (6, 0, 0), (7, 0, 0), (8, 0, 0)];

fn version((major, minor, patch): (u8, u8, u8)) -> Version {
    Version { major, minor, patch }
}

/// A proxy that writes into a folder, and its address.
fn proxy(server: SocketAddr, out: &Path, flags: &[&str]) -> (Child, String) {
    let mut proxy = Command::new(env!("CARGO_BIN_EXE_parity"));
    proxy.args(["rpc-proxy", "-m", MODEL, "--server", &server.to_string(), "-o"]).arg(out).args(flags);
    let mut proxy = proxy.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut reader = BufReader::new(proxy.stderr.take().unwrap());
    reader.read_line(&mut said).unwrap();
    let address = said.split("--rpc is ").nth(1).and_then(|rest| rest.split(';').next());
    let address = address.unwrap_or_else(|| panic!("{said}")).to_owned();
    proxy.stderr = Some(reader.into_inner());
    (proxy, address)
}

/// parity's own server on a port of its own, and its address.
fn own(flags: &[&str]) -> (Ended, String) {
    let mut own = Command::new(env!("CARGO_BIN_EXE_parity"));
    own.args(["rpc-server", "--listen", "127.0.0.1:0"]).args(flags).stderr(Stdio::piped());
    let mut own = own.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(own.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().rsplit(' ').next().unwrap().to_owned();
    (Ended(own), address)
}

/// Its exit code and what it says, when it has ended; one that does not is killed, and fails the test.
fn ended(mut proxy: Child) -> (i32, String) {
    let (mut out, mut err) = (proxy.stdout.take().unwrap(), proxy.stderr.take().unwrap());
    let said = std::thread::spawn(move || {
        let mut said = String::new();
        out.read_to_string(&mut said).unwrap();
        err.read_to_string(&mut said).unwrap();
        said
    });
    let begun = Instant::now();
    loop {
        if let Some(status) = proxy.try_wait().unwrap() {
            return (status.code().unwrap(), said.join().unwrap());
        }
        if begun.elapsed() > PATIENCE {
            proxy.kill().unwrap();
            panic!("the proxy does not end: {}", said.join().unwrap());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How long a test waits for a process that has nothing left to do, or a client for an answer.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// A prefill of two tokens and two steps, the second with the graph of the first.
fn evaluate(client: &mut Client) -> std::io::Result<Vec<Vec<u8>>> {
    Ok(vec![
        client.evaluate(&TOKENS[..2], false)?,
        client.evaluate(&TOKENS[2..3], false)?,
        client.evaluate(&TOKENS[3..], true)?,
    ])
}

#[test]
fn every_protocol_is_recorded_with_the_bits_of_a_run_without_the_proxy() {
    let dir = tempfile::tempdir().unwrap();
    for (number, numbers) in VERSIONS.into_iter().enumerate() {
        let version = version(numbers);
        let server = server(version, Flaw::None);
        let direct = evaluate(&mut Client::connect(&server.to_string(), version, MODEL).unwrap()).unwrap();
        let mut dumps = Vec::new();
        for level in ["nodes", "outputs"] {
            let out = dir.path().join(format!("{number}-{level}"));
            let (proxy, address) = proxy(server, &out, &["--observe", level]);
            let mut client = Client::connect(&address, version, MODEL).unwrap();
            // Behind the version and a byte that nobody reads.
            assert!(client.hello.iter().skip(4).all(|&byte| byte == 0), "it stays TCP: {:?}", client.hello);
            assert_eq!(evaluate(&mut client).unwrap(), direct, "{version} {level}");
            drop(client);
            let (code, said) = ended(proxy);
            assert_eq!(code, 0, "{version} {level}: {said}");
            let manifest = manifest(&out);
            assert_eq!(manifest["tokens"], serde_json::json!(TOKENS), "{manifest}");
            assert_eq!((&manifest["observed"], &manifest["complete"]), (&level.into(), &true.into()));
            let weights = manifest["provenance"]["weights"].as_str().unwrap();
            assert!(weights.starts_with("1 of "), "{weights}");
            dumps.push(out.to_str().unwrap().to_owned());
        }
        let (code, said) = output(&["diff", "--bitwise", &dumps[0], &dumps[1]]);
        assert_eq!(code, 0, "{version}: {said}");
    }
}

#[test]
fn our_own_server_computes_what_a_client_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    for (numbers, flags) in [((3, 6, 1), &[][..]), ((8, 0, 0), &["--f64"])] {
        let version = version(numbers);
        let (_own, address) = own(&[&["--protocol", &version.to_string()], flags].concat());
        let out = dir.path().join(version.to_string());
        let (proxy, at) = proxy(address.parse().unwrap(), &out, &["--observe", "outputs"]);
        let through = evaluate(&mut Client::connect(&at, version, MODEL).unwrap()).unwrap();
        assert_eq!(ended(proxy).0, 0);
        let direct = evaluate(&mut Client::connect(&address, version, MODEL).unwrap()).unwrap();
        assert_eq!(through, direct);
    }
}

#[test]
fn a_server_that_computes_wrongly_is_found_at_its_node() {
    let dir = tempfile::tempdir().unwrap();
    let version = version((7, 0, 0));
    let out = dir.path().join("doubled");
    let (proxy, address) = proxy(server(version, Flaw::Doubled), &out, &[]);
    evaluate(&mut Client::connect(&address, version, MODEL).unwrap()).unwrap();
    assert_eq!(ended(proxy).0, 0);
    let audited = audit(&out, Path::new(MODEL), &[]);
    assert_eq!((audited.code, audited.first.as_str()), (1, "blk.0.attn_norm"), "{}", audited.notes);
}

#[test]
fn a_peer_that_breaks_off_ends_with_its_name_and_a_dump_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let version = version((7, 0, 0));
    // Of a step, the rows, the norm and the product are read for the dump, and the product for the client.
    for (flaw, steps) in
        [(Flaw::Closes(6), 1), (Flaw::Absurd(7), 1), (Flaw::Closes(2), 0), (Flaw::Absurd(4), 1)]
    {
        for level in ["nodes", "outputs"] {
            let out = dir.path().join(format!("{flaw:?}-{level}"));
            let server = server(version, flaw);
            let (proxy, address) = proxy(server, &out, &["--observe", level]);
            assert!(evaluate(&mut Client::connect(&address, version, MODEL).unwrap()).is_err(), "{flaw:?}");
            let (code, said) = ended(proxy);
            assert_eq!(code, 2, "{flaw:?} {level}: {said}");
            assert!(said.contains(&format!("the server {server}")), "{flaw:?} {level}: {said}");
            if steps > 0 {
                let manifest = manifest(&out);
                assert_eq!(manifest["complete"], false);
                assert_eq!(
                    manifest["steps"].as_array().unwrap().len(),
                    steps,
                    "{flaw:?} {level}: {manifest}"
                );
                assert!(manifest["stopped"]["reason"].as_str().unwrap().contains("the server"), "{manifest}");
            }
        }
    }
}

#[test]
fn a_client_that_does_not_keep_to_the_protocol_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let version = version((7, 0, 0));
    type Wrong = fn(&mut Client) -> std::io::Result<()>;
    let cases: [(&str, Wrong); 6] = [
        ("larger than its buffers", |client| {
            let mut graph = client.graph(2, 2);
            graph.tensors[1].ne[2] = 1 << 20;
            client.send(10, &graph.write(Version { major: 7, minor: 0, patch: 0 }))
        }),
        ("a command that its protocol does not have", |client| client.send(18, &[])),
        ("a graph that is none", |client| client.send(10, &[255; 64])),
        ("a length that it cannot have", |client| client.send(8, &[0; 3])),
        ("closed the connection in the middle of", |client| client.break_off(10, 4096, &[7; 100])),
        ("asks for a graph again that it did not send", |client| client.send(16, &7u32.to_le_bytes())),
    ];
    for (number, (expected, wrong)) in cases.into_iter().enumerate() {
        for recorded in [false, true] {
            let out = dir.path().join(format!("{number}-{recorded}"));
            let (proxy, address) = proxy(server(version, Flaw::None), &out, &[]);
            let mut client = Client::connect(&address, version, MODEL).unwrap();
            if recorded {
                evaluate(&mut client).unwrap();
            }
            wrong(&mut client).unwrap();
            let (code, said) = ended(proxy);
            assert!(
                code == 2 && said.contains("the client 127.0.0.1") && said.contains(expected),
                "{code}: {said}"
            );
            assert_eq!(out.join("manifest.json").is_file(), recorded);
            assert!(!recorded || manifest(&out)["complete"] == false);
        }
    }
    // Lengths are believed when bytes come, and a stranger is sent away.
    let out = dir.path().join("stranger");
    let (proxy, address) = proxy(server(version, Flaw::None), &out, &[]);
    std::io::Write::write_all(&mut TcpStream::connect(&address).unwrap(), b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let (code, said) = ended(proxy);
    assert!(code == 2 && said.contains("does not begin as a client"), "{said}");
}

#[test]
fn other_weights_and_unknown_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let known = version((7, 0, 0));
    let out = dir.path().join("weights");
    let (proxy_, address) = proxy(server(known, Flaw::None), &out, &[]);
    let mut client =
        Client::connect(&address, known, "reference-dumps/models/qwen2-tiny-py-F16.gguf").unwrap();
    client.other_weight().unwrap();
    assert!(client.evaluate(&TOKENS[..2], false).is_ok());
    drop(client);
    let (code, said) = ended(proxy_);
    assert!(code == 2 && said.contains("other bytes of blk.0.attn_norm.weight"), "{said}");
    for strange in [(9, 0, 0), (3, 5, 0), (7, 0, 9)].map(version) {
        let (proxy, address) = proxy(server(strange, Flaw::None), &dir.path().join("strange"), &[]);
        let _ = Client::connect(&address, strange, MODEL);
        let (code, said) = ended(proxy);
        assert!(code == 2 && said.contains(&format!("protocol {strange}")), "{said}");
    }
}

#[test]
fn a_graph_survives_its_bytes_and_its_parser_all_bytes() {
    for numbers in VERSIONS {
        let version = version(numbers);
        let server = server(version, Flaw::None);
        let graph = Client::connect(&server.to_string(), version, MODEL).unwrap().graph(2, 5);
        let bytes = graph.write(version);
        assert_eq!(WireGraph::parse(&bytes, version), Ok(graph));
        for end in 0..bytes.len() {
            assert!(WireGraph::parse(&bytes[..end], version).is_err());
        }
    }
}

/// A server that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn real_servers_and_clients_are_recorded_bit_by_bit() {
    let folders = std::env::var("PARITY_TEST_RPC").unwrap_or_default();
    let Some(driver) = driver().filter(|_| !folders.is_empty()) else {
        eprintln!(
            "SKIP: PARITY_TEST_RPC names no folders of llama.cpp's with libggml-rpc and ggml-rpc-server"
        );
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for (number, folder) in folders.split(':').enumerate() {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let server = Command::new(Path::new(folder).join("ggml-rpc-server"))
            .args(["-p", &port, "-t", "2"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let _server = Ended(server);
        let address = format!("127.0.0.1:{port}");
        let up = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            TcpStream::connect(&address).is_ok()
        });
        assert!(up, "{folder}: no server");
        let out = dir.path().join(number.to_string());
        let out = out.to_str().unwrap();
        let model = model("Q4_K_M");
        let run = [driver.to_str().unwrap(), folder, &model, "5"];
        let words = [&run[..], &PROMPT, &ANSWER].concat();
        let record = ["record", "--rpc", "--server", &address, "-o", out, "--", "env", "LLAMA_ARG_RPC={rpc}"];
        let (code, said) = output(&[&record[..], &words].concat());
        assert_eq!(code, 0, "{said}");
        let direct =
            Command::new(words[0]).args(&words[1..]).env("LLAMA_ARG_RPC", &address).output().unwrap();
        let last = String::from_utf8_lossy(&direct.stdout).trim().to_owned();
        assert!(!last.is_empty() && said.contains(&last), "{last}: {said}");
        assert_eq!(audit(Path::new(out), Path::new(&model), &[]).code, 0);
    }
}
