//! What a graph and its backends say about who computes, and with what arithmetic.

use std::borrow::Cow;
use std::collections::HashMap;

use parity_dump::Producer;

use parity_graph::known::Known;
use parity_graph::{CPU_OF_ARM, Graph};

/// What ggml calls the CPU.
const CPU: &str = "CPU";

/// A graph that says of which kind of machine its CPU is, where that has kernels of its own.
pub fn of_this_machine(graph: &Graph) -> Cow<'_, Graph> {
    named_for(graph, cfg!(target_arch = "aarch64"))
}

fn named_for(graph: &Graph, arm: bool) -> Cow<'_, Graph> {
    let mut graph = Cow::Borrowed(graph);
    if arm {
        for tensor in &mut graph.to_mut().tensors {
            tensor.backend =
                tensor.backend.take().map(|name| if name == CPU { CPU_OF_ARM.to_owned() } else { name });
        }
    }
    graph
}

/// The producer of a recording: `backends` are the names of ggml's backends with how many nodes each has.
pub fn describe(backends: &HashMap<String, usize>, known: &Known, version: Option<String>) -> Producer {
    let mut names: Vec<&str> = backends.keys().map(String::as_str).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    // Whatever is not the CPU counts: its kernels decide the rounding.
    let kind = names.iter().find(|name| **name != CPU).or(names.first()).map(|name| kind(name));
    let numerics = kind.as_deref().and_then(|kind| numerics(kind, known));
    Producer {
        name: "llama.cpp".to_owned(),
        version,
        device: (!names.is_empty()).then(|| names.join(", ")),
        backend: kind,
        numerics,
    }
}

/// `CUDA0` as `cuda`.
fn kind(name: &str) -> String {
    name.trim_end_matches(|c: char| c.is_ascii_digit()).to_ascii_lowercase()
}

/// The words of parity's `numerics.rs`; `None` where it has none for this.
fn numerics(kind: &str, known: &Known) -> Option<String> {
    let products = match kind {
        "cpu" => "llama-cpu",
        "cuda" => "llama-cuda",
        _ => return None,
    };
    let mut types = known.cache_types.iter().map(String::as_str);
    let kv = match (types.next(), types.next()) {
        (Some("f32"), None) => "",
        (Some("f16"), None) => " kv=f16",
        (Some("bf16"), None) => " kv=bf16",
        _ => return None,
    };
    Some(format!("{products}{kv}{}", if known.flash { " flash=on" } else { "" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numerics_of(backends: &[&str], cache: &[&str], flash: bool) -> (Option<String>, Option<String>) {
        let backends = backends.iter().map(|name| ((*name).to_owned(), 1)).collect();
        let cache_types = cache.iter().map(|name| (*name).to_owned()).collect();
        let producer = describe(&backends, &Known { cache_types, flash, ..Known::default() }, None);
        (producer.backend, producer.numerics)
    }

    #[test]
    fn the_cpu_of_an_arm_machine_is_called_so() {
        let text = "graph 1 of 2 on=CPU\nSQR f32 4 < 1 : a\nNONE f32 4 : b\n";
        let graph = parity_graph::text::read(text).unwrap().remove(0);
        let named = |arm| named_for(&graph, arm).tensors[0].backend.clone();
        assert_eq!((named(false).as_deref(), named(true).as_deref()), (Some(CPU), Some(CPU_OF_ARM)));
        let mut card = graph.clone();
        card.tensors[0].backend = Some("CUDA0".to_owned());
        assert_eq!(named_for(&card, true).tensors[0].backend.as_deref(), Some("CUDA0"));
    }

    #[test]
    fn the_words_are_those_of_numerics() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(numerics_of(&["CPU"], &["f32"], false), (some("cpu"), some("llama-cpu")));
        assert_eq!(
            numerics_of(&["CPU", "CUDA0"], &["f16"], true),
            (some("cuda"), some("llama-cuda kv=f16 flash=on"))
        );
        assert_eq!(numerics_of(&["CPU"], &["q8_0"], true), (some("cpu"), None));
        assert_eq!(numerics_of(&["Vulkan0"], &["f16"], true), (some("vulkan"), None));
    }
}
