//! The model as data: a list of nodes in execution order.
//!
//! A node is one op with its weights, its inputs (earlier checkpoints) and its output, which *is* a
//! checkpoint. Engines execute the list; who judges what they give knows the built graph alone, which it was
//! lowered from.

mod op;

pub use op::{
    Activation, Anchor, Attention, BySteps, Edge, Glu, Mask, Norm, NormStyle, Op, Pairing, Position, Rope,
    ScoreLimit,
};

use crate::checkpoint::{Checkpoint, Kind};

/// One op whose output is a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The name of the output.
    pub checkpoint: Checkpoint,
    /// What is computed.
    pub op: Op,
    /// What it is computed from. See [`Op`] for what each op expects.
    pub inputs: Vec<Checkpoint>,
}

/// The forward pass of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// In execution order. Attention stands as scores, softmax and context: see [`Graph::fused`].
    pub nodes: Vec<Node>,
    /// Widths of the axes.
    pub dims: Dims,
}

/// Widths of the axes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// L
    pub layers: usize,
    /// D
    pub model: usize,
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// E
    pub head_width: usize,
    /// F
    pub ffn: usize,
    /// V
    pub vocab: usize,
}

impl Dims {
    /// Shape of a checkpoint for `rows` token rows and `cached` positions, slowest axis first.
    pub fn shape(&self, kind: Kind, rows: usize, cached: usize) -> Vec<usize> {
        match kind {
            Kind::AttnScores | Kind::AttnProbs => vec![self.heads, rows, cached],
            Kind::Q | Kind::QNorm | Kind::QRope => vec![rows, self.heads, self.head_width],
            Kind::K | Kind::KNorm | Kind::KRope | Kind::V => {
                vec![rows, self.kv_heads, self.head_width]
            }
            Kind::QProj | Kind::AttnCtx => vec![rows, self.heads * self.head_width],
            Kind::KProj | Kind::VProj => vec![rows, self.kv_heads * self.head_width],
            Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => vec![rows, self.ffn],
            Kind::Logits => vec![rows, self.vocab],
            Kind::Embed
            | Kind::AttnNorm
            | Kind::AttnOut
            | Kind::AttnResidual
            | Kind::FfnNorm
            | Kind::FfnOut
            | Kind::LayerOut
            | Kind::FinalNorm => vec![rows, self.model],
            // The hand-written graphs have no names: no row of one fits.
            Kind::Named(_) => vec![rows, 0],
        }
    }

    /// Columns of one token row of a checkpoint with `cached` positions.
    pub fn width(&self, kind: Kind, cached: usize) -> usize {
        self.shape(kind, 1, cached).iter().product()
    }
}

impl Graph {
    /// The node whose output is `checkpoint`.
    pub fn node(&self, checkpoint: Checkpoint) -> Option<&Node> {
        self.nodes.iter().find(|node| node.checkpoint == checkpoint)
    }

    /// All checkpoints in execution order.
    pub fn checkpoints(&self) -> impl Iterator<Item = Checkpoint> + '_ {
        self.nodes.iter().map(|node| node.checkpoint)
    }

    /// The same model with scores, softmax and context merged into [`Op::Attention`] wherever neither
    /// the scores nor the probabilities are wanted.
    #[must_use]
    pub fn fused(&self, wants: impl Fn(Checkpoint) -> bool) -> Graph {
        let mut nodes: Vec<Node> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            nodes.push(node.clone());
            if let Some(merged) = merge_attention(&nodes, &wants) {
                nodes.truncate(nodes.len() - 3);
                nodes.push(merged);
            }
        }
        Graph { nodes, dims: self.dims }
    }

    /// The last of the nodes that are wanted.
    pub fn last_of(&self, wanted: impl Fn(Checkpoint) -> bool) -> Option<Checkpoint> {
        self.nodes.iter().rfind(|node| wanted(node.checkpoint)).map(|node| node.checkpoint)
    }

    /// The list up to and including `last`; all of it where it has no such node.
    #[must_use]
    pub fn until(&self, last: Checkpoint) -> Graph {
        let end = self.nodes.iter().position(|node| node.checkpoint == last);
        let nodes = self.nodes[..end.map_or(self.nodes.len(), |end| end + 1)].to_vec();
        Graph { nodes, dims: self.dims }
    }
}

/// The last three nodes as one, where they are an attention that nobody looks into.
fn merge_attention(nodes: &[Node], wants: &impl Fn(Checkpoint) -> bool) -> Option<Node> {
    let [.., scores, softmax, context] = nodes else {
        return None;
    };
    let (Op::Scores(a), Op::Softmax(b), Op::Context(c)) = (&scores.op, &softmax.op, &context.op) else {
        return None;
    };
    let one_attention = a == b && b == c;
    let wired = softmax.inputs == [scores.checkpoint] && context.inputs.first() == Some(&softmax.checkpoint);
    let unseen = !wants(scores.checkpoint) && !wants(softmax.checkpoint);
    (one_attention && wired && unseen).then(|| Node {
        checkpoint: context.checkpoint,
        op: Op::Attention(a.clone()),
        inputs: vec![scores.inputs[0], scores.inputs[1], context.inputs[1]],
    })
}
