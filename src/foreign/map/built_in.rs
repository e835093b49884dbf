//! The maps that come with parity, and which of them a dump fits.

use super::Map;
use super::expression::Widths;
use crate::error::Result;

/// A map that comes with parity.
struct File {
    name: &'static str,
    /// Lines of the first count before those of the next.
    texts: &'static [&'static str],
    /// GGUF architectures of models that it is written for; none of a map for any.
    architectures: &'static [&'static str],
}

const fn file(name: &'static str, texts: &'static [&'static str]) -> File {
    File { name, texts, architectures: &[] }
}

/// In the order in which they are tried.
const FILES: [File; 6] = [
    file("hf", &[include_str!("../maps/hf.toml")]),
    File {
        name: "hf-gemma",
        texts: &[include_str!("../maps/hf-gemma.toml"), include_str!("../maps/hf.toml")],
        architectures: &["gemma2", "gemma3", "gemma3n"],
    },
    file("vllm", &[include_str!("../maps/vllm.toml")]),
    file("sglang", &[include_str!("../maps/sglang.toml")]),
    file("candle", &[include_str!("../maps/candle.toml")]),
    file("llama.cpp", &[include_str!("../maps/llama.cpp.toml")]),
];

impl File {
    /// Its lines, numbered as if its texts were one.
    fn map(&self) -> Result<Map> {
        let mut whole: Option<(Map, usize)> = None;
        for text in self.texts {
            let mut map = Map::parse(text, self.name, true)?;
            let before = whole.as_ref().map_or(0, |(_, lines)| *lines);
            map.lines.iter_mut().for_each(|line| line.number += before);
            let lines = before + text.lines().count();
            whole = Some(match whole {
                Some((mut first, _)) => {
                    first.lines.append(&mut map.lines);
                    (first, lines)
                }
                None => (map, lines),
            });
        }
        Ok(whole.map_or_else(Map::none, |(map, _)| map))
    }
}

/// Their names.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.name)
}

/// The map of a name, if there is one.
///
/// # Errors
/// None of a map that was tested.
pub fn named(name: &str) -> Option<Result<Map>> {
    FILES.iter().find(|file| file.name == name).map(File::map)
}

/// Names that a map must understand to be taken for the one that is meant.
const UNDERSTOOD_MIN: usize = 2;

/// The map that understands the most of these names; of those that understand as many, one for the model's `architecture`, else
/// the first.
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
    architecture: Option<&str>,
) -> Result<Option<Map>> {
    let mut best: Option<((usize, bool), Map)> = None;
    for file in &FILES {
        let map = file.map()?;
        let found = || tensors.clone().filter_map(|tensor| map.find(tensor, widths));
        let understood = found().count();
        let of_layers = || found().any(|(line, _)| line.pattern.letters().any(|letter| letter == 'n'));
        let knows_most = || 2 * understood > tensors.clone().count();
        let is_own = architecture.is_some_and(|own| file.architectures.contains(&own));
        if understood >= UNDERSTOOD_MIN
            && (!has_ids || of_layers() && knows_most())
            && best.as_ref().is_none_or(|(most, _)| (understood, is_own) > *most)
        {
            best = Some(((understood, is_own), map));
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
        let of = |tensors: &[&str], architecture: &str| {
            let map = fitting(tensors.iter().copied(), false, &Widths::default(), Some(architecture));
            map.unwrap().map(|map| map.origin)
        };
        let fits = |tensors: &[&str]| of(tensors, "qwen2");
        let layer = ["layers.0.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.0.input_layernorm"];
        assert_eq!(fits(&layer).as_deref(), Some("hf"));
        // Names that all have in common say less than the model does.
        assert_eq!(of(&layer, "gemma3").as_deref(), Some("hf-gemma"));
        let gemma = named("hf-gemma").unwrap().unwrap();
        for (name, id) in [("post_attention_layernorm", "attn_post_norm"), ("self_attn", "attn_out")] {
            let name = format!("model.layers.0.{name}");
            let (line, numbers) = gemma.find(&name, &Widths::default()).unwrap();
            assert_eq!(line.targets[0].id.fill(&numbers), Some(format!("blk.0.{id}")));
        }
        let own = [
            "model.layers.0.self_attn.qkv_proj",
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.act_fn",
        ];
        assert_eq!(fits(&own).as_deref(), Some("vllm"));
        assert_eq!(fits(&["blk.0.attn_q", "blk.0.attn_output", "output_norm"]).as_deref(), Some("candle"));
        assert_eq!(fits(&["ffn_inp-0", "l_out-0", "kqv_out-0"]).as_deref(), Some("llama.cpp"));
        assert_eq!(fits(&["a", "b", "blk.0.q"]), None);
        let own =
            |tensors: &[&str]| fitting(tensors.iter().copied(), true, &Widths::default(), None).unwrap();
        assert!(own(&["norm", "norm.0", "embed_tokens"]).is_none() && own(&layer).is_some());
        let of_graph =
            ["blk.0.attn_output", "blk.1.attn_output", "norm", "blk.0.z", "blk.0.gate", "blk.0.silu"];
        assert!(own(&of_graph).is_none() && own(&["blk.0.attn_q", "blk.0.attn_output", "norm"]).is_some());
    }
}
