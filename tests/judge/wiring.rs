//! Recordings whose graphs differ: the first node whose numbers or sources differ is the divergence, whatever the values
//! are.

use std::path::{Path, PathBuf};

use parity::arithmetic::Arithmetic;
use parity::engine::op_by_op::Machine;
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build, inputs};
use parity_graph::params::field;
use parity_graph::{Graph, Op, text};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::graphs::record::{self, How, Step, record};
use crate::support::graphs::{fill, filled, head, recorded};
use crate::support::program::{answer, flat, output};

const MODEL: &str = "qwen2-dense";
const FIRST: &str = "blk.0.q_rope";

/// A model file, to record graphs of.
struct Case(TempDir);

impl Case {
    fn new() -> Case {
        let case = Case(tempfile::tempdir().unwrap());
        fill(&head(MODEL), &case.model());
        case
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("model.gguf")
    }

    fn record(&self, name: &str, graph: &Graph) -> PathBuf {
        let dump = self.0.path().join(name);
        record(&self.model(), graph, &dump);
        dump
    }

    /// The recorded graph of the model, with another RoPE base.
    fn based(&self, name: &str, base: f32) -> PathBuf {
        let mut graph = recorded(MODEL, "");
        let word = field(&Op::Rope, "freq_base").unwrap().word;
        for tensor in graph.tensors.iter_mut().filter(|tensor| tensor.op == Op::Rope) {
            tensor.params.set_float(word, base);
        }
        self.record(name, &graph)
    }

    /// What is said of a diff, and its report.
    fn diff(&self, sides: [&Path; 2], more: &[&str]) -> (i32, String, Value) {
        let model = self.model();
        let sides = sides.map(|side| side.to_str().unwrap());
        let args = [&["diff"], &sides[..], &["-m", model.to_str().unwrap()], more].concat();
        let (code, text) = output(&args);
        let (same, report) = answer(&[&args[..], &["--format", "json"]].concat());
        assert_eq!(code, same, "{text}");
        (code, flat(&text), report)
    }
}

fn entry<'a>(report: &'a Value, id: &str) -> &'a Value {
    report["checkpoints"].as_array().unwrap().iter().find(|entry| entry["id"] == id).unwrap()
}

/// Nothing is called a match whose values differ by more than rounding.
fn no_match_differs(report: &Value) {
    for entry in report["checkpoints"].as_array().unwrap() {
        let differs = entry["rel_l2"].as_f64().is_some_and(|distance| distance > 1e-3);
        assert!(!(differs && entry["verdict"] == "match"), "{entry}");
    }
}

#[test]
fn another_rope_base_is_the_divergence() {
    let case = Case::new();
    let (own, other) = (case.based("own", 10_000.0), case.based("other", 777.0));
    let (code, text, report) = case.diff([&other, &own], &[]);
    assert_eq!(code, 1, "{text}");
    let first = "RoPE base 777 in the candidate, 10000 in the reference and in the file";
    assert!(text.contains(&format!("DIVERGES at {FIRST}: {first} (rope.base)")), "{text}");
    assert_eq!(report["first_divergence"]["checkpoint"], FIRST);
    let diagnosis = &report["first_divergence"]["diagnosis"][0];
    assert!(diagnosis["fault"] == "rope.base" && diagnosis["text"] == first, "{diagnosis}");
    assert!(entry(&report, FIRST)["verdict"] == "origin", "{}", entry(&report, FIRST));
    assert!(entry(&report, FIRST)["diagnosis"][0]["fault"] == "rope.base", "{}", entry(&report, FIRST));
    assert_eq!(report["origins"][0], FIRST);
    assert_eq!(entry(&report, "blk.0.q")["verdict"], "match");
    assert_eq!(entry(&report, "blk.0.attn_out")["verdict"], "inherited");
    no_match_differs(&report);
    // No tolerance makes them one graph.
    for more in [&["--rtol", "1e9", "--atol", "1e9"][..], &["--no-audit", "--rtol", "1e9", "--atol", "1e9"]] {
        let (code, text, report) = case.diff([&other, &own], more);
        assert!(code == 1 && report["first_divergence"]["checkpoint"] == FIRST, "{text}");
    }
}

#[test]
fn a_reference_that_is_not_the_files_is_wrong_itself() {
    let case = Case::new();
    let (own, other) = (case.based("own", 10_000.0), case.based("other", 777.0));
    let (code, text, report) = case.diff([&own, &other], &[]);
    assert_eq!(code, 2, "{text}");
    let reason = format!(
        "the reference itself is wrong at {FIRST}: RoPE base 777 in the reference, 10000 in the candidate and in the file \
         (rope.base)"
    );
    assert_eq!(report["reason"], reason);
    assert!(report["first_divergence"].is_null(), "{report}");
    assert_eq!(entry(&report, FIRST)["verdict"], "reference");
    no_match_differs(&report);
    // So it is beside a run, whose graph is built of the file.
    let (dump, model) = (other.to_str().unwrap(), case.model());
    let args = ["run", "--device", "cpu", "--reference", dump, "-m", model.to_str().unwrap()];
    for more in [&[][..], &["--no-audit", "--rtol", "1e9", "--atol", "1e9"]] {
        let (code, text) = output(&[&args[..], more].concat());
        let text = flat(&text);
        assert!(
            code == 2 && text.contains("RoPE base 777 in the reference, 10000 in the file"),
            "{code}: {text}"
        );
    }
    // Both are: that is a divergence, whatever is the same on both sides.
    let (code, text, report) = case.diff([&other, &other], &[]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("RoPE base 777 in the candidate and in the reference, 10000 in the file"),
        "{text}"
    );
    assert_eq!(report["first_divergence"]["checkpoint"], FIRST);
    // What comes then is the same on both sides.
    assert_eq!(entry(&report, "blk.0.attn_out")["verdict"], "match");
}

#[test]
fn an_audit_names_the_first_node_that_is_not_the_files() {
    let case = Case::new();
    let other = case.based("other", 777.0);
    let (dump, model) = (other.to_str().unwrap(), case.model());
    let args = ["audit", dump, "-m", model.to_str().unwrap(), "--format", "json"];
    let (code, report) = answer(&args);
    assert_eq!(code, 1, "{report}");
    assert_eq!(report["first_divergence"]["checkpoint"], FIRST);
    assert_eq!(
        report["first_divergence"]["diagnosis"][0]["text"],
        "RoPE base 777 in the graph, 10000 in the file"
    );
    assert_eq!(report["origins"], serde_json::json!([FIRST]));
    assert_eq!(entry(&report, FIRST)["verdict"], "origin");
    assert!(entry(&report, FIRST)["local"]["candidate"]["over_bound"].as_f64().unwrap() <= 1.0);
}

#[test]
fn without_a_model_file_it_is_said_that_nothing_settles_who_is_right() {
    let case = Case::new();
    let (own, other) = (case.based("own", 10_000.0), case.based("other", 777.0));
    for (sides, bases) in [([&own, &other], [10_000, 777]), ([&other, &own], [777, 10_000])] {
        let [one, two] = sides.map(|side| side.to_str().unwrap());
        let (code, text) = output(&["diff", one, two, "--rtol", "1e9", "--atol", "1e9"]);
        let text = flat(&text);
        assert_eq!(code, 1, "{text}");
        let first =
            format!("RoPE base {} in the candidate, {} in the reference; no model", bases[0], bases[1]);
        assert!(text.contains(&format!("DIVERGES at {FIRST}: {first}")), "{text}");
    }
}

#[test]
fn another_source_is_the_divergence_under_the_node_that_reads_it() {
    let case = Case::new();
    let own = recorded(MODEL, "");
    let leaf = |name: &str| own.tensors.iter().position(|tensor| tensor.name == name).unwrap();
    let (right, wrong) = (leaf("blk.1.ffn_norm.weight"), leaf("blk.0.ffn_norm.weight"));
    let mut other = own.clone();
    let sources = other.tensors.iter_mut().flat_map(|tensor| tensor.srcs.iter_mut().flatten());
    sources.filter(|source| **source == right).for_each(|source| *source = wrong);
    let sides = [&case.record("other", &other), &case.record("own", &own)];
    let (code, text, report) = case.diff(sides.map(PathBuf::as_path), &[]);
    assert_eq!(code, 1, "{text}");
    let first = "DIVERGES at blk.1.ffn_norm: it reads blk.0.ffn_norm.weight in the candidate, blk.1.ffn_norm.weight in the \
                 reference and in the file";
    assert!(text.contains(first), "{text}");
    assert_eq!(entry(&report, "blk.1.ffn_norm")["verdict"], "origin");
    no_match_differs(&report);
}

#[test]
fn a_mask_that_shows_other_cells_is_the_divergence() {
    let case = Case::new();
    let (gguf, graph) = (Gguf::open(&case.model()).unwrap(), recorded(MODEL, ""));
    let tokens: Vec<u32> = (1..=12).collect();
    let record = |name: &str, edit: &dyn Fn(&mut [f64], usize)| {
        let dump = case.0.path().join(name);
        let mut given = inputs(&build(&gguf, Shape::of(&graph)).unwrap(), &tokens, 0).unwrap();
        let mask = graph.tensors.iter().find(|tensor| tensor.name == "attn_inp_kq_mask").unwrap();
        edit(given.get_mut(&mask.name).unwrap(), mask.ne[0]);
        let mut writer = record::writer(&case.model(), &dump, "llama.cpp");
        let number = Some(writer.graph(&text::write(&graph)).unwrap());
        let step = Step { tokens: &tokens, first: 0, graph: &graph, number, given: &given };
        let how = How::healthy();
        step.record(&mut Machine::<f64>::new(&gguf, Arithmetic::EXACT), &mut writer, &how);
        writer.finish().unwrap();
        dump
    };
    let own = record("own", &|_, _| {});
    let other = record("other", &|mask, cells| mask[5 * cells + 6] = 0.0);
    let (code, text, report) = case.diff([&other, &own], &[]);
    assert_eq!(code, 1, "{text}");
    let first =
        "DIVERGES at blk.0.attn_ctx: it shows position 5 cells 0..7 in the candidate, cells 0..6 in the file";
    assert!(text.contains(first), "{text}");
    no_match_differs(&report);
    let (code, text, report) = case.diff([&own, &other], &[]);
    assert!(code == 2 && text.contains("the reference itself is wrong at blk.0.attn_ctx"), "{code}: {text}");
    no_match_differs(&report);
    // Without the file nothing settles it.
    let sides = [&other, &own].map(|side| side.to_str().unwrap());
    let (code, text) = output(&["diff", sides[0], sides[1], "--rtol", "1e9", "--atol", "1e9"]);
    assert!(code == 1 && flat(&text).contains("nothing settles which is right"), "{code}: {text}");
    let (code, text) = output(&["audit", sides[0], "-m", case.model().to_str().unwrap()]);
    let first = "it shows position 5 cells 0..7 in the graph, cells 0..6 in the file";
    assert!(code == 1 && flat(&text).contains(first), "{code}: {text}");
    let (code, text, _) = case.diff([&own, &own], &[]);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn the_form_of_attention_is_no_difference() {
    let case = Case::new();
    let gguf = filled(MODEL);
    let of = |flash: bool| {
        let shape = Shape::step(0, 12, 256, flash, Cache::F32);
        case.record(if flash { "one" } else { "three" }, &build(&gguf, shape).unwrap().graph)
    };
    let (one, three) = (of(true), of(false));
    for sides in [[&one, &three], [&three, &one]] {
        let (code, text, report) = case.diff(sides.map(PathBuf::as_path), &["--allow-missing"]);
        assert_eq!(code, 0, "{text}");
        assert!(
            report["notes"].to_string().contains("the wiring is the model file's"),
            "{}",
            report["notes"]
        );
    }
}
