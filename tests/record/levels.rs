//! How closely a llama.cpp is looked at, and what is kept of it: hashes, outputs, one node as a test. SKIP where no shared
//! libraries of one are named (`PARITY_TEST_LLAMA`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs;
use std::path::Path;

use parity_dump::Dump;
use serde_json::Value;

use crate::support::driven::{ANSWER, LIBRARIES, PROMPT, driver, libraries, model};
use crate::support::program::{manifest, output, parity};

/// Records the driver's run into a folder, with these flags; what parity says.
fn record(out: &Path, libraries: &str, quant: &str, flags: &[&str]) -> String {
    let mut command = parity(&["record", "-o"]);
    command.arg(out).args(flags).arg("--").arg(driver().unwrap()).args([libraries, &model(quant), "5"]);
    let done = command.args(PROMPT).args(ANSWER).output().unwrap();
    let text = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert_eq!(done.status.code(), Some(0), "{text}");
    text
}

fn bytes(dump: &Path, ending: &str) -> u64 {
    let entries = fs::read_dir(dump).unwrap().flatten();
    let those = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == ending));
    those.map(|entry| entry.metadata().unwrap().len()).sum()
}

#[test]
fn outputs_that_are_kept_have_the_bits_of_nodes_that_are_asked_for() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    for quant in ["Q4_K_M", "F16"] {
        let [nodes, outputs, none] = ["nodes", "outputs", "none"].map(|level| {
            let at = dir.path().join(format!("{quant}-{level}"));
            record(&at, libraries.to_str().unwrap(), quant, &["--observe", level]);
            assert_eq!(manifest(&at)["observed"], level);
            at
        });
        let [asked, kept, only] = [&nodes, &outputs, &none].map(|at| Dump::open(at).unwrap());
        assert_eq!(asked.checkpoints().count(), kept.checkpoints().count());
        assert_eq!(only.checkpoints().map(|id| id.to_string()).collect::<Vec<_>>(), ["logits"]);
        let (a, b) = (nodes.to_str().unwrap(), outputs.to_str().unwrap());
        let (code, said) = output(&["diff", "--bitwise", b, a]);
        assert_eq!(code, 0, "{said}");
        let (code, said) =
            output(&["diff", "--bitwise", none.to_str().unwrap(), a, "--checkpoint", "logits"]);
        assert_eq!(code, 0, "{said}");
    }
}

/// Bytes of a batch from which on its values are written as they lie in the program's memory.
const LENT: u64 = 64 << 20;

#[test]
fn many_values_are_written_from_where_they_lie() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<String> = (0..1000).map(|i| (3 + i * 73 % 300).to_string()).collect();
    let [nodes, outputs] = ["nodes", "outputs"].map(|level| {
        let at = dir.path().join(level);
        let mut command = parity(&["record", "--observe", level, "-o"]);
        command.arg(&at).arg("--").arg(driver().unwrap()).arg(&libraries).args([&model("F16"), "1000"]);
        let whole = [("DRIVER_CONTEXT", "1024"), ("DRIVER_UBATCH", "1024")];
        let done = command.args(&ids).envs(whole).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(bytes(&at, "safetensors") > LENT, "{} bytes", bytes(&at, "safetensors"));
        at
    });
    let (code, said) = output(&["diff", "--bitwise", outputs.to_str().unwrap(), nodes.to_str().unwrap()]);
    assert_eq!(code, 0, "{said}");
}

#[test]
fn outputs_are_kept_by_default_and_what_does_not_fit_is_asked_for_node_by_node() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let libraries = libraries.to_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    record(&at("default"), libraries, "Q4_K_M", &[]);
    assert_eq!(manifest(&at("default"))["observed"], "outputs");
    let inject = ["--inject", "rope.base=10000@blk.1.q_rope"];
    record(&at("injected"), libraries, "Q4_K_M", &inject);
    assert_eq!(manifest(&at("injected"))["observed"], "nodes");
    let mut command = parity(&["record", "-o"]);
    command.arg(at("small")).env("PARITY_MEMORY", "1M").arg("--").arg(driver().unwrap());
    let done = command.args([libraries, &model("Q4_K_M"), "5"]).args(PROMPT).args(ANSWER).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(said.contains("may be taken: -ub N makes batches smaller"), "{said}");
    assert!(said.contains("computed node by node: "), "{said}");
    assert_eq!(manifest(&at("small"))["observed"], "nodes");
    let [small, default] = ["small", "default"].map(|name| at(name).to_str().unwrap().to_owned());
    let (code, said) = output(&["diff", "--bitwise", &small, &default]);
    assert_eq!(code, 0, "{said}");
}

#[test]
fn hashes_find_the_first_node_whose_bits_differ() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let libraries = libraries.to_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    record(&at("values"), libraries, "F16", &[]);
    let said = record(&at("a"), libraries, "F16", &["--hash"]);
    assert!(said.contains("84 checkpoints"), "{said}");
    record(&at("b"), libraries, "F16", &["--hash"]);
    record(&at("c"), libraries, "F16", &["--hash", "--inject", "rope.base=10000@blk.1.q_rope"]);
    let (values, hashes) = (bytes(&at("values"), "safetensors"), bytes(&at("a"), "hashes"));
    assert!(hashes * 5 < values, "{hashes} bytes of hashes, {values} of values");
    assert_eq!(manifest(&at("a"))["requires"][0], "hashes");
    let path = |name: &str| at(name).to_str().unwrap().to_owned();
    let (code, said) = output(&["diff", &path("b"), &path("a")]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("the hashes of all 84 checkpoints are equal"), "{said}");
    let (code, said) = output(&["diff", &path("c"), &path("a")]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("blk.1.q_rope is the first node to differ"), "{said}");
    let (code, said) = output(&["diff", "--bitwise", &path("c"), &path("a")]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("DIVERGES at blk.1.q_rope"), "{said}");
    let (code, said) = output(&["diff", &path("values"), &path("a")]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("holds values, and the other side hashes alone"), "{said}");
}

#[test]
fn a_wrong_node_becomes_a_line_for_upstream_and_a_file_that_proves_it() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let libraries = libraries.to_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let node = "blk.1.q_rope";
    let model = model("Q4_K_M");
    record(Path::new(&path("dump")), libraries, "Q4_K_M", &["--inject", &format!("rope.base=10000@{node}")]);
    let (code, said) = output(&["audit", &path("dump"), "-m", &model, "--report", &path("report")]);
    assert_eq!(code, 1, "{said}");
    for (node, wrong) in [(node, true), ("blk.0.q_proj", false), ("blk.0.attn_ctx", false), ("embed", false)]
    {
        let (code, said) = output(&["testcase", &path("report"), node, "-m", &model, "-o", &path("case")]);
        assert_eq!(code, 0, "{node}: {said}");
        let line = fs::read_to_string(path(&format!("case/{node}.txt"))).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers = words.len() - 1;
        assert!(words[..numbers].iter().all(|word| word.parse::<i64>().is_ok()), "{line}");
        // op, type, four extents, sixteen words, and nine numbers of each source.
        let sources: usize = words[23].parse().unwrap();
        assert_eq!((words[6], numbers, words[numbers]), ("16", 24 + 9 * sources, node), "{line}");
        let (code, said) = output(&["testcase", "--run", &path(&format!("case/{node}.safetensors"))]);
        assert_eq!(code, i32::from(wrong), "{node}: {said}");
        assert!(said.starts_with(if wrong { "WRONG" } else { "HEALTHY" }), "{said}");
    }
    fs::write(path("broken"), b"nothing").unwrap();
    for (args, said) in [
        (&["testcase", "--run", &path("broken")][..], "is no test case"),
        (
            &["testcase", &path("report"), "blk.9.q", "-m", &model, "-o", &path("x")][..],
            "is no checkpoint of this report",
        ),
    ] {
        let (code, text) = output(args);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn texts_stay_out_where_that_is_asked_for() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let secret = "a secret prompt";
    for (flags, there) in [(&["--no-text"][..], false), (&[], true)] {
        let at = dir.path().join(there.to_string());
        let mut command = parity(&["record", "-o"]);
        command.arg(&at).args(flags).args(["--", "sh", "-c"]);
        // The driver takes no prompt: a shell in between has one.
        command.arg(format!("exec \"$0\" {} {} 5 {}", libraries.display(), model("F16"), PROMPT.join(" ")));
        command.arg(driver().unwrap()).args(["-p", secret]).assert().code(0);
        let manifest: Value = manifest(&at);
        assert_eq!(manifest.to_string().contains(secret), there, "{manifest:#}");
        assert_eq!(manifest["prompt"] == secret, there);
    }
}

/// Layer outputs alone, behind a cache whose rounding is finer than that of activations in bf16.
#[test]
fn layer_outputs_behind_a_cache_in_blocks_are_healthy_for_guess() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    for prompt in ["class Node:\n    def __init__(self", "def read_lines(path):"] {
        let said = parity(&["inspect", &model("F16"), "-p", prompt, "--format", "json"]).output().unwrap();
        let told: Value = serde_json::from_slice(&said.stdout).unwrap();
        let tokens: Vec<String> = told["tokens"].as_array().unwrap().iter().map(Value::to_string).collect();
        let at = dir.path().join(tokens.len().to_string());
        let mut command = parity(&["record", "--checkpoint", "blk.*.layer_out", "-o"]);
        command.arg(&at).arg("--").arg(driver().unwrap()).arg(&libraries);
        command.args([&model("F16"), &tokens.len().to_string()]).args(&tokens);
        let done = command.envs([("DRIVER_CACHE", "8"), ("DRIVER_FLASH", "on")]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let (code, said) = output(&["guess", "-m", &model("F16"), "--hidden", at.to_str().unwrap()]);
        assert!(code == 0, "{said}");
    }
}

/// Layer outputs alone, from which nothing but what was declared says how attention was computed.
#[test]
fn layer_outputs_are_healthy_without_a_graph_over_any_cache_and_attention() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let record = |name: &str, cache: &str, flash: &str, flags: &[&str]| {
        let at = dir.path().join(name);
        let mut command = parity(&["record", "--checkpoint", "blk.*.layer_out", "-o"]);
        command.arg(&at).args(flags).arg("--").arg(driver().unwrap()).arg(&libraries);
        command.args([&model("F16"), "13"]).args(PROMPT).args(ANSWER).args(["77", "101", "9", "1200"]);
        let done = command.envs([("DRIVER_CACHE", cache), ("DRIVER_FLASH", flash)]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let mut said = manifest(&at);
        assert!(said.as_object_mut().unwrap().remove("graphs").is_some());
        fs::write(at.join("manifest.json"), said.to_string()).unwrap();
        output(&["audit", at.to_str().unwrap(), "-m", &model("F16"), "--allow-missing"])
    };
    // f32, f16 and bf16, by ggml's numbers.
    for cache in ["0", "1", "30"] {
        for flash in ["on", "off"] {
            let (code, said) = record(&format!("{cache}-{flash}"), cache, flash, &[]);
            // Over f32 activations in f16 may have moved a layer by more than mistakes do, which is said.
            let blind = cache == "0" && code == 2 && said.contains("which would hide mistakes");
            assert!(code == 0 || blind, "cache {cache}, flash attention {flash}: {said}");
        }
        let inject = ["--inject", "attn.scale=0.2@2"];
        let (code, said) = record(&format!("{cache}-wrong"), cache, "off", &inject);
        assert!(code == 1 && said.contains("DIVERGES at blk.2.layer_out"), "cache {cache}: {said}");
    }
}
