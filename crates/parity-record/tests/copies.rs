//! A graph that the scheduler has split over two backends: what it copied counts as what it is a copy of.
//!
//! No GPU is needed to show it: the tensors and the functions that read them are made up, in a layout of
//! their own.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use parity_dump::{Checkpoint, Kind};
use parity_graph::{Op, View};
use parity_record::api::{Api, RawGraph, RawTensor};
use parity_record::describe::Reader;
use parity_record::image::Image;
use parity_record::layout::TensorLayout;
use parity_record::map::map;

/// A tensor as this made-up ggml has it.
#[repr(C)]
struct Fake {
    name: [u8; 64],
    ne: [i64; 4],
    nb: [usize; 4],
    src: [RawTensor; 10],
    params: [u32; 16],
    view_src: RawTensor,
    view_offs: usize,
    dtype: i32,
    flags: i32,
    op: &'static CStr,
}

/// Nodes in execution order, then the leaves that the program fills itself.
struct FakeGraph {
    nodes: Vec<RawTensor>,
    leaves: Vec<RawTensor>,
}

const LAYOUT: TensorLayout = TensorLayout {
    bytes: Some(size_of::<Fake>()),
    dtype: std::mem::offset_of!(Fake, dtype),
    ne: std::mem::offset_of!(Fake, ne),
    nb: std::mem::offset_of!(Fake, nb),
    flags: std::mem::offset_of!(Fake, flags),
    src: std::mem::offset_of!(Fake, src),
    // Read by injected mistakes alone, which need a real ggml.
    op: std::mem::offset_of!(Fake, op),
    data: std::mem::offset_of!(Fake, op),
    op_params: std::mem::offset_of!(Fake, params),
    view_src: std::mem::offset_of!(Fake, view_src),
    view_offs: std::mem::offset_of!(Fake, view_offs),
    name: std::mem::offset_of!(Fake, name),
};

unsafe extern "C" fn get_name(tensor: RawTensor) -> *const c_char {
    tensor.cast_const().cast()
}

unsafe extern "C" fn op_desc(tensor: RawTensor) -> *const c_char {
    // SAFETY: every tensor of this test is a `Fake`.
    unsafe { (*tensor.cast::<Fake>()).op.as_ptr() }
}

unsafe extern "C" fn type_name(_: c_int) -> *const c_char {
    c"f32".as_ptr()
}

unsafe extern "C" fn n_nodes(graph: RawGraph) -> c_int {
    // SAFETY: every graph of this test is a `FakeGraph`.
    unsafe { &*graph.cast::<FakeGraph>() }.nodes.len() as c_int
}

unsafe extern "C" fn node(graph: RawGraph, index: c_int) -> RawTensor {
    // SAFETY: as above.
    unsafe { &*graph.cast::<FakeGraph>() }.nodes[index as usize]
}

/// As `ggml_graph_get_tensor`: leaves first, then nodes.
unsafe extern "C" fn get_tensor(graph: RawGraph, name: *const c_char) -> RawTensor {
    // SAFETY: as above, and C strings.
    unsafe {
        let graph = &*graph.cast::<FakeGraph>();
        let wanted = CStr::from_ptr(name);
        let mut all = graph.leaves.iter().chain(&graph.nodes);
        let found = all.find(|tensor| CStr::from_ptr(get_name(**tensor)) == wanted);
        found.copied().unwrap_or(std::ptr::null_mut())
    }
}

unsafe extern "C" fn never() {
    unreachable!("describing a graph calls nothing else");
}

fn api() -> Api {
    let find = |name: &CStr| match name.to_bytes() {
        b"ggml_get_name" => get_name as *mut c_void,
        b"ggml_op_desc" => op_desc as *mut c_void,
        b"ggml_type_name" => type_name as *mut c_void,
        b"ggml_graph_n_nodes" => n_nodes as *mut c_void,
        b"ggml_graph_node" => node as *mut c_void,
        b"ggml_graph_get_tensor" => get_tensor as *mut c_void,
        b"ggml_version" | b"ggml_commit" | b"ggml_build_forward_select" | b"ggml_backend_buffer_is_host" => {
            std::ptr::null_mut()
        }
        _ => never as *mut c_void,
    };
    // SAFETY: the functions that describing calls are of the right types; the others end the test.
    unsafe { Api::new(find) }.unwrap()
}

/// Makes tensors that live as long as the test.
fn tensor(name: &str, op: &'static CStr, ne: [i64; 4], srcs: &[RawTensor]) -> RawTensor {
    let mut fake = Fake {
        name: [0; 64],
        ne,
        nb: [4; 4],
        src: [std::ptr::null_mut(); 10],
        params: [0; 16],
        view_src: std::ptr::null_mut(),
        view_offs: 0,
        dtype: 0,
        flags: 0,
        op,
    };
    let text = CString::new(name).unwrap();
    fake.name[..text.as_bytes().len()].copy_from_slice(text.as_bytes());
    fake.src[..srcs.len()].copy_from_slice(srcs);
    for axis in 1..4 {
        fake.nb[axis] = fake.nb[axis - 1] * ne[axis - 1] as usize;
    }
    Box::into_raw(Box::new(fake)).cast()
}

#[test]
fn copies_between_backends_are_what_they_are_copies_of() {
    let leaf = |name: &str, ne: [i64; 4]| tensor(name, c"NONE", ne, &[]);
    let (table, tokens) = (leaf("token_embd.weight", [4, 9, 1, 1]), leaf("inp_tokens", [2, 1, 1, 1]));
    let embd = tensor("embd", c"GET_ROWS", [4, 2, 1, 1], &[table, tokens]);
    // The second split runs on a GPU: its inputs are copies, which are no nodes of the graph.
    let embd_there = leaf("CUDA0#embd#0", [4, 2, 1, 1]);
    let norm = tensor("norm-0", c"RMS_NORM", [4, 2, 1, 1], &[embd_there]);
    let weight_there = leaf("CUDA0#blk.0.attn_norm.weight#0", [4, 1, 1, 1]);
    let attn_norm = tensor("attn_norm-0", c"MUL", [4, 2, 1, 1], &[norm, weight_there]);
    let q =
        tensor("Qcur-0", c"MUL_MAT", [4, 2, 1, 1], &[leaf("blk.0.attn_q.weight", [4, 4, 1, 1]), attn_norm]);
    let heads = tensor("Qcur-0", c"RESHAPE", [2, 2, 2, 1], &[q]);
    let positions = leaf("inp_pos", [2, 1, 1, 1]);
    let positions_there = leaf("CUDA0#inp_pos#0", [2, 1, 1, 1]);
    let rope = tensor("Qcur-0", c"ROPE", [2, 2, 2, 1], &[heads, positions_there]);
    // And the third back on the CPU; the name `Qcur-0` is that of three nodes, told apart by their extents.
    let context = leaf("blk.0.attn_output.weight", [4, 4, 1, 1]);
    let out = tensor("node_7", c"MUL_MAT", [4, 2, 1, 1], &[context, leaf("CPU#Qcur-0#1", [2, 2, 2, 1])]);
    let sum = tensor("ffn_inp-0", c"ADD", [4, 2, 1, 1], &[leaf("CPU#node_7#0", [4, 2, 1, 1]), embd]);
    let graph = FakeGraph {
        nodes: vec![embd, norm, attn_norm, q, heads, rope, out, sum],
        leaves: vec![table, tokens, positions],
    };
    let api = api();
    let reader = Reader { api: &api, layout: &LAYOUT };
    // SAFETY: everything is alive.
    let described = unsafe { reader.describe(std::ptr::null_mut(), (&raw const graph).cast_mut().cast()) };
    let flat = &described.graph;
    let at = |raw: RawTensor| described.address.iter().position(|known| *known == raw).unwrap();
    assert_eq!(flat.get(at(norm)).srcs, [Some(at(embd))], "a copy of a node is that node");
    assert_eq!(flat.src(at(out), 1), Some(at(rope)), "of several nodes of a name, the latest of its extents");
    assert_eq!(flat.get(at(sum)).srcs, [Some(at(out)), Some(at(embd))]);
    assert_eq!(flat.src(at(rope), 1), Some(at(positions)), "an input is read where the program filled it");
    assert_eq!(flat.get(flat.src(at(attn_norm), 1).unwrap()).name, "blk.0.attn_norm.weight");
    assert!(flat.tensors.iter().all(|tensor| !tensor.name.contains('#')));

    let mapping = map(flat);
    let found: Vec<String> = mapping.captures.iter().map(|capture| capture.checkpoint.to_string()).collect();
    let expected =
        [Kind::AttnNorm, Kind::QProj, Kind::Q, Kind::QRope, Kind::AttnCtx, Kind::AttnOut, Kind::AttnResidual];
    for kind in expected {
        assert!(found.contains(&Checkpoint::layer(kind, 0).to_string()), "{kind:?} in {found:?}");
    }
    assert_eq!(mapping.known.positions, Some(at(positions)));
    assert_eq!(flat.get(at(rope)).op, Op::Rope);
}

#[test]
fn slots_views_and_parameters_are_read_as_they_are() {
    let leaf = |name: &str| tensor(name, c"NONE", [4, 1, 1, 1], &[]);
    let (scores, sinks, cache) = (leaf("scores"), leaf("blk.0.attn_sinks.weight"), leaf("cache_k_l0"));
    // Sinks without a mask: an empty slot in between.
    let probs = tensor("probs", c"SOFT_MAX", [4, 1, 1, 1], &[scores, std::ptr::null_mut(), sinks]);
    let written = tensor("cache_k_l0 (view)", c"CPY", [2, 1, 1, 1], &[probs]);
    // SAFETY: a tensor of this test.
    unsafe {
        let fake = &mut *written.cast::<Fake>();
        // A cast is a source of itself.
        fake.src[1] = written;
        (fake.view_src, fake.view_offs) = (cache, 8);
        (*probs.cast::<Fake>()).params = std::array::from_fn(|word| word as u32);
    }
    let empty = tensor("nothing", c"SCALE", [4, 0, 1, 1], &[probs]);
    let graph = FakeGraph { nodes: vec![probs, written, empty], leaves: vec![scores, sinks, cache] };
    let api = api();
    let reader = Reader { api: &api, layout: &LAYOUT };
    // SAFETY: everything is alive.
    let flat = unsafe { reader.describe(std::ptr::null_mut(), (&raw const graph).cast_mut().cast()) }.graph;
    assert_eq!((flat.src(0, 0), flat.src(0, 1), flat.src(0, 2)), (Some(3), None, Some(4)));
    assert_eq!(flat.get(0).params.0[15], 15);
    assert_eq!(
        (flat.get(1).srcs.as_slice(), flat.get(1).view),
        (&[Some(0)][..], Some(View { root: 5, offset: 8 }))
    );
    assert!(!flat.get(2).computed && flat.get(1).computed, "what has no elements is never computed");
    assert_eq!(flat.writers(5).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_graph_that_comes_again_is_recognised_until_anything_of_it_changes() {
    let leaf = |name: &str| tensor(name, c"NONE", [4, 1, 1, 1], &[]);
    let (weight, input) = (leaf("blk.0.attn_norm.weight"), leaf("inp_embd"));
    // What is copied from another backend is read through what it is a copy of.
    let copy = leaf("CUDA0#inp_embd#0");
    let norm = tensor("norm-0", c"RMS_NORM", [4, 1, 1, 1], &[copy]);
    let scaled = tensor("attn_norm-0", c"MUL", [4, 1, 1, 1], &[norm, weight]);
    let mut graph = FakeGraph { nodes: vec![norm, scaled], leaves: vec![input, weight] };
    let api = api();
    let reader = Reader { api: &api, layout: &LAYOUT };
    let raw: RawGraph = (&raw mut graph).cast();
    let sched = std::ptr::null_mut();
    // SAFETY: a graph of this made-up ggml.
    let described = unsafe { reader.describe(sched, raw) };
    // SAFETY: as above.
    let image = unsafe { Image::of(reader, sched, raw, &described) }.unwrap();
    // SAFETY: as above.
    let still = || unsafe { image.is_still(reader, sched, raw) };
    assert!(still());
    for changed in [norm, scaled, weight, input, copy] {
        // SAFETY: a tensor of this test.
        let fake = unsafe { &mut *changed.cast::<Fake>() };
        fake.params[3] += 1;
        assert!(!still());
        fake.params[3] -= 1;
        assert!(still());
    }
    // SAFETY: as above.
    unsafe { &mut *raw.cast::<FakeGraph>() }.nodes.swap(0, 1);
    assert!(!still());
    // SAFETY: as above.
    unsafe { &mut *raw.cast::<FakeGraph>() }.nodes.truncate(1);
    assert!(!still());
    let unmeasured = TensorLayout { bytes: None, ..LAYOUT };
    let blind = Reader { api: &api, layout: &unmeasured };
    // SAFETY: as above.
    assert!(unsafe { Image::of(blind, sched, raw, &described) }.is_none());
}
