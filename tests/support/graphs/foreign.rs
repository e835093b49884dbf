//! Dumps of engines that bring no graph, on a graph that is built of the model for as many tokens as are wanted.

use std::path::Path;

use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::op_by_op::Machine;
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build, inputs};
use parity::numerics::Storage;
use parity::ops::Args;
use parity_dump::Element;

use super::super::program::{Audited, audit};
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
    pub stores: fn(Checkpoint, f64) -> f64,
}

impl Engine<'_> {
    /// What an audit says of a dump of several steps.
    pub fn audited(&self, model: &str, steps: &[usize]) -> Audited {
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        self.record_steps(Path::new(model), steps, &dump);
        audit(&dump, Path::new(model), &["--allow-missing"])
    }

    /// A dump of one pass over so many tokens.
    pub fn record(&self, model: &Path, tokens: usize, dump: &Path) {
        self.record_steps(model, &[tokens], dump);
    }

    /// A dump of several steps over so many tokens each.
    pub fn record_steps(&self, model: &Path, steps: &[usize], dump: &Path) {
        let gguf = Gguf::open(model).unwrap();
        let vocabulary = gguf.weight("token_embd.weight").unwrap().rows() as u32;
        let narrow = match self.kept {
            Element::F32 => Storage::F32,
            Element::F16 => Storage::F16,
            Element::Bf16 => Storage::Bf16,
        };
        let mut machine = Machine::<f64>::new(&gguf, Arithmetic { narrow, ..self.arithmetic });
        let mut writer = writer(model, dump, "other");
        let (kept, mistake) = (self.kept, self.computes);
        let is_exposed = |id: Checkpoint| !id.kind().is_optional() && id.kind().is_fixed() && (self.some)(id);
        let how = How { kept, mistake, some: &is_exposed, stores: self.stores, ..How::healthy() };
        let mut first = 0;
        for &count in steps {
            let token = |i: u32| (10 + i * 37 % 500) % vocabulary;
            let tokens: Vec<u32> = (first as u32..(first + count) as u32).map(token).collect();
            let built = build(&gguf, Shape::step(first, count, 256, true, Cache::F32)).unwrap();
            let given = inputs(&built, &tokens, first).unwrap();
            let step = Step { tokens: &tokens, first, graph: &built.graph, number: None, given: &given };
            step.record(&mut machine, &mut writer, &how);
            first += count;
        }
        writer.finish().unwrap();
    }
}

/// Whether a node is a product with a weight.
pub fn is_product(id: Checkpoint) -> bool {
    use Kind::{AttnOut, FfnGate, FfnOut, FfnUp, KProj, Logits, QProj, VProj};
    matches!(id.kind(), QProj | KProj | VProj | AttnOut | FfnGate | FfnUp | FfnOut | Logits)
}

/// Whether it does not lie within a module.
pub fn of_modules(id: Checkpoint) -> bool {
    use Kind::{AttnCtx, AttnResidual, FfnAct, KRope, QRope};
    !matches!(id.kind(), QRope | KRope | AttnCtx | AttnResidual | FfnAct)
}

/// Rows x (T, I) times a matrix w (O, I), summed in f64, in the shape of a product.
pub fn product(args: &Args<'_, f64>, w: &[f64], x: &[f64]) -> Vec<f64> {
    let [_, _, tokens, outputs] = args.shape;
    let k = x.len() / tokens;
    let dot = |row: &[f64], output: usize| row.iter().zip(&w[output * k..]).map(|(x, w)| x * w).sum();
    x.chunks(k).flat_map(|row| (0..outputs).map(move |output| dot(row, output))).collect()
}
