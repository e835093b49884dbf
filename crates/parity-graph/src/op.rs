//! What a tensor is computed by, in the words of `ggml_op_desc`: unary and gated functions have names of their own.

use std::fmt;

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// The op of a tensor. Numbers of ggml's own enumeration move from release to release: names do not.
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Op {
            $($(#[$doc])* $variant,)*
            /// Any other, by ggml's description.
            Other(String),
        }

        /// Every known op with ggml's description.
        const OPS: &[(Op, &str)] = &[$((Op::$variant, $name),)*];
    };
}

ops! {
    /// A leaf: a weight, an input, a cache.
    None = "NONE",
    /// The same bytes seen with other extents.
    Reshape = "RESHAPE",
    /// A window into another tensor.
    View = "VIEW",
    /// Axes in another order.
    Permute = "PERMUTE",
    /// Two axes exchanged.
    Transpose = "TRANSPOSE",
    /// A contiguous copy.
    Cont = "CONT",
    /// A copy into given memory, perhaps of another type.
    Cpy = "CPY",
    /// A copy.
    Dup = "DUP",
    /// Two tensors one behind the other.
    Concat = "CONCAT",
    /// A tensor tiled.
    Repeat = "REPEAT",
    /// Rows picked by index.
    GetRows = "GET_ROWS",
    /// Rows written by index; the result is the whole destination.
    SetRows = "SET_ROWS",
    /// One value everywhere.
    Fill = "FILL",
    /// An arithmetic sequence.
    Arange = "ARANGE",
    /// Sum.
    Add = "ADD",
    /// Sum with rows picked by index.
    AddId = "ADD_ID",
    /// Difference.
    Sub = "SUB",
    /// Product of elements.
    Mul = "MUL",
    /// Quotient.
    Div = "DIV",
    /// Factor and offset.
    Scale = "SCALE",
    /// Limits from below and above.
    Clamp = "CLAMP",
    /// Square.
    Sqr = "SQR",
    /// Square root.
    Sqrt = "SQRT",
    /// Absolute value.
    Abs = "ABS",
    /// Sign.
    Sgn = "SGN",
    /// Hyperbolic tangent.
    Tanh = "TANH",
    /// max(x, 0)
    Relu = "RELU",
    /// 1/(1 + e^-x)
    Sigmoid = "SIGMOID",
    /// The tanh form of GELU.
    Gelu = "GELU",
    /// GELU with the error function.
    GeluErf = "GELU_ERF",
    /// x/(1 + e^-x)
    Silu = "SILU",
    /// e^x
    Exp = "EXP",
    /// log(1 + e^x)
    Softplus = "SOFTPLUS",
    /// relu(gate)·up
    Reglu = "REGLU",
    /// gelu(gate)·up
    Geglu = "GEGLU",
    /// gelu(gate)·up, with the error function.
    GegluErf = "GEGLU_ERF",
    /// silu(gate)·up
    Swiglu = "SWIGLU",
    /// gpt-oss' clamped variant, up + 1.
    SwigluOai = "SWIGLU_OAI",
    /// silu(gate)·up of limited gate and up.
    SwigluClamp = "SWIGLU_CLAMP",
    /// Sum over the fastest axis.
    SumRows = "SUM_ROWS",
    /// Layer norm without weight and bias.
    Norm = "NORM",
    /// RMS norm without weight.
    RmsNorm = "RMS_NORM",
    /// Each row divided by its length.
    L2Norm = "L2_NORM",
    /// Softmax with scale, mask and sinks.
    SoftMax = "SOFT_MAX",
    /// Indices in the order of the values.
    Argsort = "ARGSORT",
    /// Indices of the largest values.
    TopK = "TOP_K",
    /// Maximum or mean of windows.
    Pool2d = "POOL_2D",
    /// Windows as rows.
    Im2col = "IM2COL",
    /// Matrix product.
    MulMat = "MUL_MAT",
    /// Matrix product with weights picked by index: mixtures of experts.
    MulMatId = "MUL_MAT_ID",
    /// Rotary position embedding.
    Rope = "ROPE",
    /// Rotary position embedding backwards.
    RopeBack = "ROPE_BACK",
    /// Attention tile by tile.
    FlashAttn = "FLASH_ATTN_EXT",
    /// Short convolution along the tokens.
    SsmConv = "SSM_CONV",
    /// Selective scan of Mamba.
    SsmScan = "SSM_SCAN",
    /// Gated delta rule.
    GatedDeltaNet = "GATED_DELTA_NET",
    /// Scores of DeepSeek's sparse attention.
    LightningIndexer = "LIGHTNING_INDEXER",
    /// Doubly stochastic mixing weights of hyper-connections.
    Dsv4HcComb = "DSV4_HC_COMB",
    /// Streams of hyper-connections into a layer's input.
    Dsv4HcPre = "DSV4_HC_PRE",
    /// A layer's output into the streams of hyper-connections.
    Dsv4HcPost = "DSV4_HC_POST",
}

impl Op {
    /// The op that ggml describes so.
    pub fn parse(description: &str) -> Op {
        let known = OPS.iter().find(|(_, name)| *name == description);
        known.map_or_else(|| Op::Other(description.to_owned()), |(op, _)| op.clone())
    }

    /// ggml's description.
    pub fn name(&self) -> &str {
        match self {
            Op::Other(description) => description,
            known => OPS.iter().find(|(op, _)| op == known).map_or("", |(_, name)| name),
        }
    }

    /// Every op that has a name here.
    pub fn all() -> impl Iterator<Item = &'static Op> {
        OPS.iter().map(|(op, _)| op)
    }

    /// Whether nothing is computed: the bytes are another tensor's.
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape | Op::View | Op::Permute | Op::Transpose)
    }

    /// Whether all values are moved to a memory of their own or a given one, in logical order.
    pub fn is_copy(&self) -> bool {
        matches!(self, Op::Cont | Op::Cpy | Op::Dup)
    }

    /// Whether values are only moved, converted or constant: such a tensor has no checkpoint, it is computed where
    /// it is needed. Rows that are picked from a weight are no movement: they are decoded.
    pub fn is_movement(&self) -> bool {
        self.is_view()
            || self.is_copy()
            || matches!(
                self,
                Op::None | Op::Concat | Op::Repeat | Op::GetRows | Op::SetRows | Op::Fill | Op::Arange
            )
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_again() {
        for op in Op::all() {
            assert_eq!(Op::parse(op.name()), *op);
        }
        assert_eq!(Op::parse("RWKV_WKV7").name(), "RWKV_WKV7");
    }
}
