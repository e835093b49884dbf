//! Recordings of a recurrent model, whose scan has output and state in one tensor: beside themselves, beside runs of other
//! steps, and beside what is really another graph, another value or another tensor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parity::arithmetic::Arithmetic;
use parity::checkpoint::Checkpoint;
use parity::engine::op_by_op::Machine;
use parity::gguf::{DType, Gguf, Value as Metadata};
use parity_graph::text;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value as Json;
use tempfile::TempDir;

use crate::support::gguf_writer::GgufWriter;
use crate::support::graphs::record::{self, Step};
use crate::support::graphs::values;
use crate::support::program::{answer, parity};

/// Weights by name, slowest axis first.
const WEIGHTS: [(&str, [usize; 2]); 11] = [
    ("token_embd.weight", [8, 4]),
    ("blk.0.attn_norm.weight", [1, 4]),
    ("blk.0.ssm_in.weight", [4, 4]),
    ("blk.0.ssm_x.weight", [4, 4]),
    ("blk.0.ssm_dt.weight", [4, 4]),
    ("blk.0.ssm_dt.bias", [1, 4]),
    ("blk.0.ssm_a", [4, 2]),
    ("blk.0.ssm_d", [1, 4]),
    ("blk.0.ssm_out.weight", [4, 4]),
    ("output_norm.weight", [1, 4]),
    ("output.weight", [8, 4]),
];
const TOKENS: [u32; 6] = [3, 1, 7, 2, 5, 6];
const SCAN: &str = "blk.0.ssm_scan";

/// The graph of a step of `n` tokens, as llama.cpp has it of mamba; the first step clears the state.
fn graph_text(n: usize, first: bool) -> String {
    let (cleared, idle) = if first { ("8", "") } else { ("0", " idle") };
    let (scan, state, all) = (4 * n + 8, 16 * n, 16 * n);
    let mut out = format!(
        "graph 26 of 40 on=CPU
GET_ROWS f32 4,{n} < 26 27 : embd
RESHAPE f32 8 view=28 < 28 : cache_s_l0 (reshaped)
VIEW f32 {cleared} view=28{idle} < 1 : cache_s_l0 (reshaped) (view)
SCALE f32 {cleared} view=28{idle} < 2 : cache_s_l0 (reshaped) (view) (view)
RESHAPE f32 2,1,4 view=28 < 1 : cache_s_l0 (reshaped) (reshaped)
RMS_NORM f32 4,{n} eps=1e-05 < 0 : norm-0
MUL f32 4,{n} < 5 30 : attn_norm-0
MUL_MAT f32 4,{n} < 31 6 : node_7
RESHAPE f32 1,4,{n} view=7 < 7 : node_7 (reshaped)
MUL_MAT f32 4,{n} < 32 7 : node_9
VIEW f32 2,1,{n} nb=4,8,16,{all} view=9 < 9 : node_9 (view)
VIEW f32 2,1,{n} nb=4,8,16,{all} bytes=8 view=9+8 < 9 : node_9 (view)
MUL_MAT f32 4,{n} < 33 7 : node_12
ADD f32 4,{n} < 12 34 : node_13
SSM_SCAN f32 {scan} snapshots=1 < 4 8 13 35 10 11 29 : node_14
VIEW f32 8 bytes={state} view=14+{state} < 14 : node_14 (view)
VIEW f32 8 view=28 < 28 : cache_s_l0 (view)
CPY f32 8 view=28 < 15 16 : cache_s_l0 (view) (copy of node_14 (view))
VIEW f32 4,{n} view=14 < 14 : node_14 (view)
MUL f32 4,{n} < 7 36 : node_19
ADD f32 4,{n} < 18 19 : node_20
MUL_MAT f32 4,{n} < 37 20 : node_21
ADD f32 4,{n} < 21 0 : l_out-0
RMS_NORM f32 4,{n} eps=1e-05 < 22 : norm
MUL f32 4,{n} < 23 38 : result_norm
MUL_MAT f32 8,{n} < 39 24 : result_output
NONE f32 4,8 : token_embd.weight
NONE i32 {n} : inp_tokens
NONE f32 8 : cache_s_l0
NONE i32 1 : rs_s_copy
"
    );
    for (name, [rows, columns]) in &WEIGHTS[1..] {
        let extents = if *rows == 1 { columns.to_string() } else { format!("{columns},{rows}") };
        out += &format!("NONE f32 {extents} : {name}\n");
    }
    out
}

/// How a recording is made.
struct How<'a> {
    /// Tokens of each step.
    steps: &'a [usize],
    /// What the text of a graph becomes.
    text: &'a dyn Fn(String) -> String,
    /// What is done to the recorded scan of a step.
    scan: &'a dyn Fn(usize, &mut Vec<f64>),
}

impl<'a> How<'a> {
    fn healthy(steps: &'a [usize]) -> Self {
        How { steps, text: &|text| text, scan: &|_, _| {} }
    }
}

struct Case(TempDir);

impl Case {
    fn new() -> Case {
        let case = Case(tempfile::tempdir().unwrap());
        let mut file = GgufWriter::new().with("general.architecture", Metadata::String("mamba".to_owned()));
        for (name, [rows, columns]) in WEIGHTS {
            let shape = if rows == 1 { vec![columns] } else { vec![rows, columns] };
            file.tensors.push((name.to_owned(), DType::F32, shape, values(name, rows * columns)));
        }
        std::fs::write(case.model(), file.bytes()).unwrap();
        case
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("model.gguf")
    }

    fn record(&self, name: &str, how: &How<'_>) -> PathBuf {
        let (dump, gguf) = (self.0.path().join(name), Gguf::open(&self.model()).unwrap());
        let mut writer = record::writer(&self.model(), &dump, "llama.cpp");
        let mut machine = Machine::<f64>::new(&gguf, Arithmetic::EXACT);
        let (mut first, mut numbers) = (0, Vec::new());
        for (step, &count) in how.steps.iter().enumerate() {
            let text = (how.text)(graph_text(count, step == 0));
            let number = match numbers.iter().position(|known| *known == text) {
                Some(number) => number,
                None => {
                    numbers.push(text.clone());
                    writer.graph(&text).unwrap()
                }
            };
            let graph = text::read(&text).unwrap().remove(0);
            let tokens = &TOKENS[first..first + count];
            let scan = |id: Checkpoint, values: &mut Vec<f64>| {
                if id.to_string() == SCAN {
                    (how.scan)(step, values);
                }
            };
            let (number, given) = (Some(number), given(tokens));
            let of_step = Step { tokens, first, graph: &graph, number, given: &given };
            let how = record::How { written: &scan, ..record::How::healthy() };
            of_step.record(&mut machine, &mut writer, &how);
            first += count;
        }
        writer.finish().unwrap();
        dump
    }

    /// Exit status and report of a diff of two recordings.
    fn diff(&self, [one, other]: [&Path; 2], more: &[&str]) -> (i32, Json) {
        let done = parity(&["diff", "--format", "json"]).args([one, other]).args(more).output().unwrap();
        let report = serde_json::from_slice(&done.stdout);
        let report = report.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&done.stderr)));
        (done.status.code().unwrap(), report)
    }

    /// Exit status and report of an audit of one.
    fn audit(&self, dump: &Path) -> (i32, Json) {
        answer(&["audit", dump.to_str().unwrap(), "-m", self.model().to_str().unwrap(), "--format", "json"])
    }

    /// As [`Case::diff`], both sides audited.
    fn audited(&self, sides: [&Path; 2]) -> (i32, Json) {
        self.diff(sides, &["-m", self.model().to_str().unwrap()])
    }
}

/// What the inputs hold.
fn given(tokens: &[u32]) -> BTreeMap<String, Vec<f64>> {
    let tokens = tokens.iter().map(|&token| f64::from(token)).collect();
    BTreeMap::from([("inp_tokens".to_owned(), tokens), ("rs_s_copy".to_owned(), vec![0.0])])
}

fn verdict((code, report): &(i32, Json)) -> (i32, &str) {
    (*code, report["verdict"].as_str().unwrap())
}

fn reason((_, report): &(i32, Json)) -> &str {
    report["reason"].as_str().unwrap_or_default()
}

#[test]
fn a_recording_has_the_graph_that_it_has() {
    let case = Case::new();
    let own = case.record("own", &How::healthy(&[5, 1]));
    for found in [case.audited([&own, &own]), case.diff([&own, &own], &[])] {
        assert_eq!(verdict(&found), (0, "parity"), "{}", reason(&found));
    }
}

#[test]
fn a_state_that_is_cleared_otherwise_is_another_graph() {
    let case = Case::new();
    let own = case.record("own", &How::healthy(&[5, 1]));
    // The state is 0 before: the values are the same.
    let scaled = |text: String| text.replace("SCALE f32 8 view=28 <", "SCALE f32 8 scale=0.5 view=28 <");
    let kept = |text: String| text.replace("SCALE f32 8 view=28 <", "SCALE f32 8 view=28 idle <");
    type Edit<'a> = (&'a dyn Fn(String) -> String, i32, &'a str);
    let edits: [Edit<'_>; 2] = [
        (&scaled, 1, "scale 0.5 in the candidate, 0 in the reference"),
        // What is left out may be another form of the same.
        (&kept, 2, "(SCALE) is in the reference and not in the candidate"),
    ];
    for (place, (text, code, expected)) in edits.into_iter().enumerate() {
        let other = case.record(&format!("other{place}"), &How { text, ..How::healthy(&[5, 1]) });
        let found = case.audited([&other, &own]);
        let said = found.1.to_string();
        assert!(verdict(&found).0 == code && said.contains(expected), "{said}");
        let unsettled = ["the graphs of the two sides are not the same", "parity has no graph of its own"];
        assert!(said.contains(unsettled[usize::from(code == 1)]), "{said}");
    }
}

/// The text of a graph whose scan keeps its last three states.
fn snapshots(n: usize, text: &str) -> String {
    let kept = |states: usize| format!("SSM_SCAN f32 {} snapshots={states}", 4 * n + 8 * states);
    assert!(text.contains(&kept(1)));
    text.replace(&kept(1), &kept(3))
}

#[test]
fn states_that_nobody_has_written_yet_are_not_judged() {
    let case = Case::new();
    let text = |text: String| {
        let tokens = if text.contains("GET_ROWS f32 4,5") { 5 } else { 1 };
        snapshots(tokens, &text)
    };
    // A step of one token has two states fewer than there is room for.
    for garbage in [0.25, -1e30, f64::NAN] {
        let unwritten = |step: usize, values: &mut Vec<f64>| {
            if step == 1 {
                values[4 + 8..].fill(garbage);
            }
        };
        let how = How { text: &text, scan: &unwritten, ..How::healthy(&[5, 1]) };
        let own = case.record(&format!("own{garbage}"), &how);
        for found in [case.audited([&own, &own]), case.audit(&own)] {
            assert_eq!(verdict(&found), (0, "parity"), "{garbage}: {}", reason(&found));
        }
    }
    // The states that are there are judged: the last one and the two before it.
    for element in [20, 20 + 8, 20 + 2 * 8 + 7] {
        let wrong = |step: usize, values: &mut Vec<f64>| {
            if step == 0 {
                values[element] += 0.25;
            }
        };
        let how = How { text: &text, scan: &wrong, ..How::healthy(&[5, 1]) };
        let found = case.audit(&case.record(&format!("wrong{element}"), &how));
        assert_eq!(verdict(&found), (1, "divergence"), "{element}: {}", reason(&found));
        assert_eq!(found.1["first_divergence"]["checkpoint"], SCAN);
    }
}

#[test]
fn a_healthy_run_of_other_steps_is_not_accused_of_the_shape_of_its_scan() {
    let case = Case::new();
    let (whole, parts) =
        (case.record("whole", &How::healthy(&[5, 1])), case.record("parts", &How::healthy(&[3, 2, 1])));
    for sides in [[&*whole, &*parts], [&*parts, &*whole]] {
        let found = case.audited(sides);
        assert_eq!(verdict(&found), (0, "parity"), "{}", reason(&found));
        assert!(found.1["notes"].to_string().contains("computed in different steps"), "{}", found.1["notes"]);
        // Nobody has looked at the scans of those steps.
        let found = case.diff(sides, &[]);
        assert_eq!(verdict(&found), (2, "undecided"), "{}", found.1);
        assert!(reason(&found).contains("missing"), "{}", reason(&found));
        // The state between two steps was rounded to f32: the values differ by that.
        let found = case.diff(sides, &["--allow-missing", "--nmse", "1e-9"]);
        assert_eq!(verdict(&found), (0, "parity"), "{}", found.1);
    }
}

#[test]
fn an_edited_scan_is_found_in_the_same_steps_and_in_others() {
    let case = Case::new();
    let (whole, parts) =
        (case.record("whole", &How::healthy(&[5, 1])), case.record("parts", &How::healthy(&[3, 2, 1])));
    // A value of the output, one of the state, and one of the last step, which all runs have.
    for (place, (at, element)) in [(0, 6), (0, 22), (1, 2)].into_iter().enumerate() {
        let edit = |step: usize, values: &mut Vec<f64>| {
            if step == at {
                values[element] += 0.25;
            }
        };
        let how = How { scan: &edit, ..How::healthy(&[5, 1]) };
        let edited = case.record(&format!("edited{place}"), &how);
        for other in [&whole, &parts] {
            let found = case.audited([&edited, other]);
            assert_eq!(verdict(&found), (1, "divergence"), "{at} {element}: {}", reason(&found));
            assert_eq!(found.1["first_divergence"]["checkpoint"], SCAN);
        }
        let found = case.diff([&edited, &whole], &["--allow-missing"]);
        assert_eq!(verdict(&found).0, 2, "{at} {element}: {}", found.1);
    }
}

#[test]
fn a_scan_of_another_shape_in_the_same_step_is_told() {
    let case = Case::new();
    let own = case.record("own", &How::healthy(&[3, 2, 1]));
    // Not of the first step, whose shape is that of all others as a rule.
    let longer = |step: usize, values: &mut Vec<f64>| values.resize(values.len() + 2 * (step % 2), 0.0);
    let other = case.record("other", &How { scan: &longer, ..How::healthy(&[3, 2, 1]) });
    for found in [case.audited([&other, &own]), case.diff([&other, &own], &[])] {
        assert_eq!(verdict(&found), (1, "divergence"), "{}", reason(&found));
        assert_eq!(found.1["first_divergence"]["verdict"], "shape");
    }
}

/// A recording as an engine hands it over: no graph, no state, the scan's heads as a layer has them, (B, H, T, E).
fn handed_over(recording: &Path, to: &Path, edit: impl Fn(usize, &mut [f32])) {
    std::fs::create_dir(to).unwrap();
    let mut manifest: Json =
        serde_json::from_slice(&std::fs::read(recording.join("manifest.json")).unwrap()).unwrap();
    for key in ["graphs", "rows"] {
        manifest.as_object_mut().unwrap().remove(key);
    }
    manifest["producer"] = serde_json::json!({ "name": "mine" });
    for (number, step) in manifest["steps"].as_array().unwrap().iter().enumerate() {
        let file = step["file"].as_str().unwrap();
        let tokens = step["positions"].as_array().unwrap().len();
        let bytes = std::fs::read(recording.join(file)).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        let is_of_engine = |name: &str| !name.starts_with("leaf.") && !name.starts_with("cache");
        let mut all: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
        for (name, view) in read.iter().filter(|(name, _)| is_of_engine(name)) {
            let (mut shape, mut data) = (view.shape().to_vec(), view.data().to_vec());
            if name == SCAN {
                let value = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
                let rows: Vec<f32> = data.as_chunks::<4>().0[..4 * tokens].iter().map(value).collect();
                let mut heads: Vec<f32> =
                    (0..4).flat_map(|head| rows.iter().skip(head).step_by(4).copied()).collect();
                edit(number, &mut heads);
                shape = vec![1, 4, tokens, 1];
                data = heads.iter().flat_map(|value| value.to_le_bytes()).collect();
            }
            all.insert(name.to_owned(), (shape, data));
        }
        let views = all
            .iter()
            .map(|(name, (shape, data))| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
        std::fs::write(to.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    std::fs::write(to.join("manifest.json"), manifest.to_string()).unwrap();
}

#[test]
fn outputs_of_a_scan_are_taken_as_engines_have_them() {
    let case = Case::new();
    let own = case.record("own", &How::healthy(&[5, 1]));
    let (right, wrong) = (case.0.path().join("right"), case.0.path().join("wrong"));
    handed_over(&own, &right, |_, _| {});
    let found = case.audited([&right, &own]);
    assert_eq!(verdict(&found), (0, "parity"), "{:#}", found.1);
    let scan = found.1["checkpoints"].as_array().unwrap().iter().find(|entry| entry["id"] == SCAN).unwrap();
    assert!(scan["local"]["candidate"]["over_bound"].as_f64().unwrap() <= 1.0, "{scan:#}");
    // One head of one token, in the prefill and in the decode step.
    for (at, element) in [(0, 7), (1, 2)] {
        let _ = std::fs::remove_dir_all(&wrong);
        handed_over(&own, &wrong, |step, heads| {
            if step == at {
                heads[element] += 0.25;
            }
        });
        let found = case.audited([&wrong, &own]);
        assert_eq!(verdict(&found), (1, "divergence"), "{at}: {:#}", found.1["reason"]);
        assert_eq!(found.1["first_divergence"]["checkpoint"], SCAN);
    }
}
