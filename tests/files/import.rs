//! Printed tensors: what `llama-eval-callback` says is read as it was printed, in the format of either time,
//! and compared with an engine as far as it goes.

use std::fs;
use std::path::{Path, PathBuf};

use parity::record::import::text::{PrintedNode, Printout, parse};
use parity::record::import::{ImportOptions, Imported, import, seen};
use parity_dump::{Checkpoint, Dump, Kind};
use predicates::prelude::*;
use predicates::str::contains;
use proptest::prelude::*;

use crate::support::program::parity;

/// Printed by llama.cpp 0.5.0 for `def read` with the tiny Qwen2, nodes of the cache left out.
const PRINTED: &str = "tests/data/eval-callback.txt";
const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const TOKENS: [u32; 2] = [312, 863];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn printed() -> String {
    fs::read_to_string(root().join(PRINTED)).unwrap()
}

/// The two formats that releases print.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    /// Up to August 2025: the sum is of the printed values.
    Old,
    /// Since January 2026: the sum is of all.
    New,
}

/// Values that stand for a tensor: the flat index says which.
fn value(index: usize) -> f32 {
    ((index * 7919 % 20_011) as f32 - 10_000.0) / 1000.0
}

/// Prints a node as the programs do: the first and last three of each axis.
fn print(node: &PrintedNode, format: Format) -> String {
    let ne = node.ne;
    let shown = |n: usize| (0..n).filter(move |i| n <= 6 || *i < 3 || *i >= n - 3).collect::<Vec<_>>();
    let gap = |i: usize, n: usize| n > 6 && i == n - 3;
    let (mark, indent) = match format {
        Format::Old => ("ggml_debug:", "                                     "),
        Format::New => ("common_debug_cb_eval:", "    "),
    };
    let extents = |ne: [usize; 4]| format!("{}, {}, {}, {}", ne[0], ne[1], ne[2], ne[3]);
    let source = |index: usize| {
        node.sources.get(index).map_or(String::new(), |(name, ne)| format!("{name}{{{}}}", extents(*ne)))
    };
    let (name, dtype, op) = (&node.name, &node.dtype, &node.op);
    let mut out = format!(
        "{mark} {name:>24} = ({dtype}) {op:>10}({}, {}}}) = {{{}}}\n",
        source(0),
        source(1),
        extents(ne)
    );
    let mut sum = 0f32;
    if format == Format::New {
        sum = (0..ne.iter().product()).map(value).sum();
    }
    for i3 in 0..ne[3] {
        out += &format!("{indent}[\n");
        for i2 in shown(ne[2]) {
            if gap(i2, ne[2]) {
                out += &format!("{indent} ..., \n");
            }
            out += &format!("{indent} [\n");
            for i1 in shown(ne[1]) {
                if gap(i1, ne[1]) {
                    out += &format!("{indent}  ..., \n");
                }
                let mut words = Vec::new();
                for i0 in shown(ne[0]) {
                    let v = value(((i3 * ne[2] + i2) * ne[1] + i1) * ne[0] + i0);
                    if gap(i0, ne[0]) {
                        words.push("   ...".to_owned());
                    }
                    if format == Format::Old {
                        sum += v;
                    }
                    words.push(format!("{v:12.4}"));
                }
                out += &format!("{indent}  [{}],\n", words.join(", "));
            }
            out += &format!("{indent} ],\n");
        }
        out += &format!("{indent}]\n{indent}sum = {sum:.6}\n");
    }
    out
}

fn name() -> impl Strategy<Value = String> {
    "[A-Za-z_][A-Za-z0-9_.-]{0,20}( \\((view|permuted|copy of x)\\))?"
}

fn extent() -> impl Strategy<Value = [usize; 4]> {
    [1usize..20, 0usize..9, 1usize..9, 1usize..3]
}

prop_compose! {
    fn node()(
        name in name(),
        op in "[A-Z_]{2,12}",
        sources in prop::collection::vec((name(), extent()), 1..3),
        ne in extent(),
    ) -> PrintedNode {
        PrintedNode { name, dtype: "f32".to_owned(), op, sources, ne, values: Vec::new(), sum: None }
    }
}

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![Just(Format::Old), Just(Format::New)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_printed_is_read(nodes in prop::collection::vec(node(), 1..4), format in format()) {
        let noise = "llama_context: n_ctx = 4096 [not a row], sum of it all\n";
        let text: String = nodes.iter().map(|node| print(node, format) + noise).collect();
        let read = parse(&text);
        prop_assert_eq!(&read.broken, &Vec::<String>::new());
        prop_assert_eq!(read.nodes.len(), nodes.len());
        for (read, node) in read.nodes.iter().zip(&nodes) {
            prop_assert_eq!((&read.name, &read.op, &read.sources), (&node.name, &node.op, &node.sources));
            let shown: usize = node.ne[..3].iter().map(|n| (*n).min(6)).product();
            prop_assert_eq!(read.values.len(), shown * node.ne[3]);
            for &(index, printed) in &read.values {
                prop_assert!((printed - value(index)).abs() <= 0.6e-4, "{} at {}", printed, index);
            }
            prop_assert!(read.sum.is_some());
        }
    }

    #[test]
    fn a_text_that_is_cut_off_loses_only_its_last_node(nodes in prop::collection::vec(node(), 2..4), cut in 0.0f64..1.0) {
        let texts: Vec<String> = nodes.iter().map(|node| print(node, Format::New)).collect();
        let text = texts.concat();
        let cut = (text.len() as f64 * cut) as usize;
        let whole = texts.iter().scan(0, |end, text| { *end += text.len(); Some(*end) }).filter(|end| *end <= cut).count();
        let read = parse(&text[..cut]);
        let complete = read.nodes.iter().filter(|node| node.sum.is_some()).count();
        // The very last digits of a sum may be cut off unseen.
        prop_assert!((whole..=whole + 1).contains(&complete), "{} of {} nodes", complete, whole);
    }

    /// Lines of a real printout left out, repeated, put elsewhere or given other numbers.
    #[test]
    fn a_spoilt_printout_is_mapped_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0usize..4), 1..30),
        digit in 0u8..10,
    ) {
        let text = printed();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, to, change) in changes {
            let (at, to) = (at.index(lines.len()), to.index(lines.len()));
            match change {
                0 => drop(lines.remove(at)),
                1 => lines.insert(to, lines[at].clone()),
                2 => lines.swap(at, to),
                _ => lines[at] = lines[at].replace('2', &digit.to_string()),
            }
        }
        let printout = parse(&lines.join("\n"));
        for tokens in 0..4 {
            let Some(found) = seen(&printout, tokens) else { continue };
            for (checkpoint, part) in found.parts.iter().flat_map(|(id, parts)| parts.iter().map(move |part| (id, part))) {
                for row in &part.rows {
                    let width = part.width(*checkpoint, row.position);
                    prop_assert!(row.columns.iter().all(|&column| width.is_some_and(|width| (column as usize) < width)));
                }
            }
        }
    }

    #[test]
    fn any_text_is_read_without_a_panic(lines in prop::collection::vec(
        prop_oneof![
            Just("[".to_owned()), Just("],".to_owned()), Just("]".to_owned()), Just("..., ".to_owned()),
            Just("sum = 1.5".to_owned()), Just("[1, ..., nan, -inf],".to_owned()), Just("[1, 2".to_owned()),
            Just("ggml_debug: a = (f32) ADD(b{2, 1, 1, 1}, }) = {3, 1, 1, 1}".to_owned()),
            Just("common_debug_cb_eval: x = (f32) VIEW(y{18446744073709551615, 9, 9, 9}, }) = {1, 0, 1, 1}".to_owned()),
            Just("ggml_debug: a = (q4_K) MUL_MAT(blk.0.attn_q.weight{, }) = {3}".to_owned()),
            "\\PC{0,40}",
        ], 0..40)) {
        let Printout { nodes, .. } = parse(&lines.join("\n"));
        for node in nodes {
            prop_assert!(node.values.iter().all(|(index, _)| *index < node.elements()));
        }
    }
}

fn imported(text: &str, dir: &Path) -> (parity::error::Result<Imported>, PathBuf) {
    let (path, out) = (dir.join("printed.txt"), dir.join("dump"));
    fs::write(&path, text).unwrap();
    let options = ImportOptions {
        text: path,
        dir: out.clone(),
        model: Some(root().join(MODEL)),
        ..ImportOptions::default()
    };
    (import(&options), out)
}

#[test]
fn every_checkpoint_of_a_real_printout_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let (imported, out) = imported(&printed(), dir.path());
    let imported = imported.unwrap();
    assert_eq!((imported.checkpoints, imported.tokens, imported.steps), (75, 2, 1));
    assert_eq!(imported.unmapped, Vec::<String>::new());
    assert!(!imported.sums_of_printed);
    let dump = Dump::open(&out).unwrap();
    assert_eq!(dump.tokens(), TOKENS);
    let logits = dump.seen(Checkpoint::global(Kind::Logits));
    let positions: Vec<u32> = logits[0].rows.iter().map(|row| row.position).collect();
    assert_eq!(positions, [1], "the program asks for the last row only");
    // Queries are printed as rows of 256 and as 8 heads of 32: the more is seen of them.
    let seen = |kind| dump.seen(Checkpoint::layer(kind, 2))[0].rows[0].columns.len();
    assert_eq!((seen(Kind::QProj), seen(Kind::Q)), (6, 36));
}

#[test]
fn a_warm_up_is_passed_over_and_other_prompts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let text = printed();
    let (list, nodes) = text.split_at(text.find("common_debug_cb_eval").unwrap());
    let twice = format!("{list}{nodes}{nodes}");
    assert_eq!(imported(&twice, dir.path()).0.unwrap().steps, 1);
    let other = text.replace("input tokens = 2", "input tokens = 1");
    assert!(imported(&other, dir.path()).0.is_err());
}

#[test]
fn sums_of_printed_values_are_told_from_sums_of_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = String::new();
    for line in printed().lines() {
        old += &line.replace("common_debug_cb_eval:", "ggml_debug:");
        old.push('\n');
    }
    let nodes = parse(&old).nodes;
    let mut sums = nodes.iter().map(|node| node.values.iter().map(|(_, value)| *value).sum::<f32>());
    let lines = old.lines().map(|line| match line.trim().starts_with("sum = ") {
        true => format!("    sum = {:.6}", sums.next().unwrap()),
        false => line.to_owned(),
    });
    let old = lines.collect::<Vec<_>>().join("\n");
    let (imported, out) = imported(&old, dir.path());
    assert!(imported.unwrap().sums_of_printed);
    parity(&["run", "--device", "cpu", "-m", MODEL, "--layer", "0", "--reference"])
        .arg(&out)
        .assert()
        .code(0);
}

/// Queries, keys and values of one fused product: windows of a row of 8, heads of 2.
#[test]
fn windows_of_a_fused_product_are_put_in_their_places() {
    let rows = "[\n[\n[ 0, 1, 2, ..., 5, 6, 7 ],\n[ 10, 11, 12, ..., 15, 16, 17 ],\n],\n]\nsum = 0.0\n";
    let heads = |first: [i32; 2]| {
        let plane = |v: i32| format!("[\n[ {v}, {} ],\n],\n", v + 1);
        format!("[\n{}{}]\nsum = 0.0\n", plane(first[0]), plane(first[1]))
    };
    let queries = "[\n[\n[ 0, 1 ],\n[ 2, 3 ],\n],\n[\n[ 10, 11 ],\n[ 12, 13 ],\n],\n]\nsum = 0.0\n";
    let line = |name: &str, op: &str, sources: &str, ne: &str| {
        format!("ggml_debug: {name} = (f32) {op}({sources}}}) = {{{ne}}}\n")
    };
    let text = [
        "number of input tokens = 2\n5\n6\n".to_owned(),
        line("embd", "GET_ROWS", "token_embd.weight{4, 9, 1, 1}, inp_tokens{2, 1, 1, 1}", "4, 2, 1, 1"),
        "[\n[\n[ 0, 1, 2, 3 ],\n[ 0, 1, 2, 3 ],\n],\n]\nsum = 12.0\n".to_owned(),
        line("wqkv-0", "MUL_MAT", "blk.0.attn_qkv.weight{4, 8, 1, 1}, embd{4, 2, 1, 1}", "8, 2, 1, 1") + rows,
        line("Q", "VIEW", "wqkv-0{8, 2, 1, 1}, ", "2, 2, 2, 1") + queries,
        line("V", "VIEW", "wqkv-0{8, 2, 1, 1}, ", "2, 1, 2, 1") + &heads([6, 16]),
        line("K", "VIEW", "wqkv-0{8, 2, 1, 1}, ", "2, 1, 2, 1") + &heads([4, 14]),
        line("Qr", "ROPE", "Q{2, 2, 2, 1}, inp_pos{2, 1, 1, 1}", "2, 2, 2, 1") + queries,
        line("Kr", "ROPE", "K{2, 1, 2, 1}, inp_pos{2, 1, 1, 1}", "2, 1, 2, 1") + &heads([4, 14]),
        line("fa", "FLASH_ATTN_EXT", "Qr{2, 2, 2, 1}, cache_k_l0{2, 2, 1, 1}", "2, 2, 2, 1") + queries,
    ];
    let dir = tempfile::tempdir().unwrap();
    let (imported, out) = imported(&text.concat(), dir.path());
    imported.unwrap();
    let dump = Dump::open(&out).unwrap();
    for (kind, expected) in
        [(Kind::Q, vec![10.0, 11.0, 12.0, 13.0]), (Kind::K, vec![14.0, 15.0]), (Kind::V, vec![16.0, 17.0])]
    {
        let seen = &dump.seen(Checkpoint::layer(kind, 0))[0].rows[1];
        let values: Vec<f32> = seen.values.iter().flatten().copied().collect();
        assert_eq!(values, expected, "{kind:?}");
    }
}

#[test]
fn printed_values_are_held_against_an_engine_and_it_is_said_how_many() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("printed");
    let record = ["record", "--import", PRINTED, "-m", MODEL, "-o"];
    parity(&record).arg(&out).assert().code(0).stdout(contains("75 checkpoints").and(contains("values (")));
    let run = ["run", "--device", "cpu", "-m", MODEL, "--reference"];
    let whole = dir.path().join("whole");
    parity(&run)
        .arg(&out)
        .arg("--dump")
        .arg(&whole)
        .assert()
        .code(0)
        .stdout(contains("PARITY: of what was printed"));
    parity(&["diff"])
        .args([&whole, &out])
        .args(["-m", MODEL])
        .assert()
        .code(0)
        .stdout(contains("values seen"));
    parity(&["diff"]).args([&whole, &out]).assert().code(2);
    parity(&["diff"]).args([&out, &whole]).assert().code(2).stderr(contains("can be a reference only"));
    parity(&["inspect"]).arg(&out).assert().stdout(contains("only printed values"));
    let faulty = [&run[..5], &["--inject", "rope.base=10000@1", "--reference"]].concat();
    parity(&faulty).arg(&out).assert().code(1).stdout(contains("DIVERGES at blk.1.q_rope"));
}

#[test]
fn what_was_not_seen_still_counts_in_the_sum() {
    let dir = tempfile::tempdir().unwrap();
    // The sum of blk.0.ffn_norm, moved by far more than rounding.
    let text = printed();
    let node = text.find(" ffn_norm-0 = ").unwrap();
    let sum = node + text[node..].find("sum = ").unwrap() + "sum = ".len();
    let moved = format!("{}9{}", &text[..sum], &text[sum..]);
    let (imported, out) = imported(&moved, dir.path());
    imported.unwrap();
    let run = ["run", "--device", "cpu", "-m", MODEL, "--format", "json", "--reference"];
    let output = parity(&run).arg(&out).assert().code(2).get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
    let entry = report["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .find(|entry| entry["id"] == "blk.0.ffn_norm")
        .unwrap();
    assert_eq!(entry["verdict"], "undecided");
    assert!(entry["evidence"].as_str().unwrap().contains("values that were not seen differ"), "{entry}");
}

#[test]
fn what_is_no_printout_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    for (content, said) in
        [("nothing of the kind", "holds no printed tensor"), ("", "holds no printed tensor")]
    {
        fs::write(&text, content).unwrap();
        parity(&["record", "--import"])
            .arg(&text)
            .arg("-o")
            .arg(dir.path().join("dump"))
            .assert()
            .code(2)
            .stderr(contains(said));
    }
    let without = printed().replace("number of input tokens", "number of somethings");
    fs::write(&text, without).unwrap();
    let out = dir.path().join("dump");
    parity(&["record", "--import"])
        .arg(&text)
        .arg("-o")
        .arg(&out)
        .assert()
        .code(2)
        .stderr(contains("--tokens"));
    let record = ["record", "-m", MODEL, "-p", "def read", "--import"];
    parity(&record).arg(&text).arg("-o").arg(&out).assert().code(0);
}

#[cfg(not(feature = "llama-cpp"))]
#[test]
fn without_the_built_in_llama_cpp_both_ways_are_told() {
    parity(&["record", "-m", MODEL, "-p", "def"])
        .assert()
        .code(2)
        .stderr(contains("--features llama-cpp").and(contains("parity record -- llama-completion")));
}
