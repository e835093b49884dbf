//! A graph's text is read as it was written, and nothing else is read as a graph.

use parity_graph::graph::contiguous;
use parity_graph::{Graph, Op, Params, Tensor, View, text};
use proptest::prelude::*;

const TEXT: &str = "\
graph 6 of 10 on=CPU
GET_ROWS f32 256,5 < 6 7 : embd
RMS_NORM f32 256,5 eps=1e-06 < 0 : norm-0
VIEW f32 64,5 nb=4,1024,5120,5120 bytes=768 view=1+768 < 1 : 
ROPE f32 64,5 n_dims=64 mode=2 freq_base=10000 w0=0x7 < 2 7 : a : b (view)
SOFT_MAX f32 64,5 scale=0.125 on=CUDA0 < 3 - 8 : probs
SET_ROWS f16 64,512 view=9 idle < 4 7 9 : cache_k_l0 (view)
NONE q4_K 256,4096 : token_embd.weight
NONE i32 5 : inp_tokens
NONE f32 8 : sinks
NONE f16 64,512 : cache_k_l0
";

#[test]
fn writing_what_was_read_gives_the_same_text() {
    let graphs = text::read(&TEXT.repeat(2)).unwrap();
    assert_eq!(graphs.len(), 2);
    let graph = &graphs[1];
    // Words stand in their own order, whatever the order that they were read in.
    assert_eq!(
        text::write(graph),
        TEXT.replace("n_dims=64 mode=2 freq_base=10000 w0=0x7", "w0=0x7 n_dims=64 mode=2 freq_base=10000")
    );
    assert_eq!(graph.get(1).params.float(0), 1e-6);
    assert_eq!(graph.get(2).view, Some(View { root: 1, offset: 768 }));
    assert_eq!((graph.src(4, 1), graph.src(4, 2)), (None, Some(8)));
    assert_eq!(
        (graph.get(4).backend.as_deref(), graph.get(3).backend.as_deref()),
        (Some("CUDA0"), Some("CPU"))
    );
    assert!(!graph.get(5).computed && graph.get(6).backend.is_none());
}

#[test]
fn texts_from_before_parameters_are_read() {
    let old = "graph 2 of 4\n\
               MUL_MAT f32 384,5 < 2 3 : qkv\n\
               VIEW f32 64,5 nb=4,1536 +1024 < 0 : k\n\
               NONE q4_K 256,384 : w\n\
               NONE f32 256,5 : x\n";
    let graph = &text::read(old).unwrap()[0];
    assert_eq!(graph.get(1).view, Some(View { root: 0, offset: 1024 }));
    assert_eq!(graph.get(1).nb[..2], [4, 1536]);
    let cast = "graph 1 of 2\nCPY f16 4 < 1 0 : x (copy)\nNONE f32 4 : x\n";
    assert_eq!(text::read(cast).unwrap()[0].get(0).srcs, [Some(1)]);
}

#[test]
fn what_is_no_graph_is_an_error() {
    let huge = format!("graph 1 of 1\nADD f32 {} : x", "999999999,".repeat(3) + "9");
    for text in [
        "ADD f32 1 : x",
        "graph 1 of 1\nADD f32 : x",
        "graph 1 of 1\nADD f32 1 < 1 : x",
        "graph 2 of 2\nADD f32 1 < 1 : x\nADD f32 1 : y",
        "graph 1 of 2\nADD f32 1 < 1 - : x\nNONE f32 1 : y",
        "graph 2 of 1\nADD f32 1 : x",
        "graph 1 of 2\nADD f32 1 : x",
        "graph 1 of 99999999999\nADD f32 1 : x",
        "graph 1 of 1\nADD f32 1 eps=1 : x",
        "graph 1 of 1\nRMS_NORM f32 1 eps=x : x",
        "graph 1 of 1\nADD f32 1 w16=0x1 : x",
        "graph 1 of 1\nADD f32 1,1,1,1,1 : x",
        "graph 1 of 1\nADD f32 1 view=0 : x",
        "graph 1 of 2\nVIEW f32 2 view=1+4 < 1 : x\nNONE f32 2 : y",
        "graph 1 of 1\nADD f32 1 < 0 0 0 0 0 0 0 0 0 0 0 : x",
        &huge,
    ] {
        assert!(text::read(text).is_err(), "{text}");
    }
}

fn tensor(id: usize, nodes: usize, tensors: usize) -> impl Strategy<Value = Tensor> {
    let ops: Vec<Op> =
        Op::all().filter(|op| !op.is_view()).cloned().chain([Op::parse("RWKV_WKV7")]).collect();
    let readable = move |src: usize| if src < id { src } else { nodes + src % (tensors - nodes) };
    let known = prop::sample::select(vec!["f32", "f16", "q4_K", "i64"]);
    (
        (
            prop::sample::select(ops),
            any::<[u32; 16]>(),
            any::<u16>(),
            known,
            prop::array::uniform4(0usize..5),
        ),
        (prop::collection::vec(prop::option::of(0usize..100), 0..10), any::<bool>(), "[ -~é]{0,20}"),
        prop::option::of(prop::sample::select(vec!["CPU", "CUDA0"])),
    )
        .prop_map(move |((op, words, used, dtype, ne), (srcs, computed, name), backend)| {
            let mut params = Params::default();
            for (word, bits) in words.into_iter().enumerate().filter(|(word, _)| used >> word & 1 == 1) {
                params.0[word] = bits;
            }
            let leaf = id >= nodes;
            let mut srcs: Vec<Option<usize>> = srcs.into_iter().map(|src| src.map(readable)).collect();
            while srcs.last() == Some(&None) || leaf && !srcs.is_empty() {
                srcs.pop();
            }
            Tensor {
                name,
                op,
                params,
                dtype: dtype.to_owned(),
                ne,
                nb: contiguous(dtype, ne),
                srcs,
                view: None,
                computed: computed || leaf,
                backend: backend.map(str::to_owned),
            }
        })
}

proptest! {
    #[test]
    fn every_graph_is_read_as_it_was_written(tensors in (0usize..6, 1usize..6).prop_flat_map(|(nodes, leaves)| {
        let all: Vec<_> = (0..nodes + leaves).map(|id| tensor(id, nodes, nodes + leaves)).collect();
        (Just(nodes), all)
    })) {
        let graph = Graph { nodes: tensors.0, tensors: tensors.1 };
        let text = text::write(&graph);
        prop_assert_eq!(text::read(&text), Ok(vec![graph]), "{}", text);
    }

    #[test]
    fn no_text_makes_the_reader_panic(at in 0usize..TEXT.len(), insert in "[ -~\n]{0,6}", drop in 0usize..8) {
        let (head, tail) = TEXT.split_at(at);
        let damaged = format!("{head}{insert}{}", &tail[drop.min(tail.len())..]);
        let _ = text::read(&damaged);
    }
}
