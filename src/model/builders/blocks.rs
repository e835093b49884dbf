//! What the families share: weights of the file, embeddings, norms, matmuls with their scales and biases, the head.

use std::collections::{BTreeMap, BTreeSet};

use parity_graph::{Graph, Id, Op};

use crate::checkpoint::Kind;
use crate::error::{Error, Result};
use crate::gguf::{DType, Gguf};

use super::facts::Facts;
use super::shape::Shape;
use super::sketch::{Sketch, Word};
use parity_graph::weights;

/// Draws the graph of one model.
pub struct Builder<'a> {
    pub(super) gguf: &'a Gguf,
    /// The model's numbers.
    pub facts: &'a Facts,
    /// For which step.
    pub shape: &'a Shape,
    /// What has been drawn.
    pub sketch: Sketch,
    /// Leaves by name.
    leaves: BTreeMap<String, Id>,
    /// Tensors of the file that llama.cpp loads and does not compute with.
    idle: BTreeSet<String>,
}

/// How llama.cpp scales and shifts the result of one matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// By the tensor `NAME.scale`, if the file has one, before the bias.
    Applied,
    /// By the tensor `NAME.scale`, if the file has one, after the bias.
    AfterBias,
    /// `NAME.scale` is loaded and left alone.
    Idle,
}

impl<'a> Builder<'a> {
    /// Nothing drawn yet.
    pub fn new(gguf: &'a Gguf, facts: &'a Facts, shape: &'a Shape) -> Self {
        let (sketch, leaves, idle) = (Sketch::default(), BTreeMap::new(), BTreeSet::new());
        Builder { gguf, facts, shape, sketch, leaves, idle }
    }

    /// An input, made once.
    pub fn input(&mut self, name: &str, dtype: DType, ne: [usize; 4]) -> Id {
        if let Some(id) = self.leaves.get(name) {
            return *id;
        }
        let id = self.sketch.leaf(name, dtype, ne);
        self.leaves.insert(name.to_owned(), id);
        id
    }

    /// A weight that must be there; shape slowest axis first.
    ///
    /// # Errors
    /// Missing, of another shape, or of a type that is not decoded.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<Id> {
        let dtype = self.gguf.require_tensor(name, shape)?.info.dtype;
        let mut ne = [1; 4];
        for (axis, extent) in shape.iter().rev().enumerate() {
            ne[axis] = *extent;
        }
        Ok(self.input(name, dtype, ne))
    }

    /// A weight that may be there.
    ///
    /// # Errors
    /// Those of [`Builder::weight`], where it is there.
    pub fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<Id>> {
        if self.gguf.tensor(name).is_none() { Ok(None) } else { self.weight(name, shape).map(Some) }
    }

    /// A tensor that llama.cpp loads and does not compute with.
    pub fn idle(&mut self, name: &str) {
        self.idle.insert(name.to_owned());
    }

    /// A matmul by `{part}.weight` (rows, the width of `x`), its scale, and its bias where the file has one. A product that
    /// is scaled has no name of its own in llama.cpp.
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn linear(&mut self, part: &str, rows: usize, x: Id, scale: Scale, name: &str) -> Result<Id> {
        let cols = self.sketch.get(x).ne[0];
        let weight = self.weight(&weights::weight(part), &[rows, cols])?;
        let mut out = self.sketch.mul_mat(weight, x);
        if scale == Scale::Applied {
            out = self.factor(part, out)?;
        }
        out = self.adapted(part, x, out, None);
        self.sketch.name(out, name);
        let called = |how: &str| match (scale, name.rsplit_once('-')) {
            (Scale::AfterBias, Some((name, layer))) => format!("{name}_{how}-{layer}"),
            _ => name.to_owned(),
        };
        if let Some(bias) = self.optional(&weights::bias(part), &[rows])? {
            out = self.sum(out, bias, &called("b"));
        }
        match scale {
            Scale::Applied => {}
            Scale::AfterBias => {
                let before = out;
                out = self.factor(part, out)?;
                if out != before {
                    self.sketch.name(out, called("s"));
                }
            }
            Scale::Idle => self.idle(&format!("{part}.scale")),
        }
        Ok(out)
    }

    /// With what adapters add, if there are any that have matrices for `{part}.weight`; `ids` are the experts of each row.
    pub(super) fn adapted(&mut self, part: &str, x: Id, out: Id, ids: Option<Id>) -> Id {
        let of = weights::weight(part);
        let (gguf, mut sum) = (self.gguf, out);
        for (number, (adapter, pair)) in gguf.adapters_of(&of).enumerate() {
            let mut product = x;
            for (kind, (info, _)) in [(weights::LORA_A, &pair.a), (weights::LORA_B, &pair.b)] {
                let mut ne = [1; 4];
                info.shape.iter().rev().zip(&mut ne).for_each(|(extent, ne)| *ne = *extent);
                let matrix = self.input(&weights::in_adapter(&of, kind, number), info.dtype, ne);
                product = match ids {
                    Some(ids) => self.sketch.mul_mat_id(matrix, product, ids),
                    None => self.sketch.mul_mat(matrix, product),
                };
            }
            let scaled = self.scaled(product, adapter.scale(pair), "");
            sum = self.sum(sum, scaled, "");
        }
        sum
    }

    /// Times the tensor `{part}.scale`, if the file has one.
    fn factor(&mut self, part: &str, x: Id) -> Result<Id> {
        let Some(factor) = self.optional(&format!("{part}.scale"), &[1])? else { return Ok(x) };
        Ok(self.sketch.same(Op::Mul, &[x, factor], &[]))
    }

    /// RMS norm and weight, over the fastest axis.
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn norm(&mut self, part: &str, x: Id, name: &str) -> Result<Id> {
        let inner = name.rsplit_once('-').map_or("norm".to_owned(), |(_, layer)| format!("norm-{layer}"));
        self.norm_called(part, x, &inner, name)
    }

    /// [`Builder::norm`] with llama.cpp's name of the norm before its weight.
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn norm_called(&mut self, part: &str, x: Id, inner: &str, name: &str) -> Result<Id> {
        let width = self.sketch.get(x).ne[0];
        let weight = self.weight(&weights::weight(part), &[width])?;
        let norm = self.sketch.same(Op::RmsNorm, &[x], &[("eps", Word::Float(self.facts.eps))]);
        self.sketch.name(norm, inner);
        let out = self.sketch.same(Op::Mul, &[norm, weight], &[]);
        Ok(self.sketch.name(out, name))
    }

    /// A factor on every element.
    pub fn scaled(&mut self, x: Id, factor: f32, name: &str) -> Id {
        let out = self.sketch.same(Op::Scale, &[x], &[("scale", Word::Float(factor))]);
        self.sketch.name(out, name)
    }

    /// A sum.
    pub fn sum(&mut self, a: Id, b: Id, name: &str) -> Id {
        let out = self.sketch.same(Op::Add, &[a, b], &[]);
        self.sketch.name(out, name)
    }

    /// Rows of the embedding table, (T, D).
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn embed(&mut self) -> Result<Id> {
        let table =
            self.weight(&weights::weight(weights::TOKEN_EMBD), &[self.facts.vocab, self.facts.model])?;
        let tokens = self.input("inp_tokens", DType::I32, [self.shape.tokens, 1, 1, 1]);
        let rows = self.sketch.get_rows(table, tokens);
        Ok(self.sketch.name(rows, "embd"))
    }

    /// The rows that logits are wanted for.
    pub fn output_rows(&mut self, x: Id) -> Id {
        let ids = self.input("out_ids", DType::I32, [self.shape.outputs, 1, 1, 1]);
        let rows = self.sketch.get_rows(x, ids);
        let name = format!("{} (output rows)", self.sketch.get(x).name);
        self.sketch.name(rows, name)
    }

    /// Gate, up, GLU and down; `glu` is its op with ggml's number of it.
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn feed_forward(
        &mut self,
        layer: usize,
        x: Id,
        (glu, number): (Op, i32),
        scale: Scale,
    ) -> Result<Id> {
        let part = |part: &str| weights::in_layer(layer, part);
        let node = |name: &str| format!("{name}-{layer}");
        let (ffn, model) = (self.facts.ffn, self.facts.model);
        let gate = self.linear(&part(weights::FFN_GATE), ffn, x, scale, &node("ffn_gate"))?;
        let up = self.linear(&part(weights::FFN_UP), ffn, x, scale, &node("ffn_up"))?;
        let act = self.sketch.same(glu, &[gate, up], &[("glu", Word::Int(number))]);
        self.sketch.name(act, node(Kind::FfnAct.name()));
        let out = self.linear(&part(weights::FFN_DOWN), model, act, scale, "")?;
        Ok(self.sketch.name(out, node(Kind::FfnOut.name())))
    }

    /// The last norm and the logits. Returns them.
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn head(&mut self, x: Id) -> Result<Id> {
        let x = self.norm(weights::OUTPUT_NORM, x, "result_norm")?;
        let (vocab, model) = (self.facts.vocab, self.facts.model);
        let tied = self.gguf.tensor(&weights::weight(weights::OUTPUT)).is_none();
        let mut out = match tied {
            false => self.linear(weights::OUTPUT, vocab, x, Scale::Applied, "")?,
            true => {
                let table = self.weight(&weights::weight(weights::TOKEN_EMBD), &[vocab, model])?;
                self.sketch.mul_mat(table, x)
            }
        };
        if let (true, Some(bias)) = (tied, self.optional(&weights::bias(weights::OUTPUT), &[vocab])?) {
            out = self.sum(out, bias, "");
        }
        Ok(self.sketch.name(out, "result_output"))
    }

    /// The graph, after a look at what the file has beyond it.
    ///
    /// # Errors
    /// A tensor that the graph does not read: a part of the model that would be silently left out.
    pub fn finish(self) -> Result<Graph> {
        // Scales of activations are for one backend's own arithmetic and for files of one type: no op reads them.
        let known = |name: &str| {
            self.leaves.contains_key(name) || self.idle.contains(name) || name.ends_with(".input_scale")
        };
        if let Some(tensor) = self.gguf.tensors().find(|tensor| !known(&tensor.name)) {
            let expected = format!("the tensors of a {} model", self.facts.family.name);
            return Err(Error::file(self.gguf.path(), "a tensor that the graph has no place for")
                .expected(expected)
                .found(format!("{} {:?}", tensor.name, tensor.shape))
                .hint("a recording of this model is judged by its own graph: parity audit DUMP -m MODEL"));
        }
        let mut pairs =
            self.gguf.adapters().flat_map(|adapter| adapter.pairs().map(move |pair| (adapter, pair.0)));
        let left =
            |(_, of): &(_, &str)| !self.leaves.contains_key(&weights::in_adapter(of, weights::LORA_A, 0));
        if let Some((adapter, of)) = pairs.find(left) {
            return Err(Error::file(
                adapter.path(),
                format!("is for {of}, which the graph multiplies with nothing"),
            )
            .hint("a recording of llama.cpp with --lora is judged by its own graph"));
        }
        Ok(self.sketch.finish())
    }
}
