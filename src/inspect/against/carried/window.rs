//! How far layers look back, and which of them do so.

use serde_json::Value as Json;

use super::Carried;
use super::config::{Config, Converted};
use super::facts::place;
use super::setting::{Setting, plain};

/// Architectures whose graphs of llama.cpp have a window, and how many layers make a period where a file does not
/// say: the last of a period sees everything.
const WINDOWS: [(&str, usize); 12] = [
    ("gemma2", 2),
    ("gemma3", 6),
    ("gemma3n", 5),
    ("gemma4", 6),
    ("cohere2", 4),
    ("gpt-oss", 2),
    ("exaone4", 4),
    ("olmo2", 4),
    ("smallthinker", 4),
    ("llama4", 4),
    ("afmoe", 4),
    ("plamo3", 8),
];

/// Compares windows.
pub fn compare(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let on = config.get("use_sliding_window") != Some(&Json::Bool(false));
    let original =
        config.number(&["sliding_window", "sliding_window_size"]).filter(|window| on && *window > 0.0);
    let types = config.get("layer_types").and_then(Json::as_array);
    let none_has_it =
        types.is_some_and(|types| types.iter().all(|kind| kind.as_str() == Some("full_attention")));
    let original = original.filter(|_| !none_has_it);
    let own = converted.number("attention.sliding_window").filter(|window| *window > 0.0);
    let known = WINDOWS.iter().find(|(name, _)| *name == converted.architecture);
    let says = |own: &str| (original.map_or("none".to_owned(), plain), own.to_owned());
    let place_of_window = place("sliding_window", converted, "attention.sliding_window");
    match (original, own, known) {
        (None, None, _) => return,
        (Some(original), Some(own), _) if original == own => {}
        // A window as long as the longest text hides nothing.
        (Some(window), None, None)
            if config.number(&["max_position_embeddings"]).is_some_and(|all| window >= all) =>
        {
            return;
        }
        (Some(_), None, None) => {
            let effect = "llama.cpp's graph of this architecture has no window: logits differ for texts longer than it";
            return out.note("config.sliding_window", place_of_window, says("none"), effect);
        }
        (_, own, _) => {
            let own = own.map_or("none: every layer sees all".to_owned(), plain);
            let effect = "layers with a window see more or fewer tokens: longer texts differ";
            out.differs("config.sliding_window", place_of_window, says(&own), effect);
        }
    }
    let layers = converted.number("block_count").unwrap_or(0.0) as usize;
    let Some(wanted) = pattern_of_original(config, layers) else { return };
    let own = match converted.get("attention.sliding_window_pattern") {
        Some(Setting::List(list)) => Some(list.iter().map(|own| *own != 0.0).collect()),
        Some(period) => period.number().map(|period| periodic(period as usize, layers)),
        None => known.map(|(_, period)| periodic(*period, layers)),
    };
    let Some(own) = own else { return };
    let own: Vec<bool> = own;
    if let Some(layer) = (0..layers).find(|layer| own.get(*layer) != wanted.get(*layer)) {
        let says = |has: Option<&bool>| match has {
            Some(true) => format!("layer {layer} has a window"),
            Some(false) => format!("layer {layer} sees all"),
            None => format!("nothing of layer {layer}"),
        };
        let place = place("layer_types", converted, "attention.sliding_window_pattern");
        let effect = "other layers have the window: texts longer than it differ, and so do the bases of angles where these differ by layer";
        out.differs("config.layer_types", place, (says(wanted.get(layer)), says(own.get(layer))), effect);
    }
}

/// Which layers have a window: all but the last of each period.
fn periodic(period: usize, layers: usize) -> Vec<bool> {
    (0..layers).map(|layer| period == 0 || layer % period < period - 1).collect()
}

fn pattern_of_original(config: &Config, layers: usize) -> Option<Vec<bool>> {
    if let Some(types) = config.get("layer_types").and_then(Json::as_array) {
        let has = |kind: &Json| matches!(kind.as_str(), Some("sliding_attention" | "chunked_attention"));
        return Some(types.iter().map(has).collect());
    }
    let period = config.number(&["sliding_window_pattern", "_sliding_window_pattern"]);
    period.map(|period| periodic(period as usize, layers))
}
