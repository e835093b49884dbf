//! Builds the graph of a pre-norm decoder; the architectures differ in a few choices.

use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::config::Config;
use crate::model::graph::{
    Activation, Attention, Glu, GluForm, Graph, KvMap, Mask, Node, Norm, NormStyle, Op, Rope, RopePosition,
    ScoreLimit, WeightRef,
};

/// What an architecture has of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Whether Q, K and V may have biases.
    pub qkv_bias: bool,
    /// Whether Q and K pass a per-head norm before they turn.
    pub qk_norm: bool,
}

/// Builds the graph and checks that every weight is there with its shape, and none is left over.
pub fn decoder(gguf: &Gguf, config: &Config, choices: Choices) -> Result<Graph> {
    let mut builder = Builder { gguf, config, choices, nodes: Vec::new(), used: Vec::new() };
    builder.embed()?;
    for layer in 0..config.dims.layers as u32 {
        builder.attention(layer)?;
        builder.feed_forward(layer)?;
    }
    builder.head()?;
    builder.refuse_leftovers()?;
    Ok(Graph { nodes: builder.nodes, dims: config.dims })
}

struct Builder<'a> {
    gguf: &'a Gguf,
    config: &'a Config,
    choices: Choices,
    nodes: Vec<Node>,
    used: Vec<String>,
}

impl Builder<'_> {
    fn push(&mut self, checkpoint: Checkpoint, op: Op, inputs: &[Checkpoint]) {
        self.nodes.push(Node { checkpoint, op, inputs: inputs.to_vec(), edits: Vec::new() });
    }

    /// A weight that must be there, shape slowest axis first.
    fn weight(&mut self, name: &str, shape: &[usize]) -> Result<WeightRef> {
        let tensor = self.gguf.require_tensor(name, shape)?;
        if !tensor.info.dtype.is_decodable() {
            return Err(Error::file(
                self.gguf.path(),
                format!("{name} has a type that parity does not decode"),
            )
            .expected("F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K..Q6_K, IQ4_NL or IQ4_XS")
            .found(tensor.info.dtype.name())
            .hint("llama-quantize makes a file of another type"));
        }
        self.used.push(name.to_owned());
        Ok(WeightRef::new(name))
    }

    /// A weight that may be there.
    fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<WeightRef>> {
        if self.gguf.tensor(name).is_none() { Ok(None) } else { self.weight(name, shape).map(Some) }
    }

    fn linear(
        &mut self,
        to: Checkpoint,
        name: &str,
        rows: usize,
        from: Checkpoint,
        cols: usize,
    ) -> Result<()> {
        let weight = self.weight(name, &[rows, cols])?;
        self.push(to, Op::Linear { weight, columns: None }, &[from]);
        Ok(())
    }

    fn norm(&mut self, to: Checkpoint, name: &str, width: usize, from: Checkpoint) -> Result<()> {
        let weight = self.weight(name, &[width])?;
        let norm = Norm { weight, eps: self.config.norm_eps, width, style: NormStyle::Rms };
        self.push(to, Op::Norm(norm), &[from]);
        Ok(())
    }

    fn embed(&mut self) -> Result<()> {
        let dims = self.config.dims;
        let table = self.weight("token_embd.weight", &[dims.vocab, dims.model])?;
        self.push(Checkpoint::global(Kind::Embed), Op::Embed { table }, &[]);
        Ok(())
    }

    /// The checkpoint that layer `layer` reads.
    fn layer_input(layer: u32) -> Checkpoint {
        match layer.checked_sub(1) {
            Some(previous) => Checkpoint::layer(Kind::LayerOut, previous),
            None => Checkpoint::global(Kind::Embed),
        }
    }

    fn attention(&mut self, layer: u32) -> Result<()> {
        let dims = self.config.dims;
        let at = |kind| Checkpoint::layer(kind, layer);
        let name = |part: &str| format!("blk.{layer}.{part}");
        let input = Self::layer_input(layer);
        self.norm(at(Kind::AttnNorm), &name("attn_norm.weight"), dims.model, input)?;
        let q =
            self.head_rows(layer, "attn_q", dims.heads, [Kind::QProj, Kind::Q, Kind::QNorm, Kind::QRope])?;
        let k =
            self.head_rows(layer, "attn_k", dims.kv_heads, [Kind::KProj, Kind::K, Kind::KNorm, Kind::KRope])?;
        self.projection(layer, "attn_v", dims.kv_heads, Kind::VProj, Kind::V)?;
        let attention = Attention {
            heads: dims.heads,
            kv_heads: dims.kv_heads,
            head_width: dims.head_width,
            scale: 1.0 / (dims.head_width as f64).sqrt(),
            kv_map: KvMap::Group,
            mask: Mask::Causal,
            softmax: true,
            limit: ScoreLimit::None,
        };
        self.push(at(Kind::AttnScores), Op::Scores(attention.clone()), &[q, k]);
        self.push(at(Kind::AttnProbs), Op::Softmax(attention.clone()), &[at(Kind::AttnScores)]);
        self.push(at(Kind::AttnCtx), Op::Context(attention), &[at(Kind::AttnProbs), at(Kind::V)]);
        let ctx_width = dims.heads * dims.head_width;
        self.linear(
            at(Kind::AttnOut),
            &name("attn_output.weight"),
            dims.model,
            at(Kind::AttnCtx),
            ctx_width,
        )?;
        self.push(at(Kind::AttnResidual), Op::Add { scale: [1.0, 1.0] }, &[at(Kind::AttnOut), input]);
        Ok(())
    }

    /// Product and bias.
    fn projection(&mut self, layer: u32, part: &str, heads: usize, proj: Kind, biased: Kind) -> Result<()> {
        let dims = self.config.dims;
        let at = |kind| Checkpoint::layer(kind, layer);
        let rows = heads * dims.head_width;
        self.linear(at(proj), &format!("blk.{layer}.{part}.weight"), rows, at(Kind::AttnNorm), dims.model)?;
        let bias = match self.choices.qkv_bias {
            true => self.optional(&format!("blk.{layer}.{part}.bias"), &[rows])?,
            false => None,
        };
        self.push(at(biased), Op::Bias { bias, times: 1 }, &[at(proj)]);
        Ok(())
    }

    /// Product, bias, per-head norm, rotation. Returns the checkpoint of the rotation.
    fn head_rows(
        &mut self,
        layer: u32,
        part: &str,
        heads: usize,
        [proj, biased, normed, turned]: [Kind; 4],
    ) -> Result<Checkpoint> {
        let at = |kind| Checkpoint::layer(kind, layer);
        let head_width = self.config.dims.head_width;
        self.projection(layer, part, heads, proj, biased)?;
        let mut from = at(biased);
        if self.choices.qk_norm {
            self.norm(at(normed), &format!("blk.{layer}.{part}_norm.weight"), head_width, from)?;
            from = at(normed);
        }
        let rope = Rope {
            base: self.config.rope_base,
            head_width,
            dims: self.config.rope_dims,
            pairing: self.config.architecture.pairing(),
            freqs: self.optional("rope_freqs.weight", &[self.config.rope_dims / 2])?,
            position: RopePosition::Own,
            sign: 1,
            times: 1,
        };
        self.push(at(turned), Op::Rope(rope), &[from]);
        Ok(at(turned))
    }

    fn feed_forward(&mut self, layer: u32) -> Result<()> {
        let dims = self.config.dims;
        let at = |kind| Checkpoint::layer(kind, layer);
        let name = |part: &str| format!("blk.{layer}.{part}");
        self.norm(at(Kind::FfnNorm), &name("ffn_norm.weight"), dims.model, at(Kind::AttnResidual))?;
        self.linear(at(Kind::FfnGate), &name("ffn_gate.weight"), dims.ffn, at(Kind::FfnNorm), dims.model)?;
        self.linear(at(Kind::FfnUp), &name("ffn_up.weight"), dims.ffn, at(Kind::FfnNorm), dims.model)?;
        let glu = Glu { activation: Activation::Silu, form: GluForm::GateTimesUp };
        self.push(at(Kind::FfnAct), Op::Glu(glu), &[at(Kind::FfnGate), at(Kind::FfnUp)]);
        self.linear(at(Kind::FfnOut), &name("ffn_down.weight"), dims.model, at(Kind::FfnAct), dims.ffn)?;
        let residual = at(Kind::AttnResidual);
        self.push(at(Kind::LayerOut), Op::Add { scale: [1.0, 1.0] }, &[at(Kind::FfnOut), residual]);
        Ok(())
    }

    fn head(&mut self) -> Result<()> {
        let dims = self.config.dims;
        let last = Self::layer_input(dims.layers as u32);
        let (final_norm, logits) = (Checkpoint::global(Kind::FinalNorm), Checkpoint::global(Kind::Logits));
        self.norm(final_norm, "output_norm.weight", dims.model, last)?;
        let name = if self.config.tied { "token_embd.weight" } else { "output.weight" };
        self.linear(logits, name, dims.vocab, final_norm, dims.model)
    }

    /// A tensor that the graph does not read would be a part of the model that is silently left out.
    fn refuse_leftovers(&self) -> Result<()> {
        match self.gguf.tensors().find(|tensor| !self.used.contains(&tensor.name)) {
            None => Ok(()),
            Some(tensor) => Err(Error::file(self.gguf.path(), "a tensor that the graph has no place for")
                .expected(format!("the tensors of a {} model", self.config.architecture.name()))
                .found(format!("{} {:?}", tensor.name, tensor.shape))
                .hint("two dumps of such a model can still be compared: parity diff CANDIDATE REFERENCE")),
        }
    }
}
