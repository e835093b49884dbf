//! What a producer says about its arithmetic: the ground on which rounding is told from a bug.
//!
//! Written into a dump's manifest as words, e.g. `f32` or `llama-cpu kv=f16 flash=on`.

use std::fmt;
use std::str::FromStr;

use crate::checkpoint::Kind;
use crate::scalar::{Scalar, bf16, each, half};

/// How the matrix products of a dump were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Products {
    /// Decoded weights, f32 activations, f32 accumulation.
    #[default]
    F32,
    /// f16 operands, f32 accumulation.
    F16,
    /// bf16 operands, f32 accumulation.
    Bf16,
    /// llama.cpp on the CPU: activations rounded to the weight type's `vec_dot_type`.
    LlamaCpu,
    /// llama.cpp on CUDA: activations rounded to Q8_1 for quantised weights.
    LlamaCuda,
    /// llama.cpp on Vulkan: operands rounded to f16, sums in f16, in passes of many rows.
    LlamaVulkan,
    /// f64 throughout.
    F64,
}

/// The type that values are stored in between nodes, or in the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Storage {
    /// f32
    #[default]
    F32,
    /// f16
    F16,
    /// bf16
    Bf16,
}

/// Keys and values in eight bits, at scales of an engine's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EightBits {
    /// Numbers with an exponent: e4m3 or e5m2.
    Fp8,
    /// Whole numbers.
    Int8,
}

impl Storage {
    /// The nearest number of this type.
    pub fn nearest(self, value: f32) -> f32 {
        match self {
            Storage::F32 => value,
            Storage::F16 => half(f64::from(value)) as f32,
            Storage::Bf16 => bf16(value),
        }
    }

    /// Rounds values to it in place.
    pub fn store<S: Scalar>(self, values: &mut [S]) {
        match self {
            Storage::F32 => {}
            Storage::F16 => each(values, |value| half(f64::from(value as f32))),
            Storage::Bf16 => each(values, |value| f64::from(bf16(value as f32))),
        }
    }

    /// Whether a value is a number of this type; infinities and what is no number are of every type.
    pub fn holds(self, value: f32) -> bool {
        !value.is_finite() || self.nearest(value) == value
    }
}

/// The arithmetic of one producer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Matrix products.
    pub products: Products,
    /// Values between nodes.
    pub storage: Storage,
    /// Keys and values in the cache.
    pub kv: Storage,
    /// The same where they are kept in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Whether attention is computed online, tile by tile (llama.cpp: `FLASH_ATTN_EXT`).
    pub flash: bool,
}

impl Numerics {
    /// What a checkpoint is stored as: logits and attention matrices in f32 in any case.
    pub fn storage_of(&self, kind: Kind) -> Storage {
        if kind.is_optional() || kind == Kind::Logits { Storage::F32 } else { self.storage }
    }
}

const PRODUCTS: [(Products, &str); 7] = [
    (Products::F32, "f32"),
    (Products::F16, "f16"),
    (Products::Bf16, "bf16"),
    (Products::LlamaCpu, "llama-cpu"),
    (Products::LlamaCuda, "llama-cuda"),
    (Products::LlamaVulkan, "llama-vulkan"),
    (Products::F64, "f64"),
];
const STORAGE: [(Storage, &str); 3] = [(Storage::F32, "f32"), (Storage::F16, "f16"), (Storage::Bf16, "bf16")];

const EIGHT_BITS: [(EightBits, &str); 2] = [(EightBits::Fp8, "fp8"), (EightBits::Int8, "int8")];

fn spelling<T: PartialEq>(table: &[(T, &'static str)], value: &T) -> &'static str {
    table.iter().find(|(v, _)| v == value).map_or("?", |(_, name)| name)
}

fn parsed<T: Copy>(table: &[(T, &'static str)], word: &str) -> Option<T> {
    table.iter().find(|(_, name)| *name == word).map(|(value, _)| *value)
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(spelling(&PRODUCTS, &self.products))?;
        for (key, storage) in [("storage", self.storage), ("kv", self.kv)] {
            if storage != Storage::F32 {
                write!(f, " {key}={}", spelling(&STORAGE, &storage))?;
            }
        }
        if let Some(bits) = self.eight_bits {
            write!(f, " kv={}", spelling(&EIGHT_BITS, &bits))?;
        }
        if self.flash { f.write_str(" flash=on") } else { Ok(()) }
    }
}

impl FromStr for Numerics {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let products = words.next().unwrap_or_default();
        let mut numerics = Numerics {
            products: parsed(&PRODUCTS, products).ok_or_else(|| {
                format!("`{products}` is no arithmetic that parity knows: f32, f64, f16, bf16, llama-cpu, llama-cuda, llama-vulkan")
            })?,
            ..Numerics::default()
        };
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let storage =
                || parsed(&STORAGE, value).ok_or_else(|| format!("`{word}`: the type is f32, f16 or bf16"));
            match (key, value) {
                ("storage", _) => numerics.storage = storage()?,
                ("kv", "fp8" | "int8") => numerics.eight_bits = parsed(&EIGHT_BITS, value),
                ("kv", _) => {
                    let types = |text| format!("{text}; a cache may be fp8 or int8 too");
                    numerics.kv = storage().map_err(types)?;
                }
                ("flash", "on") => numerics.flash = true,
                ("flash", "off") => numerics.flash = false,
                _ => return Err(format!("`{word}` is none of storage=TYPE, kv=TYPE, flash=on")),
            }
        }
        Ok(numerics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_round_trips() {
        for text in [
            "f32",
            "f64",
            "f32 kv=int8",
            "bf16 storage=bf16 kv=fp8",
            "bf16 storage=bf16 kv=bf16",
            "llama-cpu kv=f16 flash=on",
            "llama-vulkan kv=f16",
        ] {
            assert_eq!(text.parse::<Numerics>().unwrap().to_string(), text);
        }
        assert!("f33".parse::<Numerics>().is_err());
        assert!("f32 kv=q9".parse::<Numerics>().is_err());
    }
}
