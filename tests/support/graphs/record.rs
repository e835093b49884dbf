//! A recording of a graph that llama.cpp computed, with values that it might have had: each node in f64, rounded to f32.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::audit::Labelled;
use parity::checkpoint::Checkpoint;
use parity::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, own};
use parity::error::Result;
use parity::gguf::Gguf;
use parity::model::builders::{Shape, build, inputs};
use parity::ops::Args;
use parity_dump::manifest::ModelInfo;
use parity_dump::{Element, Producer, Writer};
use parity_graph::{Graph, Leaf, Op, label, text};

/// What a node comes to instead, if it does: a mistake.
pub type Mistake<'a> = &'a dyn Fn(Checkpoint, &Args<'_, f64>) -> Option<Vec<f64>>;

/// Records a prefill of 12 tokens of a model file on a graph.
pub fn record(model: &Path, graph: &Graph, dump: &Path) {
    record_with(model, graph, dump, &|_, _| None);
}

/// As [`record`], with a mistake.
pub fn record_with(model: &Path, graph: &Graph, dump: &Path, mistake: Mistake<'_>) {
    record_in(model, graph, dump, Element::F32, mistake, &|_| true);
}

/// As [`record_with`], of some nodes alone.
pub fn record_some(
    model: &Path,
    graph: &Graph,
    dump: &Path,
    mistake: Mistake<'_>,
    some: &dyn Fn(Checkpoint) -> bool,
) {
    record_in(model, graph, dump, Element::F32, mistake, some);
}

/// As [`record_with`], of an engine that keeps every value in a type. Where that is not f32 it is no llama.cpp: it brings
/// no graph, declares nothing, and exposes a norm with its weight alone.
pub fn record_as(model: &Path, graph: &Graph, dump: &Path, kept: Element, mistake: Mistake<'_>) {
    record_in(model, graph, dump, kept, mistake, &|_| true);
}

fn record_in(
    model: &Path,
    graph: &Graph,
    dump: &Path,
    kept: Element,
    mistake: Mistake<'_>,
    some: &dyn Fn(Checkpoint) -> bool,
) {
    let foreign = kept != Element::F32;
    let tokens: Vec<u32> = vec![1, 17, 33, 42, 5, 99, 101, 7, 64, 12, 88, 3];
    let gguf = Gguf::open(model).unwrap();
    let given = inputs(&build(&gguf, Shape::of(graph)).unwrap(), &tokens, 0).unwrap();
    let mut writer = writer(model, dump, if foreign { "other" } else { "llama.cpp" });
    let number = (!foreign).then(|| writer.graph(&text::write(graph)).unwrap());
    let mut machine = Machine::<f64>::new(&gguf, Arithmetic::EXACT);
    let step = Step { tokens: &tokens, first: 0, graph, number, given: &given };
    step.record(&mut machine, &mut writer, &How { kept, mistake, some, ..How::healthy() });
    writer.finish().unwrap();
}

/// The writer of a recording by an engine of this name.
pub fn writer(model: &Path, dump: &Path, name: &str) -> Writer {
    let producer = Producer { name: name.to_owned(), backend: Some("cpu".to_owned()), ..Producer::default() };
    let file = model.file_name().unwrap().to_string_lossy().into_owned();
    Writer::create(dump, producer, ModelInfo { file: Some(file), ..ModelInfo::default() }).unwrap()
}

/// A step to be recorded.
pub struct Step<'a> {
    pub tokens: &'a [u32],
    /// Position of the first.
    pub first: usize,
    pub graph: &'a Graph,
    /// Of the graph among those of the recording, if it brings any.
    pub number: Option<usize>,
    /// What its inputs hold.
    pub given: &'a BTreeMap<String, Vec<f64>>,
}

/// How steps are recorded.
pub struct How<'a> {
    /// What every value is kept in.
    pub kept: Element,
    pub mistake: Mistake<'a>,
    /// What is written.
    pub some: &'a dyn Fn(Checkpoint) -> bool,
    /// What is done to values as they are written, and not to those that the engine goes on with.
    pub written: &'a dyn Fn(Checkpoint, &mut Vec<f64>),
    /// What becomes of a value on its way to the type that it is kept in.
    pub stores: fn(Checkpoint, f64) -> f64,
}

impl How<'_> {
    /// In f32, all of it, without a mistake.
    pub fn healthy() -> Self {
        How {
            kept: Element::F32,
            mistake: &|_, _| None,
            some: &|_| true,
            written: &|_, _| {},
            stores: |_, x| x,
        }
    }
}

impl Step<'_> {
    pub fn record(&self, machine: &mut Machine<'_, f64>, writer: &mut Writer, how: &How<'_>) {
        let positions: Vec<u32> = (self.first as u32..(self.first + self.tokens.len()) as u32).collect();
        writer.begin_step(self.tokens, &positions, self.graph.tensors.len()).unwrap();
        if let Some(number) = self.number {
            writer.step_graph(number);
            leaves(writer, self.graph, self.given);
        }
        let labelled = Labelled::new(self.graph.clone()).unwrap();
        let mut recorder = Recorder { positions: &positions, labelled: &labelled, writer, how };
        let input = |id| self.given.get(&labelled.program.graph.get(id).name).cloned();
        machine.step(&labelled.program, &input, &mut recorder).unwrap();
        writer.end_step().unwrap();
    }
}

/// Writes what the inputs of a step hold, by the names that they have in its graph.
fn leaves(writer: &mut Writer, graph: &Graph, given: &BTreeMap<String, Vec<f64>>) {
    for (id, name) in label::leaf_names(graph).into_iter().enumerate() {
        let (Some(name), Some(Leaf::Input)) = (name, graph.leaf(id)) else { continue };
        let tensor = graph.get(id);
        let values = given.get(&tensor.name).unwrap_or_else(|| panic!("{} is given", tensor.name));
        let bytes: Vec<u8> = match tensor.dtype.as_str() {
            "f32" => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            "f16" => values.iter().flat_map(|x| half::f16::from_f64(*x).to_le_bytes()).collect(),
            "i32" => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
            "i64" => values.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect(),
            other => panic!("an input of type {other}"),
        };
        writer.begin_leaf(&name, &tensor.dtype.to_uppercase(), &[values.len()], bytes.len());
        writer.append(&bytes).unwrap();
    }
}

/// Goes on with what it writes.
struct Recorder<'a> {
    positions: &'a [u32],
    labelled: &'a Labelled,
    writer: &'a mut Writer,
    how: &'a How<'a>,
}

impl Conductor<f64> for Recorder<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let mut value = own(node, args);
        let Some(id) = self.labelled.labels[node.id] else { return Ok(value) };
        let values = value.as_mut().unwrap_or_else(|unknown| panic!("{id}: {}", unknown.reason));
        if let Some(wrong) = args.ok().and_then(|args| (self.how.mistake)(id, args)) {
            values.data = wrong;
        }
        let How { kept, stores, .. } = *self.how;
        values.data.iter_mut().for_each(|x| {
            *x = stores(id, *x);
            *x = match kept {
                Element::F32 => f64::from(*x as f32),
                Element::F16 => f16::from_f32(*x as f32).to_f64(),
                Element::Bf16 => bf16::from_f32(*x as f32).to_f64(),
            }
        });
        let foreign = kept != Element::F32 && node.program.graph.get(node.id).op == Op::RmsNorm;
        // Attention matrices are left out, as the tap leaves them out.
        if !foreign && !id.kind().is_optional() && (self.how.some)(id) {
            let mut written = values.data.clone();
            (self.how.written)(id, &mut written);
            self.write(node, id, &written);
        }
        Ok(value)
    }
}

impl Recorder<'_> {
    /// Token rows first, as in every dump; what has no axis of tokens is one row, of the last.
    fn write(&mut self, node: &Node<'_>, id: Checkpoint, values: &[f64]) {
        let shape = node.program.graph.get(node.id).shape();
        let element = |x: &f64| match self.how.kept {
            Element::F32 => (*x as f32).to_le_bytes().to_vec(),
            Element::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
            Element::Bf16 => bf16::from_f64(*x).to_le_bytes().to_vec(),
        };
        let mut bytes = Vec::new();
        let mut rows = 1;
        match self.labelled.axes[node.id] {
            None => bytes.extend(values.iter().flat_map(element)),
            Some(axis) => {
                rows = shape[axis];
                let outer: usize = shape[..axis].iter().product();
                let inner = values.len() / rows / outer;
                for (row, block) in (0..rows).flat_map(|row| (0..outer).map(move |block| (row, block))) {
                    let from = (block * rows + row) * inner;
                    bytes.extend(values[from..from + inner].iter().flat_map(element));
                }
            }
        }
        // Behind the rows that logits are wanted of there is but the last.
        let last = &self.positions[self.positions.len() - 1..];
        let at = Some(last).filter(|_| rows != self.positions.len());
        self.writer.tensor(id, self.how.kept, &[rows, values.len() / rows], &bytes, at).unwrap();
    }
}
