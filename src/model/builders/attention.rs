//! Queries, keys and values, their caches, and attention in both of llama.cpp's forms.

use parity_graph::params::HINT_HADAMARD;
use parity_graph::{Id, Op};

use crate::checkpoint::Kind;
use crate::error::Result;
use crate::gguf::DType;

use super::blocks::{Builder, Scale};
use super::facts::{Rope, YARN_BETA};
use super::inputs::CAUSAL_MASK;
use super::shape::{Cells, Kept};
use super::sketch::Word;
use parity_graph::weights;

/// ggml's word for sums in f32.
const PREC_F32: i32 = 10;

/// What a family's attention has of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention {
    /// Whether Q and K pass a per-head norm before RoPE.
    pub qk_norm: bool,
    /// Where RoPE's frequency factors are, if the file has them.
    pub factors: Option<&'static str>,
    /// A factor on Q after RoPE.
    pub query: Option<f32>,
    /// The factor of the scores within attention.
    pub scale: f32,
    /// Whether each head has a sink.
    pub sinks: bool,
    /// Whether the graph is drawn as models with sliding windows are: V last, caches and masks of two kinds.
    pub two_caches: bool,
}

/// Where Q, K and V of a layer come from.
#[derive(Clone, Copy)]
struct Source {
    layer: usize,
    /// The normed input.
    x: Id,
    /// The result of one matmul for all three, where the file has one matrix.
    whole: Option<Id>,
}

/// llama.cpp's name of Q and K.
fn stem(part: &str) -> &'static str {
    if part == weights::ATTN_Q { "Qcur" } else { "Kcur" }
}

impl Builder<'_> {
    /// From the normed input (T, D) to what is added to the residual stream, (T, D).
    ///
    /// # Errors
    /// Those of [`Builder::weight`].
    pub fn attention(&mut self, layer: usize, x: Id, attention: &Attention) -> Result<Id> {
        let [q, k, v] = self.qkv(layer, x, attention)?;
        let sliding = self.facts.sliding[layer];
        let cells = if sliding { self.shape.sliding } else { self.shape.cells };
        let kind = if sliding { "_swa" } else { "" };
        let [keys, values] = [("k", self.shape.cache.keys), ("v", self.shape.cache.values)];
        let (q, k, v) = (self.mixed(q, keys, kind), self.mixed(k, keys, kind), self.mixed(v, values, kind));
        self.write_caches(layer, cells, kind, k, v);
        let width = self.facts.heads * self.facts.head_width;
        let name = format!("{}-{layer}", Kind::AttnCtx.name());
        let tokens = self.shape.tokens;
        let mask = {
            let dtype = if self.shape.flash { DType::F16 } else { DType::F32 };
            self.input(&format!("{CAUSAL_MASK}{kind}"), dtype, [cells.seen, tokens, 1, 1])
        };
        let sinks = match attention.sinks {
            true => Some(self.weight(
                &weights::weight(&weights::in_layer(layer, weights::ATTN_SINKS)),
                &[self.facts.heads],
            )?),
            false => None,
        };
        let context = match self.shape.flash {
            true => {
                let q = self.by_heads(q);
                let (keys, values) = (self.keys(layer, cells), self.values(layer, cells));
                let out = self.flash([q, keys, values], mask, sinks, attention.scale, &name);
                self.sketch.reshape(out, [width, tokens, 1, 1])
            }
            false => {
                let (values, keys) = (self.values(layer, cells), self.keys(layer, cells));
                let q = self.by_heads(q);
                let out = self.plain(layer, [q, keys, values], mask, sinks, attention.scale);
                self.sketch.cont(out, [width, tokens, 1, 1])
            }
        };
        self.sketch.name(context, name);
        let context = self.mixed(context, values, kind);
        let part = weights::in_layer(layer, weights::ATTN_OUTPUT);
        let out = self.linear(&part, self.facts.model, context, Scale::Applied, "")?;
        // Only the sum with a bias has a name.
        match self.sketch.get(out).op {
            Op::Add => Ok(self.sketch.name(out, format!("{}-{layer}", Kind::AttnOut.name()))),
            _ => Ok(out),
        }
    }

    /// Q (T, H, E), K and V (T, K, E), Q and K after RoPE. Weights may be one matrix in the file.
    fn qkv(&mut self, layer: usize, x: Id, attention: &Attention) -> Result<[Id; 3]> {
        let (heads, kv_heads) = (self.facts.heads, self.facts.kv_heads);
        let fused =
            self.gguf.tensor(&weights::weight(&weights::in_layer(layer, weights::ATTN_QKV))).is_some();
        let whole = if fused { Some(self.fused(layer, x)?) } else { None };
        let from = Source { layer, x, whole };
        let mut q = self.project(from, weights::ATTN_Q, 0, heads)?;
        q = self.rotated(layer, q, weights::ATTN_Q, attention)?;
        if let Some(factor) = attention.query {
            q = self.scaled(q, factor, "");
        }
        let value = |builder: &mut Self| builder.project(from, weights::ATTN_V, heads + kv_heads, kv_heads);
        let early = if attention.two_caches { None } else { Some(value(self)?) };
        let k = self.project(from, weights::ATTN_K, heads, kv_heads)?;
        let k = self.rotated(layer, k, weights::ATTN_K, attention)?;
        let v = early.map_or_else(|| value(self), Ok)?;
        Ok([q, k, v])
    }

    /// `heads` heads from head `first` of a row of Q, K and V: (T, heads, E).
    fn project(&mut self, from: Source, part: &str, first: usize, heads: usize) -> Result<Id> {
        let layer = from.layer;
        let name = format!("{}-{layer}", if part == weights::ATTN_V { "Vcur" } else { stem(part) });
        let (width, tokens) = (self.facts.head_width, self.shape.tokens);
        let ne = [width, heads, tokens, 1];
        let id = match from.whole {
            Some(whole) => {
                let row = self.sketch.get(whole).nb[1];
                let head = width * size_of::<f32>();
                self.sketch.view(whole, ne, [head, row, row * tokens], first * head)
            }
            None => {
                let part = weights::in_layer(layer, part);
                let id = self.linear(&part, heads * width, from.x, Scale::Applied, &name)?;
                self.sketch.reshape(id, ne)
            }
        };
        Ok(self.sketch.name(id, name))
    }

    /// One matmul for Q, K and V: (T, (H + 2 K) E).
    fn fused(&mut self, layer: usize, x: Id) -> Result<Id> {
        let rows = (self.facts.heads + 2 * self.facts.kv_heads) * self.facts.head_width;
        self.linear(
            &weights::in_layer(layer, weights::ATTN_QKV),
            rows,
            x,
            Scale::Applied,
            &format!("wqkv-{layer}"),
        )
    }

    /// Per-head norm, where there is one, and RoPE.
    fn rotated(&mut self, layer: usize, x: Id, part: &str, attention: &Attention) -> Result<Id> {
        let stem = stem(part);
        let mut x = x;
        if attention.qk_norm {
            let norm = if part == weights::ATTN_Q { weights::ATTN_Q_NORM } else { weights::ATTN_K_NORM };
            x = self.norm(&weights::in_layer(layer, norm), x, &format!("{stem}_normed-{layer}"))?;
        }
        let rope = self.facts.rope_of(layer);
        let factors = match attention.factors {
            Some(part) => self.optional(&weights::weight(part), &[rope.dims / 2])?,
            None => None,
        };
        let out = self.rope(x, rope, factors);
        Ok(self.sketch.name(out, format!("{stem}-{layer}")))
    }

    fn rope(&mut self, x: Id, rope: Rope, factors: Option<Id>) -> Id {
        let positions = self.input("inp_pos", DType::I32, [self.shape.tokens, 1, 1, 1]);
        let ne = self.sketch.get(x).ne;
        let words = [
            ("n_dims", Word::Int(rope.dims as i32)),
            ("mode", Word::Int(rope.mode)),
            ("n_ctx_orig", Word::Int(rope.original as i32)),
            ("freq_base", Word::Float(rope.base)),
            ("freq_scale", Word::Float(rope.scale)),
            ("ext_factor", Word::Float(rope.ext)),
            ("attn_factor", Word::Float(rope.attn)),
            ("beta_fast", Word::Float(YARN_BETA[0])),
            ("beta_slow", Word::Float(YARN_BETA[1])),
        ];
        self.sketch.node(Op::Rope, DType::F32, ne, &[Some(x), Some(positions), factors], &words)
    }

    /// Columns multiplied by the Hadamard matrix that the cache of keys (`k`) or of values (`v`) asks for, which is its
    /// own inverse.
    fn mixed(&mut self, x: Id, (part, kept): (&str, Kept), kind: &str) -> Id {
        let Some(width) = kept.rotated else { return x };
        let matrix = self.input(&format!("attn_inp_{part}_rot{kind}"), DType::F32, [width, width, 1, 1]);
        let (ne, elements) = (self.sketch.get(x).ne, self.sketch.get(x).elements());
        let rows = [width, elements / width, 1, 1];
        let x = match self.sketch.get(x).is_contiguous() {
            true => self.sketch.reshape(x, rows),
            false => self.sketch.cont(x, rows),
        };
        let product = self.sketch.mul_mat(matrix, x);
        self.sketch.set(product, "hint", HINT_HADAMARD);
        self.sketch.reshape(product, ne)
    }

    /// The cache of keys (`k`) or values (`v`) of a layer: (cells, K E).
    fn cache(&mut self, (part, kept): (&str, Kept), layer: usize, cells: Cells) -> Id {
        let row = self.facts.head_width * self.facts.kv_heads;
        self.input(&format!("cache_{part}_l{layer}"), kept.dtype, [row, cells.all, 1, 1])
    }

    /// Writes K and V into their caches: row by row, but V transposed without flash attention, element by element.
    fn write_caches(&mut self, layer: usize, cells: Cells, kind: &str, k: Id, v: Id) {
        let (tokens, flash) = (self.shape.tokens, self.shape.flash);
        let row = self.facts.head_width * self.facts.kv_heads;
        let [keys, values] = [("k", self.shape.cache.keys), ("v", self.shape.cache.values)];
        let (cache_k, cache_v) = (self.cache(keys, layer, cells), self.cache(values, layer, cells));
        let ids = self.input(&format!("attn_inp_k_idxs{kind}"), DType::I64, [tokens, 1, 1, 1]);
        let written = if flash { tokens } else { tokens * row };
        let v_ids = self.input(&format!("attn_inp_v_idxs{kind}"), DType::I64, [written, 1, 1, 1]);
        let rows = |sketch: &mut super::sketch::Sketch, id: Id| {
            let step = sketch.get(id).nb[2];
            sketch.view(id, [row, tokens, 1, 1], [step, step * tokens, step * tokens], 0)
        };
        let new_k = rows(&mut self.sketch, k);
        self.sketch.set_rows(cache_k, new_k, ids);
        if flash {
            let new_v = rows(&mut self.sketch, v);
            self.sketch.set_rows(cache_v, new_v, v_ids);
        } else {
            let merged = match self.sketch.get(v).is_contiguous() {
                true => self.sketch.reshape(v, [row, tokens, 1, 1]),
                false => self.sketch.cont(v, [row, tokens, 1, 1]),
            };
            let single = self.sketch.reshape(merged, [1, row * tokens, 1, 1]);
            let all = self.sketch.reshape(cache_v, [1, row * cells.all, 1, 1]);
            self.sketch.set_rows(all, single, v_ids);
        }
    }

    /// What attention reads of the cache of keys: (K, S, E).
    fn keys(&mut self, layer: usize, cells: Cells) -> Id {
        let cache = self.cache(("k", self.shape.cache.keys), layer, cells);
        self.rows_by_head(cache, cells)
    }

    /// What attention reads of the cache of values: (K, S, E) with flash attention, else (K, E, S).
    fn values(&mut self, layer: usize, cells: Cells) -> Id {
        let cache = self.cache(("v", self.shape.cache.values), layer, cells);
        if self.shape.flash {
            return self.rows_by_head(cache, cells);
        }
        let (width, heads) = (self.facts.head_width, self.facts.kv_heads);
        let size = self.shape.cache.values.dtype.block_bytes();
        let strides = [cells.all * width * size, cells.all * size, width * heads * cells.all * size];
        let values = self.sketch.view(cache, [cells.seen, heads, width, 1], strides, 0);
        self.sketch.permute(values, [0, 2, 1, 3])
    }

    /// Rows of a cache, heads before cells: (K, S, E).
    fn rows_by_head(&mut self, cache: Id, cells: Cells) -> Id {
        let (width, heads) = (self.facts.head_width, self.facts.kv_heads);
        let row = self.sketch.get(cache).nb[1];
        let head = row / heads;
        let rows = self.sketch.view(cache, [width, heads, cells.seen, 1], [head, row, row * cells.all], 0);
        self.sketch.permute(rows, [0, 2, 1, 3])
    }

    /// Heads before tokens: (H, T, E).
    fn by_heads(&mut self, q: Id) -> Id {
        let tensor = self.sketch.get(q);
        let (ne, [_, head, row, _]) = (tensor.ne, tensor.nb);
        let q = self.sketch.view(q, ne, [head, row, row * ne[2]], 0);
        self.sketch.permute(q, [0, 2, 1, 3])
    }

    fn flash(&mut self, [q, k, v]: [Id; 3], mask: Id, sinks: Option<Id>, scale: f32, name: &str) -> Id {
        let (width, [_, tokens, heads, streams]) = (self.sketch.get(v).ne[0], self.sketch.get(q).ne);
        let words = [("scale", Word::Float(scale)), ("prec", Word::Int(PREC_F32))];
        let srcs = [Some(q), Some(k), Some(v), Some(mask), sinks];
        let out = self.sketch.node(Op::FlashAttn, DType::F32, [width, heads, tokens, streams], &srcs, &words);
        self.sketch.name(out, name)
    }

    fn plain(&mut self, layer: usize, [q, k, v]: [Id; 3], mask: Id, sinks: Option<Id>, scale: f32) -> Id {
        let scores = self.sketch.mul_mat(k, q);
        self.sketch.set(scores, "prec", PREC_F32);
        self.sketch.name(scores, format!("kq-{layer}"));
        let ne = self.sketch.get(scores).ne;
        let srcs = [Some(scores), Some(mask), sinks];
        let probs = self.sketch.node(Op::SoftMax, DType::F32, ne, &srcs, &[("scale", Word::Float(scale))]);
        self.sketch.name(probs, format!("kq_soft_max-{layer}"));
        let context = self.sketch.mul_mat(v, probs);
        self.sketch.name(context, format!("kqv-{layer}"));
        self.sketch.permute(context, [0, 2, 1, 3])
    }
}
