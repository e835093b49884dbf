//! Recordings that bring their graph, on the command line: what `inspect` shows of it, and what an audit says of a model
//! file that was edited after the recording.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use parity_graph::text;
use tempfile::TempDir;

use crate::support::graphs::record::record;
use crate::support::graphs::{fill, head, recorded, with_f32, with_u32};
use crate::support::program::{flat, output};

/// A model file, and a recording of it.
struct Case {
    folder: TempDir,
    head: Vec<u8>,
}

impl Case {
    fn new(model: &str) -> Case {
        let case = Case { folder: tempfile::tempdir().unwrap(), head: head(model) };
        fill(&case.head, &case.model());
        record(&case.model(), &recorded(model, ""), &case.dump());
        case
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn dump(&self) -> PathBuf {
        self.folder.path().join("dump")
    }

    /// The file with another header, under the same name: weights stay.
    fn edited(&self, head: &[u8]) -> PathBuf {
        let folder = self.folder.path().join("edited");
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("model.gguf");
        fill(head, &path);
        path
    }
}

fn parity(args: &[&str], code: i32) -> String {
    let (found, text) = output(args);
    assert_eq!(found, code, "{args:?}: {text}");
    text
}

fn told(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_file_that_was_edited_after_the_recording_is_named_by_an_audit() {
    let cases = [
        ("qwen2-dense", "qwen2", 2),
        ("llama-dense", "llama", 2),
        ("qwen3-dense", "qwen3", 2),
        ("qwen3moe-moe", "qwen3moe", 2),
        ("gemma3-dense", "gemma3", 2),
        ("gpt-oss-moe", "gpt-oss", 2),
    ];
    for (model, architecture, heads) in cases {
        let case = Case::new(model);
        let dump = case.dump();
        let audit = |model: &Path, code| flat(&parity(&["audit", told(&dump), "-m", told(model)], code));
        let healthy = audit(&case.model(), 0);
        assert!(healthy.contains("the wiring is the model file's"), "{model}: {healthy}");
        let key = |name: &str| format!("{architecture}.{name}");
        let base = with_f32(case.head.clone(), &key("rope.freq_base"), 3e5);
        let text = audit(&case.edited(&base), 1);
        assert!(text.contains("RoPE base 10000 in the graph, 300000 in the file"), "{model}: {text}");
        let eps = with_f32(case.head.clone(), &key("attention.layer_norm_rms_epsilon"), 2e-6);
        let text = audit(&case.edited(&eps), 1);
        assert!(text.contains("epsilon 1e-05 in the graph, 2e-06 in the file"), "{model}: {text}");
        // Twice as many heads, half as wide: the widths of all tensors still fit.
        let text = audit(&case.edited(&halved(&case.head, architecture, heads)), 1);
        assert!(text.contains("heads"), "{model}: {text}");
    }
}

#[test]
fn a_dump_whose_manifest_names_another_text_is_refused() {
    let case = Case::new("qwen2-dense");
    let (dump, model) = (case.dump(), case.model());
    let file = dump.join("manifest.json");
    let own: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let with = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut manifest = own.clone();
        edit(&mut manifest);
        std::fs::write(&file, manifest.to_string()).unwrap();
        let audit = flat(&parity(&["audit", told(&dump), "-m", told(&model)], 2));
        let diff = flat(&parity(&["diff", told(&dump), told(&dump)], 2));
        assert!(diff.contains("than its manifest names"), "{diff}");
        audit
    };
    let first = own["tokens"][0].as_u64().unwrap();
    let text = with(&|manifest| manifest["tokens"][0] = (first + 1).into());
    assert!(text.contains("step 0 computed other tokens than its manifest names"), "{text}");
    let said = format!("expected: {} in row 0, as the manifest has it found: {first} in what", first + 1);
    assert!(text.contains(&said), "{text}");
    // The same tokens, one position further on.
    let text = with(&|manifest| {
        let tokens = manifest["tokens"].as_array_mut().unwrap();
        tokens.insert(0, first.into());
        for position in manifest["steps"][0]["positions"].as_array_mut().unwrap() {
            *position = (position.as_u64().unwrap() + 1).into();
        }
    });
    assert!(text.contains("step 0 computed other positions than its manifest names"), "{text}");
    std::fs::write(&file, own.to_string()).unwrap();
    parity(&["audit", told(&dump), "-m", told(&model)], 0);
}

/// A header with twice as many heads of half the width.
fn halved(head: &[u8], architecture: &str, heads: u32) -> Vec<u8> {
    let mut head = head.to_vec();
    for (name, value) in [("attention.head_count", 2 * heads), ("attention.head_count_kv", 2 * heads)] {
        head = with_u32(head, &format!("{architecture}.{name}"), value);
    }
    head
}

#[test]
fn inspect_shows_a_graph_layer_by_layer() {
    let case = Case::new("qwen3moe-moe");
    let dump = case.dump();
    let text = parity(&["inspect", told(&dump)], 0);
    insta::assert_snapshot!(
        "inspect_graph",
        text.split("\ngraph ").nth(1).unwrap().split("\ncheckpoint").next().unwrap()
    );
    // The two layers are alike.
    assert_eq!(text.matches("MUL_MAT_ID").count(), 3, "{text}");
    let one = parity(&["inspect", told(&dump), "--layer", "1"], 0);
    assert!(one.contains("blk.1.q_rope") && !one.contains("blk.0.") && !one.contains("\nlogits"), "{one}");
    let json: serde_json::Value =
        serde_json::from_str(&parity(&["inspect", told(&dump), "--format", "json"], 0)).unwrap();
    let nodes = json["graphs"][0]["nodes"].as_array().unwrap();
    let rope = nodes.iter().find(|node| node["id"] == "blk.1.q_rope").unwrap();
    assert_eq!(rope["op"], "ROPE");
    assert_eq!(rope["parameters"]["freq_base"], 10000.0);
    assert_eq!(rope["nodes"], serde_json::json!(["blk.1.q_norm"]));
    assert_eq!(rope["inputs"], serde_json::json!(["inp_pos"]));
    let graph = recorded("qwen3moe-moe", "");
    let computing = (0..graph.nodes).filter(|&id| graph.is_arithmetic(id)).count();
    assert_eq!(nodes.len(), computing);
}

#[test]
fn inspect_draws_a_graph() {
    let case = Case::new("gemma3-dense");
    let dump = case.dump();
    let whole = parity(&["inspect", told(&dump), "--format", "dot"], 0);
    let layer = parity(&["inspect", told(&dump), "--format", "dot", "--layer", "1"], 0);
    assert!(whole.contains("\"blk.0.q_norm\" -> \"blk.0.q_rope\""), "{whole}");
    assert!(whole.contains("\"leaf.attn_inp_kq_mask#2\" -> \"blk.1.attn_ctx\""), "{whole}");
    // What a layer reads of the one before is shown, and nothing else of it.
    assert!(
        layer.contains("\"blk.0.layer_out\" [style=dashed]") && !layer.contains("blk.0.q_rope"),
        "{layer}"
    );
    let Some(svg) = drawn(&whole) else { return };
    let graph = recorded("gemma3-dense", "");
    let nodes = (0..graph.nodes).filter(|&id| graph.is_arithmetic(id)).count();
    assert!(svg.matches("class=\"node\"").count() >= nodes, "{svg}");
    drawn(&layer).unwrap();
}

/// What Graphviz makes of a text; `None` where it is not installed.
fn drawn(dot: &str) -> Option<String> {
    let mut child =
        match Command::new("dot").arg("-Tsvg").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                assert!(std::env::var_os("PARITY_REQUIRE_GRAPHVIZ").is_none(), "dot: {error}");
                eprintln!("skipped: dot of Graphviz is not installed ({error})");
                return None;
            }
        };
    let mut input = child.stdin.take().unwrap();
    let text = dot.to_owned();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut input, text.as_bytes()));
    let done = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(done.status.success());
    Some(String::from_utf8(done.stdout).unwrap())
}

#[test]
fn what_brings_no_graph_is_not_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    fill(&head("qwen2-dense"), &model);
    for args in [["inspect", told(&model), "--format", "dot"], ["inspect", told(&model), "--layer", "1"]] {
        assert!(parity(&args, 2).contains("is a model"));
    }
    let case = Case::new("qwen2-dense");
    let none = parity(&["inspect", told(&case.dump()), "--layer", "7"], 2);
    assert!(none.contains("nothing of this recording is in these layers"), "{none}");
    // Names are foreign text: they end no string and no line.
    let mut graph = recorded("qwen2-dense", "");
    let node = graph.computed().next().unwrap();
    graph.tensors[node].name = "a\"]; b [label=\"\\".to_owned();
    let path = case.dump().join("graph-0000.txt");
    std::fs::write(path, text::write(&graph)).unwrap();
    let dot = parity(&["inspect", told(&case.dump()), "--format", "dot"], 0);
    drawn(&dot);
}

#[test]
fn a_graph_that_does_not_fit_into_memory_is_refused_by_name() {
    let case = Case::new("qwen3-dense");
    let (dump, model) = (case.dump(), case.model());
    let graph = dump.join("graph-0000.txt");
    let text = std::fs::read_to_string(&graph).unwrap();
    // A cache of 2^38 positions, which nothing has to hold for it to stand in a text.
    let huge =
        text.replace("f16 64,512 ", "f16 64,274877906944 ").replace("f16 64,512\n", "f16 64,274877906944\n");
    assert_ne!(huge, text);
    std::fs::write(&graph, huge).unwrap();
    let told = flat(&parity(&["audit", told(&dump), "-m", told(&model)], 2));
    assert!(told.contains("needs more memory than there is"), "{told}");
    assert!(told.contains("most of it for caches and states") && told.contains("-c N"), "{told}");
}
