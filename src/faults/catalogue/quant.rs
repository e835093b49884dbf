//! Mistakes in decoding the blocks of a weight.

use super::{Fault, Home, PLAIN, Site, weight_name, when};
use crate::checkpoint::Kind;
use crate::model::edit::{Misreading, Reading};
use crate::model::graph::Node;
use crate::model::misread;

const HOME: Home = Home::First(&[
    Kind::FfnGate,
    Kind::FfnUp,
    Kind::QProj,
    Kind::KProj,
    Kind::AttnOut,
    Kind::FfnOut,
    Kind::VProj,
    Kind::Embed,
    Kind::Logits,
]);

fn misread(site: &Site<'_>, node: &mut Node, misreading: Misreading) -> Option<()> {
    let weight = node.op.weight_mut()?;
    let dtype = site.model.gguf.tensor(&weight.name)?.info.dtype;
    when(misread::applies(misreading, dtype))?;
    weight.reading = Reading::Misread(misreading);
    Some(())
}

fn stored_as(site: &Site<'_>, node: &Node) -> String {
    let name = weight_name(node);
    let dtype = site.model.gguf.tensor(name).map_or("?", |tensor| tensor.info.dtype.name());
    format!("{name} ({dtype})")
}

/// Faults of every node with a quantised (or 16-bit) weight.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "quant.nibble_order",
        summary: "low and high nibble of every byte change places",
        place: "a decoder that takes the high nibble first",
        fix: "the low nibbles are the first half of a block, the high nibbles the second",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::NibblesSwapped),
        sentence: |site, node, _| {
            format!("{} is decoded with high and low nibbles exchanged", stored_as(site, node))
        },
        ..PLAIN
    },
    Fault {
        name: "quant.nibble_sequence",
        summary: "byte i is taken for values 2i and 2i + 1",
        place: "a decoder that reads a block's bytes in a row",
        fix: "byte i of a block of 2n values holds value i and value i + n",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::NibblesInSequence),
        sentence: |site, node, _| {
            format!(
                "{} is decoded as if byte i held values 2i and 2i + 1 of its block",
                stored_as(site, node)
            )
        },
        ..PLAIN
    },
    Fault {
        name: "quant.no_minimum",
        summary: "the block's minimum (or the offset of its quants) is left out",
        place: "a decoder copied from a type that has none",
        fix: "Q4_1, Q5_1: add m; Q2_K, Q4_K, Q5_K: subtract dmin·min; Q4_0, Q5_0: subtract 8 or 16 first",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::NoMinimum),
        sentence: |site, node, _| {
            format!("{} is decoded without the minimum of its blocks", stored_as(site, node))
        },
        ..PLAIN
    },
    Fault {
        name: "quant.neighbour_scale",
        summary: "every block is decoded with the scale of the block after it",
        place: "a kernel that advances its scale pointer one block too far",
        fix: "read scale and quants from the same block",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::NeighbourScale),
        sentence: |site, node, _| {
            format!("{} is decoded with the scale of the following block", stored_as(site, node))
        },
        ..PLAIN
    },
    Fault {
        name: "quant.scale_bits",
        summary: "the two high bits of the packed 6-bit scales are left out",
        place: "get_scale_min_k4 written for the first four groups only",
        fix: "groups 4 to 7 take their high bits from bytes 0 to 7 of the packed scales",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::LowScaleBits),
        sentence: |site, node, _| {
            format!("{} is decoded without the high bits of its 6-bit scales", stored_as(site, node))
        },
        ..PLAIN
    },
    Fault {
        name: "quant.half_type",
        summary: "F16 bits are read as BF16, or the reverse",
        place: "a loader that knows one 16-bit type",
        fix: "read the tensor's type from the file",
        home: HOME,
        change: |site, node, _| misread(site, node, Misreading::OtherHalf),
        sentence: |site, node, _| {
            format!("the bits of {} are read as the other 16-bit type", stored_as(site, node))
        },
        ..PLAIN
    },
];
