//! The 64 bytes of `op_params`: sixteen words, each an i32 or the bits of an f32, by the op.
//!
//! This is the one table of what the words mean (ggml.c's constructors, ggml 0.25.3; the words of an op have not
//! moved since 2024 but for additions at the end).

use crate::op::Op;

/// Words of `op_params`.
pub const WORDS: usize = 16;

/// The parameters of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Params(pub [u32; WORDS]);

/// What a word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// i32
    Int,
    /// The bits of an f32.
    Float,
}

/// One word with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Which word.
    pub word: usize,
    /// As it is written in a graph's text.
    pub name: &'static str,
    /// How it is read.
    pub kind: Kind,
}

const fn int(word: usize, name: &'static str) -> Field {
    Field { word, name, kind: Kind::Int }
}

const fn float(word: usize, name: &'static str) -> Field {
    Field { word, name, kind: Kind::Float }
}

const EPS: &[Field] = &[float(0, "eps")];
const PERMUTE: &[Field] = &[int(0, "axis0"), int(1, "axis1"), int(2, "axis2"), int(3, "axis3")];
const GLU: &[Field] = &[int(0, "glu"), int(1, "swapped"), float(2, "alpha"), float(3, "limit")];
const UNARY: &[Field] = &[int(0, "unary")];
const ROPE: &[Field] = &[
    int(1, "n_dims"),
    int(2, "mode"),
    int(4, "n_ctx_orig"),
    float(5, "freq_base"),
    float(6, "freq_scale"),
    float(7, "ext_factor"),
    float(8, "attn_factor"),
    float(9, "beta_fast"),
    float(10, "beta_slow"),
    int(11, "section0"),
    int(12, "section1"),
    int(13, "section2"),
    int(14, "section3"),
    int(15, "offset"),
];

/// ggml's word for a product by a Hadamard matrix, the `hint` of MUL_MAT.
pub const HINT_HADAMARD: i32 = 1;

/// The named words of an op, in order.
pub fn fields(op: &Op) -> &'static [Field] {
    match op {
        Op::Norm | Op::RmsNorm | Op::L2Norm => EPS,
        Op::Scale => const { &[float(0, "scale"), float(1, "bias")] },
        Op::Clamp => const { &[float(0, "min"), float(1, "max")] },
        Op::Abs
        | Op::Sgn
        | Op::Tanh
        | Op::Relu
        | Op::Sigmoid
        | Op::Gelu
        | Op::GeluErf
        | Op::Silu
        | Op::Exp
        | Op::Softplus => UNARY,
        Op::Reglu | Op::Geglu | Op::GegluErf | Op::Swiglu | Op::SwigluOai | Op::SwigluClamp => GLU,
        Op::View => const { &[int(0, "bytes"), int(1, "bytes_high")] },
        Op::Permute => PERMUTE,
        Op::Concat => const { &[int(0, "dim")] },
        Op::Fill => const { &[float(0, "value")] },
        Op::Arange => const { &[float(0, "start"), float(1, "stop"), float(2, "step")] },
        Op::SoftMax => const { &[float(0, "scale"), float(1, "max_bias")] },
        Op::Argsort => const { &[int(0, "descending")] },
        Op::Pool2d => {
            const {
                &[
                    int(0, "pool"),
                    int(1, "k0"),
                    int(2, "k1"),
                    int(3, "s0"),
                    int(4, "s1"),
                    int(5, "p0"),
                    int(6, "p1"),
                ]
            }
        }
        Op::Im2col => {
            const {
                &[
                    int(0, "s0"),
                    int(1, "s1"),
                    int(2, "p0"),
                    int(3, "p1"),
                    int(4, "d0"),
                    int(5, "d1"),
                    int(6, "planes"),
                ]
            }
        }
        Op::MulMat | Op::MulMatId => const { &[int(0, "prec"), int(1, "hint"), int(3, "prec_src1")] },
        Op::Rope | Op::RopeBack => ROPE,
        Op::FlashAttn => {
            const {
                &[
                    float(0, "scale"),
                    float(1, "max_bias"),
                    float(2, "softcap"),
                    int(3, "prec"),
                    int(4, "n_kv_max"),
                ]
            }
        }
        Op::SsmScan | Op::GatedDeltaNet => const { &[int(0, "snapshots")] },
        Op::Dsv4HcComb => const { &[float(0, "eps"), int(1, "n_iter")] },
        Op::Dsv4HcPre => const { &[float(0, "scale"), int(1, "gated")] },
        _ => const { &[] },
    }
}

impl Params {
    /// Word `word` as an i32.
    pub fn int(&self, word: usize) -> i32 {
        self.0[word] as i32
    }

    /// Word `word` as an f32.
    pub fn float(&self, word: usize) -> f32 {
        f32::from_bits(self.0[word])
    }

    /// Sets word `word` to an i32.
    pub fn set_int(&mut self, word: usize, value: i32) {
        self.0[word] = value as u32;
    }

    /// Sets word `word` to an f32.
    pub fn set_float(&mut self, word: usize, value: f32) {
        self.0[word] = value.to_bits();
    }
}

/// The word of an op with this name.
pub fn field(op: &Op, name: &str) -> Option<Field> {
    fields(op).iter().find(|field| field.name == name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_one_name() {
        for op in Op::all() {
            for (i, field) in fields(op).iter().enumerate() {
                assert!(field.word < WORDS);
                for other in &fields(op)[i + 1..] {
                    assert!(other.word != field.word && other.name != field.name, "{op}: {}", field.name);
                }
            }
        }
    }
}
