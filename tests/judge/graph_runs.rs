//! `parity run` of models that are executed op by op: on new prompts where there is a builder, on a recording's graph
//! elsewhere; with mistakes, isolated, in pieces, in part.

use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::graphs::record::record;
use crate::support::graphs::{fill, head, recorded, renamed};
use crate::support::program;

/// Models with a builder that parity's engines have no nodes for: name, architecture.
const MODELS: [(&str, &str); 4] = [
    ("qwen3moe-moe", "qwen3moe"),
    ("gemma3-dense", "gemma3"),
    ("gpt-oss-moe", "gpt-oss"),
    ("llama-moe", "llama"),
];

/// Longer than the sliding windows of these models.
const PROMPT: &str = "1,17,33,42,5,99,101,7,64,12,88,3";

struct Case {
    folder: TempDir,
}

impl Case {
    fn new(model: &str) -> Case {
        Case::of(&head(model))
    }

    fn of(head: &[u8]) -> Case {
        let case = Case { folder: tempfile::tempdir().unwrap() };
        fill(head, &case.model());
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn model(&self) -> PathBuf {
        self.path("model.gguf")
    }

    /// Exit code and everything that was printed.
    fn parity(&self, words: &str) -> (i32, String) {
        let mut command = program::parity(&[]);
        command.env("PARITY_CACHE", self.path("cache"));
        let model = self.model();
        let args = words.split(' ').map(|word| match word.strip_prefix('%') {
            Some("") => model.clone(),
            Some(name) => self.path(name),
            None => PathBuf::from(word),
        });
        let done = command.args(args).output().unwrap();
        let text = String::from_utf8([&done.stdout[..], &done.stderr[..]].concat()).unwrap();
        (done.status.code().unwrap(), text)
    }

    fn succeeds(&self, words: &str) -> String {
        let (code, text) = self.parity(words);
        assert_eq!(code, 0, "{words}\n{text}");
        text
    }

    fn report(&self, words: &str, code: i32) -> Value {
        let (found, text) = self.parity(&format!("{words} --format json"));
        assert_eq!(found, code, "{words}\n{text}");
        serde_json::from_str(&text[text.find('{').unwrap()..=text.rfind('}').unwrap()]).unwrap()
    }

    /// Runs a prompt and three greedy steps, and keeps what was computed.
    fn dumped(&self, name: &str, more: &str) -> Value {
        let words = format!("run -m % --tokens {PROMPT} -n 3 --dump %{name}{more}");
        self.report(&words, 2)
    }
}

fn ids(report: &Value) -> Vec<&str> {
    let entries = report["checkpoints"].as_array().unwrap();
    entries.iter().map(|entry| entry["id"].as_str().unwrap()).collect()
}

#[test]
fn a_new_prompt_runs_and_its_dump_is_a_recording_with_its_graph() {
    for (model, architecture) in MODELS {
        let case = Case::new(model);
        let report = case.dumped("own", "");
        assert_eq!(report["verdict"], "undecided", "{model}");
        let reason = report["reason"].as_str().unwrap();
        assert!(reason.contains("nothing was compared"), "{reason}");
        let next = report["next"][0].as_str().unwrap();
        assert!(next.starts_with("parity record -o ref -- llama-completion -m "), "{next}");
        assert_eq!(report["candidate"]["model"]["architecture"], architecture);
        assert_eq!(report["candidate"]["tokens"], 15, "{model}");
        // Every node was judged, and found healthy, even without a reference.
        for entry in report["checkpoints"].as_array().unwrap() {
            assert_eq!(entry["verdict"], "match", "{model} {entry}");
        }
        let text = case.succeeds("audit %own -m %");
        assert!(text.contains("PARITY"), "{model}: {text}");
        // The wiring of its own graph is the file's, and another prompt's, form and arithmetic give the same values.
        for more in ["", " --numerics f64", " --isolate", " --numerics llama-cpu"] {
            let report = case.report(&format!("run -m % --reference %own{more}"), 0);
            assert_eq!(report["verdict"], "parity", "{model}{more}");
            let notes = report["notes"].to_string();
            assert!(notes.contains("the wiring is the model file's"), "{model}: {notes}");
        }
        case.succeeds("diff %own %own -m %");
    }
}

#[test]
fn pieces_and_parts_of_a_prompt_are_compared_row_by_row() {
    for (model, _) in MODELS {
        let case = Case::new(model);
        case.dumped("own", "");
        let whole = case.report(&format!("run -m % --tokens {PROMPT} -n 3 --chunk 5 --reference %own"), 0);
        assert_eq!(whole["coverage"]["checkpoints_missing"], 0, "{model}");
        assert_eq!(whole["candidate"]["steps"], serde_json::json!([5, 5, 2, 1, 1, 1]), "{model}");
        let logits = whole["checkpoints"].as_array().unwrap().last().unwrap();
        assert_eq!((&logits["id"], &logits["shape"][0]), (&"logits".into(), &15.into()), "{model}");
        // The beginning of what the reference holds, to the end of a layer.
        let part = case.report("run -m % --tokens 1,17,33,42 --layer 0 --reference %own", 0);
        let last = *ids(&part).last().unwrap();
        assert_eq!(last, "blk.0.layer_out", "{model}");
        assert!(ids(&part).iter().all(|id| *id == "embed" || id.starts_with("blk.0.")), "{model}");
        // Inside of attention, which the reference was not asked for.
        let (code, text) =
            case.parity(&format!("run -m % --tokens {PROMPT} --checkpoint blk.0.attn_probs --dump %inside"));
        assert_eq!(code, 2, "{text}");
        let report = case.report(
            &format!("run -m % --tokens {PROMPT} --checkpoint blk.0.attn_probs --reference %inside"),
            0,
        );
        assert_eq!(ids(&report), ["blk.0.attn_probs"], "{model}");
    }
}

#[test]
fn neither_a_checkpoint_that_is_asked_for_nor_threads_change_a_bit() {
    let case = Case::new("gemma3-dense");
    case.dumped("whole", " -t 1");
    case.dumped("part", " -t 2 --checkpoint logits");
    let logits = |dump: &str| {
        let dump = parity_dump::Dump::open(&case.path(dump)).unwrap();
        let recorded = dump.get("logits".parse().unwrap()).unwrap();
        let mut row = Vec::new();
        (0..recorded.len())
            .flat_map(|i| {
                dump.row(recorded, i, &mut row);
                row.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            })
            .collect::<Vec<u32>>()
    };
    assert_eq!(logits("whole"), logits("part"));
    assert!(!logits("whole").is_empty());
}

/// The first divergence: which node, which mistake.
fn first(report: &Value) -> (String, Vec<String>) {
    let first = &report["first_divergence"];
    let names = first["diagnosis"].as_array().unwrap().iter();
    let names = names.map(|one| one["fault"].as_str().unwrap().to_owned()).collect();
    (first["checkpoint"].as_str().unwrap().to_owned(), names)
}

#[test]
fn mistakes_are_injected_and_named() {
    for (model, mistake, node) in [
        ("qwen3moe-moe", "moe.expert_index", "blk.0.ffn_gate_exps"),
        ("qwen3moe-moe", "moe.expert_index", "blk.1.ffn_down_exps"),
        ("qwen3moe-moe", "norm.no_weight", "blk.1.q_norm"),
        ("gemma3-dense", "rope.base", "blk.1.k_rope"),
        ("gemma3-dense", "rope.base#1", "blk.0.q_rope"),
        ("gemma3-dense", "ffn.silu", "blk.0.ffn_act"),
        ("gemma3-dense", "residual.twice", "blk.0.attn_residual"),
        ("gpt-oss-moe", "attn.sinks", "blk.1.attn_ctx"),
        ("gpt-oss-moe", "linear.wrong_layer", "blk.1.k_proj"),
        ("llama-moe", "rope.interleaved", "blk.0.q_rope"),
    ] {
        let case = Case::new(model);
        case.dumped("own", "");
        for more in ["", " --isolate"] {
            let words = format!("run -m % --reference %own --inject {mistake}@{node}{more}");
            let report = case.report(&words, 1);
            let (at, names) = first(&report);
            assert_eq!(at, node, "{model} {mistake}{more}");
            let name = mistake.split('#').next().unwrap();
            assert_eq!(names.first().map(String::as_str), Some(name), "{model} {mistake}{more}: {names:?}");
            assert!(report["notes"].to_string().contains(&format!("{name} was injected")), "{report}");
            // Nothing else is accused; what follows inherits.
            assert_eq!(report["origins"], serde_json::json!([node]), "{model} {mistake}{more}");
        }
        // The dump of a wrong engine, judged by its graph, which is the healthy one.
        let (code, text) =
            case.parity(&format!("run -m % --reference %own --inject {mistake}@{node} --dump %wrong"));
        assert_eq!(code, 1, "{text}");
        let (at, names) = first(&case.report("audit %wrong -m %", 1));
        assert_eq!((at.as_str(), names[0].as_str()), (node, mistake.split('#').next().unwrap()), "{model}");
    }
}

#[test]
fn a_mistake_without_a_reference_is_found_too() {
    let case = Case::new("gpt-oss-moe");
    let words = format!("run -m % --tokens {PROMPT} -n 2 --inject rope.sign@1");
    let report = case.report(&words, 1);
    assert_eq!(first(&report), ("blk.1.q_rope".to_owned(), vec!["rope.sign".to_owned()]));
    assert_eq!(report["origins"], serde_json::json!(["blk.1.q_rope", "blk.1.k_rope"]));
}

#[test]
fn what_cannot_be_injected_is_refused() {
    let case = Case::new("qwen3moe-moe");
    for (mistake, says) in [
        ("moe.top_k@blk.0.attn_norm", "one of norm.none, norm.no_weight"),
        ("moe.topk", "did you mean moe.top_k"),
        ("rope.base=x@0", "another base than the model's"),
        ("rope.sign=5@0", "`rope.sign` takes no value"),
        ("rope.base=@0", "a value is expected after `=`"),
        ("rope.base#x", "a number is expected after `#`"),
        ("rope.base@7", "layers 0 to 1"),
        ("rope.base@", "a layer or a checkpoint is expected after `@`"),
        ("data.f16_overflow@blk.9.v", "blk.9.v, which the graph has not"),
    ] {
        let (code, text) =
            case.parity(&format!("run -m % --tokens {PROMPT} --inject {mistake} --dump %none"));
        assert_eq!(code, 2, "{mistake}: {text}");
        assert!(text.contains(says), "{mistake}: {text}");
        assert!(!case.path("none").exists(), "{mistake}");
    }
}

#[test]
fn mistakes_have_values_and_one_node_may_have_two() {
    let case = Case::new("qwen3moe-moe");
    let notes = |mistakes: &str| {
        let report = case.report(&format!("run -m % --tokens {PROMPT} {mistakes}"), 1);
        assert_eq!(first(&report).0, "blk.0.q_rope", "{mistakes}");
        report
    };
    let one = notes("--inject rope.base=5@0");
    assert_eq!(first(&one).1, ["rope.base"], "{one}");
    assert!(one["notes"].to_string().contains("rope.base was injected: RoPE base is 5,"), "{one}");
    let two = notes("--inject rope.sign@0 --inject rope.base@0");
    assert_eq!(first(&two).1, ["rope.sign + rope.base"], "{two}");
    for name in ["rope.sign", "rope.base"] {
        assert!(two["notes"].to_string().contains(&format!("{name} was injected")), "{two}");
    }
}

/// A model of an architecture that nobody has a builder for, and a recording of it.
fn unknown() -> Case {
    let known = Case::new("qwen3moe-moe");
    record(&known.model(), &recorded("qwen3moe-moe", ""), &known.path("own"));
    let case = Case::of(&renamed(head("qwen3moe-moe"), "qwen3moe", "qwen9moe"));
    std::fs::rename(known.path("own"), case.path("own")).unwrap();
    case
}

#[test]
fn an_architecture_without_a_builder_runs_on_its_recording_alone() {
    let case = unknown();
    let (code, text) = case.parity(&format!("run -m % --tokens {PROMPT}"));
    assert!(code == 2 && text.contains("qwen9moe") && text.contains("parity record -o ref"), "{text}");
    let (code, text) = case.parity(&format!("run -m % --tokens {PROMPT} --reference %own"));
    assert!(code == 2 && text.contains("--reference alone"), "{text}");
    for more in ["", " --isolate", " --numerics f64"] {
        let report = case.report(&format!("run -m % --reference %own{more}"), 0);
        assert!(report["notes"].to_string().contains("wiring is as the producer declares it"), "{report}");
    }
    case.succeeds("run -m % --reference %own --dump %mine");
    case.succeeds("audit %mine -m %");
    let (code, text) = case.parity("run -m % --reference %own --isolate --dump %fed");
    assert!(code == 2 && text.contains("--dump without --isolate"), "{text}");
    let mistake = "moe.expert_index@blk.1.ffn_up_exps";
    let report = case.report(&format!("run -m % --reference %own --inject {mistake} --dump %wrong"), 1);
    let (at, names) = first(&report);
    assert_eq!(format!("{}@{at}", names[0]), mistake);
    let (at, names) = first(&case.report("diff %wrong %own -m %", 1));
    assert_eq!(format!("{}@{at}", names[0]), mistake);
}

#[test]
fn what_is_computed_in_f64_is_judged_as_that() {
    for (model, _) in MODELS {
        let case = Case::new(model);
        case.dumped("exact", " --numerics f64");
        let text = case.succeeds("audit %exact -m %");
        assert!(text.contains("PARITY"), "{model}: {text}");
        case.succeeds("run -m % --reference %exact");
        let mistake = "linear.wrong_layer@blk.1.k_proj";
        let (code, text) = case
            .parity(&format!("run -m % --reference %exact --numerics f64 --inject {mistake} --dump %wrong"));
        assert_eq!(code, 1, "{model}: {text}");
        let (at, names) = first(&case.report("audit %wrong -m %", 1));
        assert_eq!(format!("{}@{at}", names[0]), mistake, "{model}");
    }
}

#[test]
fn as_many_rows_are_audited_as_are_asked_for() {
    let case = Case::new("gpt-oss-moe");
    let tokens: Vec<String> = (0..40).map(|i| (1 + i * 7 % 97).to_string()).collect();
    let tokens = tokens.join(",");
    case.report(&format!("run -m % --tokens {tokens} --dump %own"), 2);
    let screened = |words: &str| {
        let coverage = &case.report(words, 0)["coverage"];
        (coverage["rows_audited"].as_u64(), coverage["rows_screened"].as_u64())
    };
    for command in ["audit %own -m %", "diff %own %own -m %", "run -m % --reference %own"] {
        let [few, usual, all] =
            ["1", "4", "all"].map(|rows| screened(&format!("{command} --audit-rows {rows}")));
        assert_eq!(screened(command), usual, "{command}");
        assert_eq!(all.1, Some(0), "{command}");
        assert!(few.1 > usual.1 && usual.1 > all.1, "{command}: {few:?} {usual:?} {all:?}");
        assert_eq!(few.0.zip(few.1).map(|(a, b)| a + b), all.0, "{command}");
    }
}

/// Multiplies one head of one token of a tensor of a dump by a factor, where it is recorded.
fn scaled(dump: &std::path::Path, tensor: &str, token: usize, head: usize, width: usize, factor: f32) {
    let file = dump.join("step-0000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let entry = &table[tensor];
    let row: u64 = entry["shape"].as_array().unwrap()[1..].iter().map(|n| n.as_u64().unwrap()).product();
    let start = 8 + header + entry["data_offsets"][0].as_u64().unwrap() as usize;
    let first = start + 4 * (token * row as usize + head * width);
    for value in bytes[first..first + 4 * width].chunks_exact_mut(4) {
        let scaled = factor * f32::from_le_bytes(value.try_into().unwrap());
        value.copy_from_slice(&scaled.to_le_bytes());
    }
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn attention_of_a_long_recording_is_screened_where_it_is_not_computed_again() {
    let case = Case::new("gemma3-dense");
    let tokens: Vec<String> = (0..150).map(|i| (1 + i * 7 % 97).to_string()).collect();
    case.report(&format!("run -m % --tokens {} --dump %own", tokens.join(",")), 2);
    let report = case.report("audit %own -m % --checkpoint blk.*.attn_ctx", 0);
    assert!(report["coverage"]["rows_screened"].as_u64().unwrap() > 2 * 100, "{report}");
    // One head of one token that is in no sample, a twentieth too large.
    let dump = parity_dump::Dump::open(&case.path("own")).unwrap();
    let id = "blk.1.attn_ctx";
    let width: usize = dump.get(id.parse().unwrap()).unwrap().row_shape().iter().product();
    scaled(&case.path("own"), id, 101, 0, width / 4, 1.05);
    let report = case.report("audit %own -m %", 1);
    assert_eq!(first(&report).0, id, "{report}");
    let report = case.report("audit %own -m % --audit-rows all", 1);
    assert_eq!(first(&report).0, id, "{report}");
    assert_eq!(report["coverage"]["rows_screened"], 0);
}

#[test]
fn without_an_audit_nothing_but_a_tolerance_passes() {
    let case = Case::new("gemma3-dense");
    case.dumped("own", "");
    case.dumped("exact", " --numerics f64");
    for command in ["diff %own %exact -m %", "run -m % --reference %exact"] {
        let report = case.report(&format!("{command} --no-audit"), 2);
        assert!(report["reason"].as_str().unwrap().contains("nothing says by how much they may"), "{report}");
        assert!(report["coverage"]["rows_audited"].is_null(), "{report}");
        assert!(report["notes"].to_string().contains("the wiring is the model file's"), "{report}");
        let report = case.report(&format!("{command} --no-audit --nmse 1e-6"), 0);
        assert!(report["reason"].as_str().unwrap().contains("within the tolerance given"), "{report}");
        let (code, text) = case.parity(&format!("{command} --no-audit --nmse 1e-18"));
        assert_eq!(code, 1, "{text}");
    }
    let report = case.report("run -m % --reference %own --no-audit", 0);
    assert!(report["reason"].as_str().unwrap().contains("equal"), "{report}");
}

#[test]
fn a_run_that_is_refused_leaves_no_dump() {
    let case = Case::new("gemma3-dense");
    let (code, text) = case.parity("run -m % --tokens 1,99999999 --dump %none");
    assert!(code == 2 && text.contains("beyond the vocabulary"), "{text}");
    assert!(!case.path("none").exists());
}

#[test]
fn what_the_machine_does_not_have_is_refused() {
    let case = Case::new("gemma3-dense");
    for (more, says) in [
        (" --device cuda", "auto or cpu"),
        (" --numerics f16", "f32, f64 or llama-cpu"),
        (" --isolate", "there are no inputs to feed"),
        (" -n 100000000", "more positions than the model's context length"),
        (" --layer 9", "no checkpoint of this model is selected"),
    ] {
        let (code, text) = case.parity(&format!("run -m % --tokens {PROMPT}{more}"));
        assert!(code == 2 && text.contains(says), "{more}: {text}");
    }
    let (code, text) = case.parity("run -m % --tokens 1,99999999");
    assert!(code == 2 && text.contains("beyond the vocabulary"), "{text}");
    let (code, text) = case.parity("run -m %");
    assert!(code == 2 && text.contains("there is nothing to run"), "{text}");
}
