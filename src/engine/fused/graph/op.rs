//! The alphabet of the engines' nodes: every op with its parameters and the weights that it reads.
//!
//! Parameters are plain numbers, of which a healthy model has some: nothing here is named after a mistake.

pub use crate::model::builders::Pairing;

/// What a node computes. T rows; inputs in the order of [`super::Node::inputs`].
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// out[t] = table[token[t]]. Inputs: none. Out (T, D).
    Embed {
        /// (V, D)
        table: String,
    },
    /// A norm over groups of `width` columns, times a weight. Inputs: x (T, G·width).
    Norm(Norm),
    /// out[t, o] = Σ_i x[t, i]·w[o, i]. Inputs: x (T, I). Out (T, O).
    Linear {
        /// (O, I)
        weight: String,
        /// Leading columns of x and w that are summed; all where `None`.
        columns: Option<usize>,
    },
    /// out = x + times·bias. Inputs: x (T, O).
    Bias {
        /// (O,); a model without the bias copies its input.
        bias: Option<String>,
        /// How often it is added.
        times: u32,
    },
    /// Rotary position embedding of every head. Inputs: x (T, heads·E).
    Rope(Rope),
    /// q·k, unscaled and unmasked. Inputs: q (T, H·E), cached k (S, K·E). Out (T, H·S).
    Scores(Attention),
    /// Softmax of scaled, masked scores. Inputs: scores (T, H·S). Out (T, H·S).
    Softmax(Attention),
    /// Probabilities times values. Inputs: probs (T, H·S), cached v (S, K·E). Out (T, H·E).
    Context(Attention),
    /// Scores, softmax and context as one. Inputs: q (T, H·E), cached k and v (S, K·E). Out (T, H·E).
    Attention(Attention),
    /// out = Σ_i scale_i·x_i. Inputs: branch (T, D), residual (T, D).
    Add {
        /// Factors of the two: 1 and 1 of a plain sum.
        scale: [f64; 2],
    },
    /// out = act(gate)·up. Inputs: gate (T, F), up (T, F).
    Glu(Glu),
}

/// A norm: y = x / sqrt(mean(x²) + eps) · w.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// (width,)
    pub weight: String,
    /// Added to the mean square.
    pub eps: f64,
    /// Columns that share one mean: D, or E for per-head norms.
    pub width: usize,
    /// What it does besides.
    pub style: NormStyle,
}

/// What a norm does to a row and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormStyle {
    /// Whether the mean is subtracted first, as in LayerNorm.
    pub centred: bool,
    /// Added to the weight: 1 where a file holds w - 1.
    pub offset: f64,
    /// How often the weight is multiplied in.
    pub times: u32,
}

impl NormStyle {
    /// RMS norm (Zhang and Sennrich, arXiv 1910.07467): nothing is subtracted, and the weight is multiplied in once.
    pub const RMS: NormStyle = NormStyle { centred: false, offset: 0.0, times: 1 };
}

/// Rotary position embedding (Su et al., arXiv 2104.09864): pairs of columns turn by
/// `position · base^(-2i/dims) / freqs[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of angles.
    pub base: f64,
    /// Head width E: columns of one head.
    pub head_width: usize,
    /// Leading columns of a head that turn; the rest is copied.
    pub dims: usize,
    /// Which columns form a pair.
    pub pairing: Pairing,
    /// Divisors of the angles, (dims/2,): `rope_freqs.weight` of Llama 3.1 and later.
    pub freqs: Option<String>,
    /// Which position a row is turned by.
    pub position: BySteps<Position>,
    /// Direction: 1 or -1.
    pub sign: i32,
    /// How often it is applied.
    pub times: u32,
}

/// One thing in the first step of a sequence, and one in those after it: prefill and decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BySteps<T> {
    /// In a step that begins at position 0.
    pub first: T,
    /// In the others.
    pub later: T,
}

impl<T: Copy + PartialEq> BySteps<T> {
    /// The same in all steps.
    pub const fn all(same: T) -> BySteps<T> {
        BySteps { first: same, later: same }
    }

    /// What holds in a step that begins at position `start`.
    pub fn at(&self, start: u32) -> T {
        if start == 0 { self.first } else { self.later }
    }

    /// What holds in all steps; `None` where they differ.
    pub fn same(&self) -> Option<T> {
        (self.first == self.later).then_some(self.first)
    }
}

/// What positions are counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Position 0.
    Start,
    /// The first position of the row's step.
    Step,
    /// The row's own position.
    Row,
    /// One behind the last position of the row's step: everything that is cached.
    End,
}

/// The position that a row at position p is turned by: (p - from)·times + offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// What is subtracted.
    pub from: Anchor,
    /// A factor: numerator and denominator.
    pub times: (u32, u32),
    /// What is added.
    pub offset: i64,
}

impl Position {
    /// The row's own.
    pub const OWN: Position = Position { from: Anchor::Start, times: (1, 1), offset: 0 };
}

/// Grouped-query attention (Ainslie et al., arXiv 2305.13245) with a mask.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// E
    pub head_width: usize,
    /// Factor on the scores: 1/sqrt(E).
    pub scale: f64,
    /// Query heads beside one another that read the same key/value head, H/K: head h reads (h / group) % K.
    pub group: usize,
    /// Which positions a row sees.
    pub mask: BySteps<Mask>,
    /// Whether the scores pass a softmax.
    pub softmax: bool,
    /// What keeps scaled scores small.
    pub limit: ScoreLimit,
}

/// What keeps scaled scores small, before the mask.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ScoreLimit {
    /// Nothing.
    #[default]
    None,
    /// cap·tanh(z/cap)
    SoftCap(f64),
    /// Scores beyond ±limit are ±limit.
    Clamp(f64),
}

/// The positions s that a row sees: first <= s < behind, as far as they are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// The first one.
    pub first: Edge,
    /// One behind the last.
    pub behind: Edge,
}

/// A position: so many behind what it is counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// What it is counted from.
    pub from: Anchor,
    /// How many behind that.
    pub offset: i64,
}

impl Edge {
    /// `offset` positions behind `from`.
    pub const fn new(from: Anchor, offset: i64) -> Edge {
        Edge { from, offset }
    }
}

impl Mask {
    /// All positions up to the row's own.
    pub const CAUSAL: Mask = Mask { first: Edge::new(Anchor::Start, 0), behind: Edge::new(Anchor::Row, 1) };
}

/// Feed-forward activation: act(gate)·up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glu {
    /// The non-linearity.
    pub activation: Activation,
    /// Whether gate and up change places.
    pub swapped: bool,
    /// Whether there is a product at all, and not the activation alone.
    pub gated: bool,
}

impl Glu {
    /// silu(gate)·up (Shazeer, arXiv 2002.05202).
    pub const SWIGLU: Glu = Glu { activation: Activation::Silu, swapped: false, gated: true };
}

/// The non-linearity of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x)
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// The GELU of the error function.
    GeluErf,
}

impl Op {
    /// Whether input `index` is read at all cached positions and not only at the node's own rows.
    pub fn reads_cache(&self, index: usize) -> bool {
        match self {
            Op::Scores(_) | Op::Context(_) => index == 1,
            Op::Attention(_) => index == 1 || index == 2,
            _ => false,
        }
    }

    /// The weight that the op reads, if any.
    pub fn weight(&self) -> Option<&str> {
        match self {
            Op::Embed { table } => Some(table),
            Op::Norm(norm) => Some(&norm.weight),
            Op::Linear { weight, .. } => Some(weight),
            Op::Bias { bias, .. } => bias.as_deref(),
            Op::Rope(rope) => rope.freqs.as_deref(),
            _ => None,
        }
    }
}
