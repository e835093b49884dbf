//! The alphabet of the engines' nodes: every op with its parameters and the weights that it reads.

/// A weight by its GGUF name, and how its bytes are read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WeightRef {
    /// GGUF tensor name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// [`Reading::AsStored`] in a healthy model.
    pub reading: Reading,
}

impl WeightRef {
    /// The weight as it is stored.
    pub fn new(name: impl Into<String>) -> Self {
        WeightRef { name: name.into(), reading: Reading::AsStored }
    }
}

/// How the elements of a weight matrix (R, C) are found in its buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reading {
    /// w[r, c] = buffer[r·C + c].
    AsStored,
    /// w[r, c] = buffer[c·R + r]: the buffer taken for (C, R).
    Transposed,
    /// w[r, c] = buffer[(r + k)·C + c], rows counted round the end.
    RowShift(i64),
    /// The rows of every head of `width` rows in another order: halves (i, i + width/2) where the file has
    /// pairs (2i, 2i + 1), or the reverse.
    HeadRows {
        /// Rows of one head.
        width: usize,
        /// Whether pairs are taken for halves, or halves for pairs.
        pairs_for_halves: bool,
    },
    /// The memory was never filled: zeros.
    Unfilled,
    /// Its blocks are decoded wrongly.
    Misread(Misreading),
}

/// Mistakes in decoding the blocks of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Misreading {
    /// Low and high nibble of every byte exchanged.
    NibblesSwapped,
    /// Byte i taken for values 2i and 2i + 1.
    NibblesInSequence,
    /// Minimum (or the constant offset of the quants) left out.
    NoMinimum,
    /// The scale of the following block used.
    NeighbourScale,
    /// The two high bits of the packed 6-bit scales and minima left out.
    LowScaleBits,
    /// F16 bits taken for BF16, or the reverse.
    OtherHalf,
}

/// What a node computes. T rows; inputs in the order of [`super::Node::inputs`].
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// out[t] = table[token[t]]. Inputs: none. Out (T, D).
    Embed {
        /// (V, D)
        table: WeightRef,
    },
    /// RMS norm over groups of `width` columns, times a weight. Inputs: x (T, G·width).
    Norm(Norm),
    /// out[t, o] = Σ_i x[t, i]·w[o, i]. Inputs: x (T, I). Out (T, O).
    Linear {
        /// (O, I)
        weight: WeightRef,
        /// Leading columns of x and w that are summed; all where `None`.
        columns: Option<usize>,
    },
    /// out = x + times·bias. Inputs: x (T, O).
    Bias {
        /// (O,); a model without the bias copies its input.
        bias: Option<WeightRef>,
        /// How often it is added: 1 in a healthy model.
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
        /// (1, 1) in a healthy model.
        scale: [f64; 2],
    },
    /// out = activation(gate)·up. Inputs: gate (T, F), up (T, F).
    Glu(Glu),
}

/// RMS norm: y = x / sqrt(mean(x²) + eps) · w.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// (width,)
    pub weight: WeightRef,
    /// Added to the mean square.
    pub eps: f64,
    /// Columns that share one mean: D, or E for per-head norms.
    pub width: usize,
    /// [`NormStyle::Rms`] in a healthy model.
    pub style: NormStyle,
}

/// Variants of RMS norm that engines compute by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormStyle {
    /// The one the model was trained with.
    Rms,
    /// The weight is left out.
    NoWeight,
    /// The weight is multiplied in twice.
    WeightTwice,
    /// Mean subtracted first, as in LayerNorm.
    LayerNorm,
    /// 1 + w for w, as in Gemma checkpoints.
    UnitOffset,
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
    pub freqs: Option<WeightRef>,
    /// Which position a row is turned by.
    pub position: RopePosition,
    /// Direction: 1, or -1 by mistake.
    pub sign: i32,
    /// How often it is applied: 1 in a healthy model.
    pub times: u32,
}

/// Which columns of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// i and i + dims/2 (NeoX, Qwen2, Hugging Face).
    Half,
    /// 2i and 2i + 1 (GPT-J, the `llama` architecture in GGUF).
    Interleaved,
}

/// The position that a row is turned by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePosition {
    /// Its own.
    Own,
    /// Its own plus a constant.
    Shift(i64),
    /// Always 0.
    Zero,
    /// Counted from the start of the step it is computed in: right in a first prefill, wrong in decode.
    InStep,
    /// Its own plus a constant in every step after the first.
    ShiftInDecode(i64),
    /// Its own times numerator/denominator.
    Scaled(u32, u32),
}

/// Grouped-query attention with a causal mask.
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
    /// Which key/value head a query head reads.
    pub kv_map: KvMap,
    /// Which positions a row sees.
    pub mask: Mask,
    /// Whether the scores pass a softmax: true in a healthy model.
    pub softmax: bool,
    /// What keeps scaled scores small: [`ScoreLimit::None`] in a healthy model.
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

/// Which key/value head query head h reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMap {
    /// h / (H/K)
    Group,
    /// h % K, by mistake.
    Modulo,
}

/// Which positions s the row at position p sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// s <= p
    Causal,
    /// All s of the cache as it is when the step is computed.
    None,
    /// s <= p + shift
    Shift(i64),
    /// first position of the step <= s <= p: the cache is not read.
    StepOnly,
    /// p - width < s <= p: a sliding window.
    Window(u32),
    /// s <= p in the first step, s < first position of the step after it: what the step writes is not read.
    BeforeStep,
}

/// Gated feed-forward activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glu {
    /// [`Activation::Silu`] in a healthy model.
    pub activation: Activation,
    /// [`GluForm::GateTimesUp`] in a healthy model.
    pub form: GluForm,
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

/// How gate and up are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GluForm {
    /// act(gate)·up
    GateTimesUp,
    /// gate·act(up), by mistake.
    ActOnUp,
    /// act(gate), by mistake.
    NoUp,
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
    pub fn weight(&self) -> Option<&WeightRef> {
        match self {
            Op::Embed { table } => Some(table),
            Op::Norm(norm) => Some(&norm.weight),
            Op::Linear { weight, .. } => Some(weight),
            Op::Bias { bias, .. } => bias.as_ref(),
            Op::Rope(rope) => rope.freqs.as_ref(),
            _ => None,
        }
    }

    /// The weight that the op reads, if any, to change it.
    pub fn weight_mut(&mut self) -> Option<&mut WeightRef> {
        match self {
            Op::Embed { table } => Some(table),
            Op::Norm(norm) => Some(&mut norm.weight),
            Op::Linear { weight, .. } => Some(weight),
            Op::Bias { bias, .. } => bias.as_mut(),
            Op::Rope(rope) => rope.freqs.as_mut(),
            _ => None,
        }
    }
}
