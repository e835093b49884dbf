//! Small graphs by hand: views of views, work in place, caches over steps, casts, what is not known.

use parity_graph::{Graph, Op, Params, Tensor, View, graph::contiguous};

use super::*;
use crate::gguf::Gguf;

/// A graph on its way: leaves are moved behind the nodes at the end.
#[derive(Default)]
struct Draft(Vec<(Tensor, bool)>);

impl Draft {
    /// A tensor; `ne` fastest axis first, missing ones 1.
    fn add(&mut self, name: &str, op: Op, dtype: &str, ne: &[usize], srcs: &[Id]) -> Id {
        let mut extents = [1; 4];
        extents[..ne.len()].copy_from_slice(ne);
        let leaf = op == Op::None;
        self.0.push((
            Tensor {
                name: name.into(),
                op,
                params: Params::default(),
                dtype: dtype.into(),
                ne: extents,
                nb: contiguous(dtype, extents),
                srcs: srcs.iter().map(|&src| Some(src)).collect(),
                view: None,
                computed: !leaf,
                backend: None,
            },
            leaf,
        ));
        self.0.len() - 1
    }

    /// A tensor in the memory of another, `bytes` from its start, with strides `nb`.
    fn view(&mut self, of: Id, op: Op, ne: &[usize], nb: &[usize], bytes: usize, srcs: &[Id]) -> Id {
        let dtype = self.0[of].0.dtype.clone();
        let id = self.add(&format!("view of {of}"), op, &dtype, ne, srcs);
        self.0[id].0.nb[..nb.len()].copy_from_slice(nb);
        for axis in nb.len()..4 {
            self.0[id].0.nb[axis] = self.0[id].0.nb[axis - 1] * self.0[id].0.ne[axis - 1];
        }
        self.0[id].0.view = Some(View { root: of, offset: bytes });
        id
    }

    /// The program, and where each tensor went.
    fn finish(self) -> (Program, Vec<Id>) {
        let mut order: Vec<usize> = (0..self.0.len()).filter(|&i| !self.0[i].1).collect();
        let nodes = order.len();
        order.extend((0..self.0.len()).filter(|&i| self.0[i].1));
        let mut place = vec![0; order.len()];
        order.iter().enumerate().for_each(|(to, &from)| place[from] = to);
        let mut tensors: Vec<Tensor> = order.iter().map(|&i| self.0[i].0.clone()).collect();
        for tensor in &mut tensors {
            tensor.srcs.iter_mut().flatten().for_each(|src| *src = place[*src]);
            tensor.view.iter_mut().for_each(|view| view.root = place[view.root]);
        }
        (Program::new(Graph { tensors, nodes }, Vec::new()).unwrap(), place)
    }
}

/// Keeps the values of all nodes that compute, by name.
#[derive(Default)]
struct Seen(BTreeMap<String, Value<f64>>);

impl Conductor<f64> for Seen {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let value = own(node, args);
        self.0.insert(node.program.names[node.id].clone(), value.clone());
        Ok(value)
    }
}

fn model() -> Gguf {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models");
    Gguf::open(&path.join("qwen2-tiny-py-F16.gguf")).unwrap()
}

fn run(machine: &mut Machine<'_, f64>, program: &Program, inputs: &[(&str, &[f64])]) -> Seen {
    let mut seen = Seen::default();
    let find = |id: Id| {
        let name = &program.graph.get(id).name;
        inputs.iter().find(|(known, _)| known == name).map(|(_, values)| values.to_vec())
    };
    machine.step(program, &find, &mut seen).unwrap();
    seen
}

#[test]
fn a_view_of_a_view_is_read_through_its_strides() {
    let mut draft = Draft::default();
    let x = draft.add("x", Op::None, "f32", &[4, 3], &[]);
    // Columns 1 and 2, then their rows 1 and 2 as columns.
    let window = draft.view(x, Op::View, &[2, 3], &[4, 16], 4, &[x]);
    let transposed = draft.view(x, Op::Transpose, &[2, 2], &[16, 4], 20, &[window]);
    draft.add("sum", Op::Add, "f32", &[2, 2], &[transposed, transposed]);
    let (program, _) = draft.finish();
    let gguf = model();
    let x: Vec<f64> = (0..12).map(f64::from).collect();
    let seen = run(&mut Machine::new(&gguf, Arithmetic::EXACT), &program, &[("x", &x)]);
    assert_eq!(seen.0["sum"], Ok(vec![10.0, 18.0, 12.0, 20.0].into()));
}

#[test]
fn a_state_is_changed_in_place_and_kept() {
    let mut draft = Draft::default();
    let state = draft.add("state", Op::None, "f32", &[2, 2], &[]);
    let x = draft.add("x", Op::None, "f32", &[2], &[]);
    let row = draft.view(state, Op::View, &[2], &[4], 8, &[state]);
    draft.view(state, Op::Add, &[2], &[4], 8, &[row, x]);
    draft.add("all", Op::Add, "f32", &[2, 2], &[state, x]);
    let (program, _) = draft.finish();
    let gguf = model();
    let mut machine = Machine::new(&gguf, Arithmetic::EXACT);
    let first = run(&mut machine, &program, &[("x", &[1.0, 2.0])]);
    assert_eq!(first.0["all"], Ok(vec![1.0, 2.0, 2.0, 4.0].into()));
    let second = run(&mut machine, &program, &[("x", &[10.0, 20.0])]);
    assert_eq!(second.0["all"], Ok(vec![10.0, 20.0, 21.0, 42.0].into()));
}

#[test]
fn a_cache_keeps_rows_of_both_steps_rounded_to_its_type() {
    let mut draft = Draft::default();
    let cache = draft.add("cache", Op::None, "f16", &[2, 3], &[]);
    let (x, ids) = (draft.add("x", Op::None, "f32", &[2], &[]), draft.add("ids", Op::None, "i64", &[1], &[]));
    draft.view(cache, Op::SetRows, &[2, 3], &[2, 4], 0, &[x, ids, cache]);
    let read = draft.view(cache, Op::View, &[2, 2], &[2, 4], 0, &[cache]);
    draft.add("read", Op::Add, "f32", &[2, 2], &[read, x]);
    let (program, _) = draft.finish();
    let gguf = model();
    let mut machine = Machine::new(&gguf, Arithmetic::EXACT);
    let third = 1.0 / 3.0;
    let rounded = f64::from(half::f16::from_f64(third));
    run(&mut machine, &program, &[("x", &[third, 1.0]), ("ids", &[0.0])]);
    let seen = run(&mut machine, &program, &[("x", &[0.0, 5.0]), ("ids", &[1.0])]);
    assert_eq!(seen.0["read"], Ok(vec![rounded, 6.0, 0.0, 10.0].into()));
    // An index beyond the cache is foreign data: nothing of the cache is known from then on.
    let seen = run(&mut machine, &program, &[("x", &[0.0, 5.0]), ("ids", &[3.0])]);
    assert!(seen.0["read"].is_err());
    // What another producer has in its cache is not rounded to this one's type.
    let mut machine = Machine::new(&gguf, Arithmetic::EXACT).rounding(false);
    run(&mut machine, &program, &[("x", &[third, 1.0]), ("ids", &[0.0])]);
    let seen = run(&mut machine, &program, &[("x", &[0.0, 5.0]), ("ids", &[1.0])]);
    assert_eq!(seen.0["read"], Ok(vec![third, 6.0, 0.0, 10.0].into()));
}

#[test]
fn two_caches_of_one_name_are_two() {
    let mut draft = Draft::default();
    let x = draft.add("x", Op::None, "f32", &[2], &[]);
    let ids = draft.add("ids", Op::None, "i64", &[1], &[]);
    for (factor, name) in [(1, "one"), (2, "two")] {
        let cache = draft.add("cache", Op::None, "f32", &[2, 3], &[]);
        let mut sum = x;
        for _ in 1..factor {
            sum = draft.add("more", Op::Add, "f32", &[2], &[sum, x]);
        }
        draft.view(cache, Op::SetRows, &[2, 3], &[4, 8], 0, &[sum, ids, cache]);
        let read = draft.view(cache, Op::View, &[2, 2], &[4, 8], 0, &[cache]);
        draft.add(name, Op::Add, "f32", &[2, 2], &[read, x]);
    }
    let (program, _) = draft.finish();
    let gguf = model();
    let mut machine = Machine::new(&gguf, Arithmetic::EXACT);
    run(&mut machine, &program, &[("x", &[1.0, 2.0]), ("ids", &[0.0])]);
    let seen = run(&mut machine, &program, &[("x", &[10.0, 20.0]), ("ids", &[1.0])]);
    assert_eq!(seen.0["one"], Ok(vec![11.0, 22.0, 20.0, 40.0].into()));
    assert_eq!(seen.0["two"], Ok(vec![12.0, 24.0, 30.0, 60.0].into()));
}

#[test]
fn copies_cast_and_go_where_they_are_told() {
    let mut draft = Draft::default();
    let x = draft.add("x", Op::None, "f32", &[4], &[]);
    let state = draft.add("state", Op::None, "i32", &[2, 3], &[]);
    let to = draft.view(state, Op::View, &[2, 2], &[4, 8], 8, &[state]);
    draft.view(state, Op::Cpy, &[2, 2], &[4, 8], 8, &[x, to]);
    let back = draft.add("cast", Op::Cpy, "f32", &[2, 3], &[state]);
    draft.0[back].0.srcs.push(Some(back));
    draft.add("sum", Op::Add, "f32", &[2, 3], &[back, back]);
    let (program, _) = draft.finish();
    let gguf = model();
    let seen = run(&mut Machine::new(&gguf, Arithmetic::EXACT), &program, &[("x", &[1.5, -2.7, 3.0, 4.9])]);
    assert_eq!(seen.0["sum"], Ok(vec![0.0, 0.0, 2.0, -4.0, 6.0, 8.0].into()));
}

#[test]
fn what_is_not_known_is_named_and_goes_on_by_itself() {
    let mut draft = Draft::default();
    let (x, mask) =
        (draft.add("x", Op::None, "f32", &[2], &[]), draft.add("mask", Op::None, "f32", &[2], &[]));
    let masked = draft.add("masked", Op::Add, "f32", &[2], &[x, mask]);
    let strange = draft.add("strange", Op::Other("RWKV_WKV7".into()), "f32", &[2], &[x]);
    draft.add("both", Op::Add, "f32", &[2], &[strange, masked]);
    draft.add("healthy", Op::Add, "f32", &[2], &[x, x]);
    let beyond = draft.view(x, Op::View, &[8], &[4], 0, &[x]);
    draft.add("beyond", Op::Add, "f32", &[8], &[beyond, beyond]);
    let (program, _) = draft.finish();
    let gguf = model();
    let seen = run(&mut Machine::new(&gguf, Arithmetic::EXACT), &program, &[("x", &[1.0, 2.0])]);
    let why = |name: &str| seen.0[name].clone().unwrap_err().reason;
    assert!(why("masked").contains("mask, which was not recorded"));
    assert!(why("strange").contains("RWKV_WKV7"));
    assert!(why("both").contains("RWKV_WKV7"));
    assert!(why("beyond").contains("layout"));
    assert_eq!(seen.0["healthy"], Ok(vec![2.0, 4.0].into()));
}

#[test]
fn a_graph_whose_sources_are_not_there_is_refused() {
    let mut draft = Draft::default();
    let x = draft.add("x", Op::None, "f32", &[2], &[]);
    draft.add("sum", Op::Add, "f32", &[2], &[x, x]);
    let (program, _) = draft.finish();
    let mut graph = program.graph;
    graph.tensors[0].srcs[1] = Some(7);
    assert!(Program::new(graph, Vec::new()).is_err());
}
