//! Dumps of engines that bring no graph, on a graph that is built of the model for as many tokens as are wanted.

use std::path::Path;

use parity::arithmetic::Arithmetic;
use parity::checkpoint::Checkpoint;
use parity::engine::op_by_op::Machine;
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build, inputs};
use parity::numerics::Storage;
use parity_dump::Element;

use super::record::{How, Mistake, Step, writer};

/// What an engine computes, and what of it is written.
pub struct Engine<'a> {
    /// What values are kept in, and weights of matmuls.
    pub kept: Element,
    /// What nodes come to that are not computed by their rule.
    pub computes: Mistake<'a>,
    /// What is written.
    pub some: &'a dyn Fn(Checkpoint) -> bool,
    /// What it rounds beside what it keeps.
    pub arithmetic: Arithmetic,
    /// What becomes of a value on its way to the type that it is kept in.
    pub stores: fn(f64) -> f64,
}

impl Engine<'_> {
    /// A dump of one pass over so many tokens.
    pub fn record(&self, model: &Path, tokens: usize, dump: &Path) {
        let tokens: Vec<u32> = (0..tokens as u32).map(|i| 10 + i * 37 % 500).collect();
        let gguf = Gguf::open(model).unwrap();
        let shape = Shape::step(0, tokens.len(), 256, true, Cache::F32);
        let built = build(&gguf, shape).unwrap();
        let given = inputs(&built, &tokens, 0).unwrap();
        let narrow = match self.kept {
            Element::F32 => Storage::F32,
            Element::F16 => Storage::F16,
            Element::Bf16 => Storage::Bf16,
        };
        let mut machine = Machine::<f64>::new(&gguf, Arithmetic { narrow, ..self.arithmetic });
        let mut writer = writer(model, dump, "other");
        let step = Step { tokens: &tokens, first: 0, graph: &built.graph, number: None, given: &given };
        let (kept, mistake) = (self.kept, self.computes);
        let is_exposed = |id: Checkpoint| !id.kind().is_optional() && id.kind().is_fixed() && (self.some)(id);
        step.record(
            &mut machine,
            &mut writer,
            &How { kept, mistake, some: &is_exposed, stores: self.stores, ..How::healthy() },
        );
        writer.finish().unwrap();
    }
}
