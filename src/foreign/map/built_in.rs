//! The maps that come with parity, and which of them a dump fits.

use super::Map;
use super::expression::Widths;
use crate::error::Result;

/// By name, in the order in which they are tried.
const FILES: [(&str, &str); 6] = [
    ("hf", include_str!("../maps/hf.toml")),
    ("hf-gemma", include_str!("../maps/hf-gemma.toml")),
    ("vllm", include_str!("../maps/vllm.toml")),
    ("sglang", include_str!("../maps/sglang.toml")),
    ("candle", include_str!("../maps/candle.toml")),
    ("llama.cpp", include_str!("../maps/llama.cpp.toml")),
];

/// Their names.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

/// The map of a name, if there is one.
///
/// # Errors
/// None of a map that was tested.
pub fn named(name: &str) -> Option<Result<Map>> {
    FILES.iter().find(|(known, _)| *known == name).map(|(name, text)| Map::parse(text, name, true))
}

/// Names that a map must understand to be taken for the one that is meant.
const UNDERSTOOD_MIN: usize = 2;

/// The map that understands the most of these names; the first of those that understand as many.
///
/// # Errors
/// None of maps that were tested.
///
/// Where a dump `has_ids` of layers already, its other names may be of its own graph, which has nodes called `norm` and
/// `blk.0.attn_output` too: a map must know most of them, and names of layers among them.
pub fn fitting<'a>(
    tensors: impl Iterator<Item = &'a str> + Clone,
    has_ids: bool,
    widths: &Widths,
) -> Result<Option<Map>> {
    let mut best: Option<(usize, Map)> = None;
    for (name, text) in FILES {
        let map = Map::parse(text, name, true)?;
        let found = || tensors.clone().filter_map(|tensor| map.find(tensor, widths));
        let understood = found().count();
        let of_layers = || found().any(|(line, _)| line.pattern.letters().any(|letter| letter == 'n'));
        let knows_most = || 2 * understood > tensors.clone().count();
        if understood >= UNDERSTOOD_MIN
            && (!has_ids || of_layers() && knows_most())
            && best.as_ref().is_none_or(|(most, _)| understood > *most)
        {
            best = Some((understood, map));
        }
    }
    Ok(best.map(|(_, map)| map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maps_can_be_read_and_are_found_by_their_names() {
        assert!(names().all(|name| named(name).unwrap().is_ok()));
        assert!(named("other").is_none());
        let fits = |tensors: &[&str]| {
            fitting(tensors.iter().copied(), false, &Widths::default()).unwrap().map(|map| map.origin)
        };
        let layer = ["layers.0.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.0.input_layernorm"];
        assert_eq!(fits(&layer).as_deref(), Some("hf"));
        let own = [
            "model.layers.0.self_attn.qkv_proj",
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.act_fn",
        ];
        assert_eq!(fits(&own).as_deref(), Some("vllm"));
        assert_eq!(fits(&["blk.0.attn_q", "blk.0.attn_output", "output_norm"]).as_deref(), Some("candle"));
        assert_eq!(fits(&["ffn_inp-0", "l_out-0", "kqv_out-0"]).as_deref(), Some("llama.cpp"));
        assert_eq!(fits(&["a", "b", "blk.0.q"]), None);
        let own = |tensors: &[&str]| fitting(tensors.iter().copied(), true, &Widths::default()).unwrap();
        assert!(own(&["norm", "norm.0", "embed_tokens"]).is_none() && own(&layer).is_some());
        let of_graph =
            ["blk.0.attn_output", "blk.1.attn_output", "norm", "blk.0.z", "blk.0.gate", "blk.0.silu"];
        assert!(own(&of_graph).is_none() && own(&["blk.0.attn_q", "blk.0.attn_output", "norm"]).is_some());
    }
}
