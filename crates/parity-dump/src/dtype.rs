//! The three element types of a dump, and their conversion to f32.

use half::{bf16, f16};
use safetensors::Dtype;

/// Element type of a tensor in a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl Element {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }

    /// The name that the safetensors format has for it.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "F32",
            Element::F16 => "F16",
            Element::Bf16 => "BF16",
        }
    }

    /// The element type of a safetensors tensor, where a dump may have it.
    pub(crate) fn from_safetensors(dtype: Dtype) -> Option<Element> {
        match dtype {
            Dtype::F32 => Some(Element::F32),
            Dtype::F16 => Some(Element::F16),
            Dtype::BF16 => Some(Element::Bf16),
            _ => None,
        }
    }

    /// Converts little-endian `bytes` to f32, exactly.
    ///
    /// # Panics
    /// If `bytes` does not hold `out.len()` elements (a mistake in the caller, not in data).
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.size());
        match self {
            Element::F32 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Element::F16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Element::Bf16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
    }
}
