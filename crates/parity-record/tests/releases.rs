//! The mapping on graphs of real llama.cpp builds, recorded from the shared libraries of each release with
//! `parity record --graphs`: the names and the order of nodes changed, the checkpoints are the same.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use parity_dump::{Checkpoint, Kind};
use parity_graph::{Graph, label, text};
use parity_record::map::{Capture, Mapping, map};

/// December 2024 to September 2026, in order.
const RELEASES: [&str; 14] = [
    "b4234", "b4600", "b4980", "b5590", "b6122", "b6673", "b7324", "b8095", "b8179", "b8390", "b10068",
    "b10361", "v0.4.0", "v0.5.0",
];

/// The tiny Qwen2 that ships with parity, on a prompt of five tokens.
const LAYERS: u32 = 4;
const TOKENS: usize = 5;

fn graphs(name: &str) -> Vec<Graph> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/graphs").join(format!("{name}.txt"));
    text::read(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Row shape of each checkpoint but the attention matrices.
fn row_shape(kind: Kind) -> Vec<usize> {
    match kind {
        Kind::Q | Kind::QRope => vec![8, 32],
        Kind::K | Kind::KRope | Kind::V => vec![2, 32],
        Kind::KProj | Kind::VProj => vec![64],
        Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => vec![768],
        Kind::Logits => vec![4096],
        _ => vec![256],
    }
}

/// Every standard checkpoint of the model.
fn expected() -> HashSet<Checkpoint> {
    let standard = |kind: &Kind| !kind.is_optional() && !matches!(kind, Kind::QNorm | Kind::KNorm);
    Kind::all()
        .filter(standard)
        .flat_map(|kind| match kind.in_layer() {
            true => (0..LAYERS).map(|layer| Checkpoint::layer(kind, layer)).collect(),
            false => vec![Checkpoint::global(kind)],
        })
        .collect()
}

/// The captures of the vocabulary's ids.
fn fixed(mapping: &Mapping) -> impl Iterator<Item = &Capture> + Clone {
    mapping.captures.iter().filter(|capture| capture.checkpoint.kind().is_fixed())
}

/// Holds a graph of `rows` tokens against what the model has; the tail of the last layer may have fewer rows.
fn check(name: &str, graph: &Graph, rows: usize) -> Mapping {
    let mapping = map(graph);
    let standard = fixed(&mapping).filter(|capture| !capture.checkpoint.kind().is_optional());
    let found: HashSet<Checkpoint> = standard.clone().map(|capture| capture.checkpoint).collect();
    let missing: Vec<String> = expected().difference(&found).map(ToString::to_string).collect();
    assert!(missing.is_empty() && found.len() == expected().len(), "{name}: missing {missing:?}");
    for capture in standard {
        let mut shape = vec![rows];
        shape.extend(row_shape(capture.checkpoint.kind()));
        if capture.picked.is_none() {
            assert_eq!(capture.shape[..], shape[..], "{name}: {}", capture.checkpoint);
        } else {
            assert_eq!(capture.shape[1..], shape[1..], "{name}: {}", capture.checkpoint);
        }
        let elements: usize = capture.region.extents.iter().product();
        assert_eq!(elements, capture.shape.iter().product::<usize>(), "{name}: {}", capture.checkpoint);
    }
    assert_eq!(mapping.unmapped, Vec::<String>::new(), "{name}");
    assert_eq!(mapping.known.rows, rows, "{name}");
    let known = &mapping.known;
    assert!(known.tokens.is_some() && known.positions.is_some() && known.logits.is_some(), "{name}");
    everything_is_named(name, graph, &mapping);
    mapping
}

/// Every arithmetic node has a label of its own and a capture with all its values.
fn everything_is_named(name: &str, graph: &Graph, mapping: &Mapping) {
    let labels = label::labels(graph);
    let mut seen = HashSet::new();
    for (id, &label) in labels.iter().enumerate() {
        assert_eq!(label.is_some(), graph.is_arithmetic(id), "{name}: {id}");
        let Some(label) = label else { continue };
        assert!(seen.insert(label), "{name}: {label} twice");
        assert_eq!(label.to_string().parse(), Ok(label));
        let capture = mapping.captures.iter().find(|capture| capture.checkpoint == label).unwrap();
        assert_eq!(capture.region.elements(), graph.get(id).elements(), "{name}: {label}");
        let rows = capture.shape[usize::from(label.kind().is_optional())];
        assert!(
            capture.picked.is_some() || rows == mapping.known.rows,
            "{name}: {label} {:?}",
            capture.shape
        );
    }
}

/// The checkpoint's nodes are what their weights say: `storage` is computed from the weight.
fn reads(graph: &Graph, mapping: &Mapping, checkpoint: Checkpoint, weight: &str) -> bool {
    let capture = mapping.captures.iter().find(|capture| capture.checkpoint == checkpoint).unwrap();
    graph.sources(capture.region.storage).any(|src| graph.get(src).name == weight)
}

macro_rules! one_test_per_release {
    ($($test:ident: $release:literal;)*) => {
        $(#[test]
        fn $test() {
            assert!(RELEASES.contains(&$release));
            for graph in graphs($release) {
                let rows = graph.get(0).ne[1];
                assert!([TOKENS, 1].contains(&rows));
                let mapping = check($release, &graph, rows);
                for (kind, weight) in [(Kind::AttnOut, "blk.2.attn_output.weight"), (Kind::VProj, "blk.2.attn_v.weight")] {
                    assert!(reads(&graph, &mapping, Checkpoint::layer(kind, 2), weight), "{kind:?}");
                }
            }
        })*

        #[test]
        fn every_release_has_its_test() {
            assert_eq!([$($release),*], RELEASES);
        }
    };
}

one_test_per_release! {
    b4234_december_2024: "b4234";
    b4600_january_2025: "b4600";
    b4980_march_2025: "b4980";
    b5590_june_2025: "b5590";
    b6122_august_2025: "b6122";
    b6673_october_2025: "b6673";
    b7324_december_2025: "b7324";
    b8095_february_2026: "b8095";
    b8179_february_2026: "b8179";
    b8390_march_2026: "b8390";
    b10068_july_2026: "b10068";
    b10361_august_2026: "b10361";
    v0_4_0_september_2026: "v0.4.0";
    v0_5_0_september_2026: "v0.5.0";
}

#[test]
fn attention_is_read_with_and_without_flash_attention() {
    let matrices = |mapping: &Mapping| {
        mapping.captures.iter().filter(|capture| capture.checkpoint.kind().is_optional()).count()
    };
    let mut flash = BTreeSet::new();
    for release in RELEASES {
        let mapping = map(&graphs(release)[0]);
        flash.insert(mapping.known.flash);
        let expected = if mapping.known.flash { 0 } else { 2 * LAYERS as usize };
        assert_eq!(matrices(&mapping), expected, "{release}");
        assert_eq!(mapping.known.cache_types, BTreeSet::from(["f16".to_owned()]), "{release}");
    }
    assert_eq!(flash.len(), 2, "the releases cover both");
}

#[test]
fn chunks_of_a_prompt_and_decode_steps_have_the_same_checkpoints() {
    // -ub 3 -fa off -ctk f32: three tokens, two, then one.
    let name = "v0.5.0-plain-chunks";
    let rows: Vec<usize> =
        graphs(name).iter().map(|graph| check(name, graph, graph.get(0).ne[1]).known.rows).collect();
    assert_eq!(rows, [3, 2, 1]);
    let mapping = map(&graphs(name)[0]);
    assert!(!mapping.known.flash && mapping.known.mask.is_some());
    assert_eq!(mapping.known.cache_types, BTreeSet::from(["f32".to_owned()]));
    let scores = Checkpoint::layer(Kind::AttnScores, 1);
    let scores = mapping.captures.iter().find(|capture| capture.checkpoint == scores).unwrap();
    assert_eq!(scores.shape[..], [8, 3, 256], "(H, T, S) with the padding of the cache");
}

/// One layer with one weight for queries, keys and values, as `build_qkv` makes it.
const FUSED: &str = "\
graph 25 of 39
GET_ROWS f32 256,5 < 25 26 : embd
RMS_NORM f32 256,5 < 0 : norm-0
MUL f32 256,5 < 1 27 : attn_norm-0
MUL_MAT f32 384,5 < 28 2 : wqkv-0
ADD f32 384,5 < 3 29 : wqkv_b-0
VIEW f32 32,8,5 nb=4,128,1536,7680 < 4 : Qcur-0
VIEW f32 32,2,5 nb=4,128,1536,7680 +1024 < 4 : Kcur-0
VIEW f32 32,2,5 nb=4,128,1536,7680 +1280 < 4 : Vcur-0
ROPE f32 32,8,5 < 5 30 : Qcur-0
ROPE f32 32,2,5 < 6 30 : Kcur-0
PERMUTE f32 32,5,8 nb=4,1024,128,5120 < 8 : Qcur-0 (permuted)
FLASH_ATTN_EXT f32 32,8,5 < 10 31 32 33 : node_11
RESHAPE f32 256,5 < 11 : kqv_out-0
MUL_MAT f32 256,5 < 34 12 : node_13
ADD f32 256,5 < 13 0 : ffn_inp-0
RMS_NORM f32 256,5 < 14 : norm-0
MUL f32 256,5 < 15 35 : ffn_norm-0
MUL_MAT f32 768,5 < 36 16 : ffn_gate-0
MUL_MAT f32 768,5 < 37 16 : ffn_up-0
SWIGLU f32 768,5 < 17 18 : ffn_swiglu-0
MUL_MAT f32 256,5 < 38 19 : ffn_out-0
ADD f32 256,5 < 20 14 : l_out-0
RMS_NORM f32 256,5 < 21 : norm
MUL f32 256,5 < 22 27 : result_norm
MUL_MAT f32 4096,5 < 25 23 : result_output
NONE q4_K 256,4096 : token_embd.weight
NONE i32 5 : inp_tokens
NONE f32 256 : blk.0.attn_norm.weight
NONE q4_K 256,384 : blk.0.attn_qkv.weight
NONE f32 384 : blk.0.attn_qkv.bias
NONE i32 5 : inp_pos
NONE f16 32,256,2 : cache_k_l0
NONE f16 32,256,2 : cache_v_l0
NONE f16 256,5 : attn_inp_kq_mask
NONE q4_K 256,256 : blk.0.attn_output.weight
NONE f32 256 : blk.0.ffn_norm.weight
NONE q4_K 256,768 : blk.0.ffn_gate.weight
NONE q4_K 256,768 : blk.0.ffn_up.weight
NONE q4_K 768,256 : blk.0.ffn_down.weight
";

#[test]
fn a_fused_weight_is_taken_apart() {
    let graph = &text::read(FUSED).unwrap()[0];
    let mapping = map(graph);
    let of = |kind| {
        let checkpoint = Checkpoint::layer(kind, 0);
        mapping.captures.iter().find(|capture| capture.checkpoint == checkpoint).unwrap()
    };
    for (kind, storage, offset, shape) in [
        (Kind::QProj, 3, 0, vec![5, 256]),
        (Kind::KProj, 3, 1024, vec![5, 64]),
        (Kind::VProj, 3, 1280, vec![5, 64]),
        (Kind::Q, 4, 0, vec![5, 8, 32]),
        (Kind::K, 4, 1024, vec![5, 2, 32]),
        (Kind::V, 4, 1280, vec![5, 2, 32]),
        (Kind::QRope, 8, 0, vec![5, 8, 32]),
        (Kind::KRope, 9, 0, vec![5, 2, 32]),
        (Kind::AttnCtx, 11, 0, vec![5, 256]),
    ] {
        let capture = of(kind);
        assert_eq!((capture.region.storage, capture.region.offset), (storage, offset), "{kind:?}");
        assert_eq!(capture.shape[..], shape[..], "{kind:?}");
    }
    assert_eq!(of(Kind::K).region.strides, [1536, 128, 4]);
}
