//! Mistakes in decoding the blocks of a weight.

use super::site::made;
use super::{Entry, Made, Site, plain, when};
use crate::op::Op;
use crate::rewrite::{Change, Misreading};

const READERS: &[Op] = &[Op::MulMat, Op::MulMatId, Op::GetRows];

/// Blocks with nibbles.
const NIBBLES: &[&str] = &["q4_0", "q4_1", "q5_0", "q5_1", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"];
/// Blocks with a minimum, or with quants that are counted from below.
const MINIMA: &[&str] = &["q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q4_K", "q5_K"];
/// Blocks with a scale.
const SCALED: &[&str] =
    &["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"];
/// Blocks with 6-bit scales, packed.
const PACKED: &[&str] = &["q4_K", "q5_K"];
/// 16-bit types.
const HALVES: &[&str] = &["f16", "bf16"];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "quant.nibble_order",
        READERS,
        [
            "low and high nibble of every byte change places",
            "a decoder that takes the high nibble first",
            "the low nibbles are the first half of a block, the high nibbles the second",
        ],
        |site, _| misread(site, NIBBLES, Misreading::NibblesSwapped, "high and low nibbles exchanged"),
    ),
    plain(
        "quant.nibble_sequence",
        READERS,
        [
            "byte i is taken for values 2i and 2i + 1",
            "a decoder that reads a block's bytes in a row",
            "byte i of a block of 2n values holds value i and value i + n",
        ],
        |site, _| {
            misread(
                site,
                NIBBLES,
                Misreading::NibblesInSequence,
                "byte i taken for values 2i and 2i + 1 of its block",
            )
        },
    ),
    plain(
        "quant.no_minimum",
        READERS,
        [
            "the block's minimum (or the offset of its quants) is left out",
            "a decoder copied from a type that has none",
            "Q4_1, Q5_1: add m; Q2_K, Q4_K, Q5_K: subtract dmin·min; Q4_0, Q5_0: subtract 8 or 16 first",
        ],
        |site, _| misread(site, MINIMA, Misreading::NoMinimum, "the minimum of its blocks left out"),
    ),
    plain(
        "quant.neighbour_scale",
        READERS,
        [
            "every block is decoded with the scale of the block after it",
            "a kernel that advances its scale pointer one block too far",
            "read scale and quants from the same block",
        ],
        |site, _| misread(site, SCALED, Misreading::NeighbourScale, "the scale of the following block"),
    ),
    plain(
        "quant.scale_bits",
        READERS,
        [
            "the two high bits of the packed 6-bit scales are left out",
            "get_scale_min_k4 written for the first four groups only",
            "groups 4 to 7 take their high bits from bytes 0 to 7 of the packed scales",
        ],
        |site, _| {
            misread(site, PACKED, Misreading::LowScaleBits, "the high bits of its 6-bit scales left out")
        },
    ),
    plain(
        "quant.half_type",
        READERS,
        [
            "F16 bits are read as BF16, or the reverse",
            "a loader that knows one 16-bit type",
            "read the tensor's type from the file",
        ],
        |site, _| misread(site, HALVES, Misreading::OtherHalf, "its bits read as the other 16-bit type"),
    ),
];

fn misread(site: Site<'_>, types: &[&str], how: Misreading, text: &str) -> Made {
    let (slot, weight) = site.weight().filter(|(slot, _)| *slot == 0)?;
    let tensor = site.graph.get(weight);
    when(site.graph.src(site.id, 0) == Some(weight))?;
    when(types.iter().any(|name| name.eq_ignore_ascii_case(&tensor.dtype)))?;
    let text = format!("{} ({}) is decoded with {text}", tensor.name, tensor.dtype.to_uppercase());
    made(Change::Misread { slot, how }, text)
}
