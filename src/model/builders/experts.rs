//! Mixtures of experts: routing, the experts' feed-forward layers, their weighted sum.

use parity_graph::{Id, Op};

use crate::error::Result;
use crate::gguf::DType;

use super::blocks::Builder;
use super::sketch::Word;
use parity_graph::weights;

/// ggml's word for the order of ARGSORT.
const DESCENDING: i32 = 1;

/// The least sum of routing weights that is divided by: the smallest normal number of f16.
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// What a family's experts have of their own.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Rows of an expert's gate and up matrices.
    pub ffn: usize,
    /// The gated function and its words.
    pub glu: Op,
    /// Its words.
    pub words: Vec<(&'static str, Word)>,
    /// How the weights of the chosen experts come from the router's logits.
    pub routing: Routing,
    /// Whether the router and the experts have biases.
    pub bias: bool,
}

/// How the weights of the chosen experts come from the router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over all experts; those of the chosen are divided by their sum.
    SoftmaxThenSum,
    /// The largest logits are chosen; softmax over the chosen.
    SoftmaxOfChosen,
}

impl Builder<'_> {
    /// From the normed input (T, D) to the weighted sum of the chosen experts, (T, D).
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn experts(&mut self, layer: usize, x: Id, experts: &Experts) -> Result<Id> {
        let node = |name: &str| format!("ffn_moe_{name}-{layer}");
        let (tokens, model) = (self.sketch.get(x).ne[1], self.facts.model);
        let used = self.facts.experts_used;
        let (ids, weights) = self.route(layer, x, experts)?;
        let x = self.sketch.reshape(x, [model, 1, tokens, 1]);
        let gate = self.expert(layer, "gate", experts.ffn, x, ids, experts.bias)?;
        let up = self.expert(layer, "up", experts.ffn, x, ids, experts.bias)?;
        let act = self.sketch.same(experts.glu.clone(), &[gate, up], &experts.words);
        self.sketch.name(act, node(&experts.glu.name().to_ascii_lowercase()));
        let down = self.expert(layer, "down", model, act, ids, experts.bias)?;
        let weighted = self.sketch.same(Op::Mul, &[down, weights], &[]);
        self.sketch.name(weighted, node("weighted"));
        let [_, step, row, _] = self.sketch.get(weighted).nb;
        let parts: Vec<Id> = (0..used)
            .map(|i| {
                let ne = [model, tokens, 1, 1];
                self.sketch.view(weighted, ne, [row, row * tokens, row * tokens], i * step)
            })
            .collect();
        let mut out = parts[0];
        for part in &parts[1..] {
            out = self.sum(out, *part, &node("out"));
        }
        if used == 1 {
            out = self.sketch.cont(out, [model, tokens, 1, 1]);
            self.sketch.name(out, node("out"));
        }
        Ok(out)
    }

    /// Which experts (T, used), and with which weights (T, used, 1).
    fn route(&mut self, layer: usize, x: Id, experts: &Experts) -> Result<(Id, Id)> {
        let node = |name: &str| format!("ffn_moe_{name}-{layer}");
        let (tokens, model) = (self.sketch.get(x).ne[1], self.facts.model);
        let (all, used) = (self.facts.experts, self.facts.experts_used);
        let router =
            self.weight(&weights::weight(&weights::in_layer(layer, weights::FFN_GATE_INP)), &[all, model])?;
        let probs = self.sketch.mul_mat(router, x);
        let part = weights::in_layer(layer, weights::FFN_GATE_INP);
        let mut probs = self.adapted(&part, x, probs, None);
        self.sketch.name(probs, node("logits"));
        if experts.bias {
            let bias =
                self.weight(&weights::bias(&weights::in_layer(layer, weights::FFN_GATE_INP)), &[all])?;
            probs = self.sum(probs, bias, &node("logits_biased"));
        }
        if experts.routing == Routing::SoftmaxOfChosen {
            self.sketch.name(probs, node("probs"));
        }
        if experts.routing == Routing::SoftmaxThenSum {
            probs = self.sketch.same(Op::SoftMax, &[probs], &[("scale", Word::Float(1.0))]);
            self.sketch.name(probs, node("probs"));
        }
        let table = self.sketch.reshape(probs, [1, all, tokens, 1]);
        let words = [("descending", Word::Int(DESCENDING))];
        let order = self.sketch.node(Op::Argsort, DType::I32, [all, tokens, 1, 1], &[Some(probs)], &words);
        self.sketch.name(order, node("argsort"));
        let [_, row, plane, _] = self.sketch.get(order).nb;
        let ids = self.sketch.view(order, [used, tokens, 1, 1], [row, plane, plane], 0);
        self.sketch.name(ids, node("topk"));
        let picked = self.sketch.get_rows(table, ids);
        self.sketch.name(picked, node("weights"));
        let mut weights = self.sketch.reshape(picked, [used, tokens, 1, 1]);
        match experts.routing {
            Routing::SoftmaxOfChosen => {
                weights = self.sketch.same(Op::SoftMax, &[weights], &[("scale", Word::Float(1.0))]);
            }
            Routing::SoftmaxThenSum => {
                let sum = self.sketch.node(Op::SumRows, DType::F32, [1, tokens, 1, 1], &[Some(weights)], &[]);
                self.sketch.name(sum, node("weights_sum"));
                let limits = [("min", Word::Float(LEAST_SUM)), ("max", Word::Float(f32::INFINITY))];
                let sum = self.sketch.same(Op::Clamp, &[sum], &limits);
                self.sketch.name(sum, node("weights_sum_clamped"));
                weights = self.sketch.same(Op::Div, &[weights, sum], &[]);
                self.sketch.name(weights, node("weights_norm"));
            }
        }
        Ok((ids, self.sketch.reshape(weights, [1, used, tokens, 1])))
    }

    /// One matmul of the chosen experts, with its scale or its bias: (T, used, rows).
    fn expert(&mut self, layer: usize, part: &str, rows: usize, x: Id, ids: Id, bias: bool) -> Result<Id> {
        let tensor = match part {
            "gate" => weights::FFN_GATE_EXPS,
            "up" => weights::FFN_UP_EXPS,
            _ => weights::FFN_DOWN_EXPS,
        };
        let tensor = weights::in_layer(layer, tensor);
        let node = |how: &str| format!("ffn_moe_{part}{how}-{layer}");
        let (all, cols) = (self.facts.experts, self.sketch.get(x).ne[0]);
        let weight = self.weight(&format!("{tensor}.weight"), &[all, rows, cols])?;
        let out = self.sketch.mul_mat_id(weight, x, ids);
        if bias {
            let out = self.adapted(&tensor, x, out, Some(ids));
            self.sketch.name(out, node(""));
            // llama.cpp loads these scales and does not hand them to the experts of such models.
            self.idle(&format!("{tensor}.scale"));
            let bias = self.weight(&format!("{tensor}.bias"), &[all, rows])?;
            let out = self.sketch.same(Op::AddId, &[out, bias, ids], &[]);
            return Ok(self.sketch.name(out, node("_biased")));
        }
        let Some(scale) = self.optional(&format!("{tensor}.scale"), &[all])? else {
            let out = self.adapted(&tensor, x, out, Some(ids));
            return Ok(self.sketch.name(out, node("")));
        };
        let tokens = self.sketch.get(x).ne[2];
        let scale = self.sketch.reshape(scale, [1, all, 1, 1]);
        let table = self.sketch.node(Op::Repeat, DType::F32, [1, all, tokens, 1], &[Some(scale)], &[]);
        let factors = self.sketch.get_rows(table, ids);
        let out = self.sketch.same(Op::Mul, &[out, factors], &[]);
        let out = self.adapted(&tensor, x, out, Some(ids));
        Ok(self.sketch.name(out, node("_scaled")))
    }
}
