//! What SGLang's dumper writes: a file for each tensor, whose name says step, rank, place and layer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{has_ending, name_of, torch};
use crate::error::{Error, Result};
use crate::foreign::array::Array;
use crate::foreign::{Foreign, Pass};

/// What stands between two entries of a file's name.
const BETWEEN: &str = "___";

/// How the dumper's hooks begin the names of modules.
const HOOKED: &str = "non_intrusive__";

/// Whether a file is one of the dumper's.
pub fn is_dumper(file: &Path) -> bool {
    let name = name_of(file);
    has_ending(file, &["pt"])
        && name.split(BETWEEN).any(|entry| entry.starts_with("name="))
        && name.contains(BETWEEN)
}

/// The dumps of all ranks whose files these are.
///
/// # Errors
/// A file that cannot be read, a rank that lacks a step.
pub fn dumper(path: &Path, files: &[PathBuf]) -> Result<Vec<Foreign>> {
    let mut ranks: BTreeMap<usize, BTreeMap<usize, Vec<(usize, Array)>>> = BTreeMap::new();
    for file in files.iter().filter(|file| is_dumper(file)) {
        let stem = name_of(file);
        let stem = stem.trim_end_matches(".pt");
        let entries: BTreeMap<&str, &str> =
            stem.split(BETWEEN).filter_map(|entry| entry.split_once('=')).collect();
        let number = |key: &str| entries.get(key).and_then(|value| value.parse::<usize>().ok());
        let step = number("step").or(number("forward_pass_id")).unwrap_or(0);
        let rank = number("rank").unwrap_or(0);
        let name = name(entries.get("name").copied().unwrap_or_default(), number("layer_id"));
        // The value lies beside what describes it, or alone.
        let found = torch::read(file, "value")?;
        let value =
            found.into_iter().filter(|array| array.name == "value" || array.name.starts_with("value."));
        let steps = ranks.entry(rank).or_default();
        for array in value {
            let name = format!("{name}{}", array.name.trim_start_matches("value"));
            let index = number("dump_index").unwrap_or(0);
            steps.entry(step).or_default().push((index, array.named(name)));
        }
    }
    let all: Vec<usize> = ranks.values().flat_map(|steps| steps.keys().copied()).collect();
    let out = ranks.into_iter().map(|(rank, mut steps)| {
        let missing = all.iter().find(|step| !steps.contains_key(step));
        if let Some(step) = missing {
            return Err(Error::file(path, format!("rank {rank} lacks step {step}"))
                .expected("the same steps of all ranks")
                .hint("dump all ranks of one run into a folder of their own"));
        }
        let passes = steps.values_mut().map(|arrays| {
            arrays.sort_by_key(|(index, _)| *index);
            Pass { arrays: arrays.drain(..).map(|(_, array)| array).collect(), ..Pass::default() }
        });
        Ok(Foreign::new(path, "sglang", passes.collect()))
    });
    out.collect()
}

/// As a module's output or input is called: `model.layers.0.mlp.down_proj`, `….input`.
fn name(name: &str, layer: Option<usize>) -> String {
    let name = name.strip_prefix(HOOKED).unwrap_or(name);
    let name = name.replace(".inputs.0", ".input");
    match layer {
        Some(layer) if !name.contains("layers.") => format!("layers.{layer}.{name}"),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_modules() {
        assert_eq!(name("non_intrusive__model.layers.0.mlp.output", Some(0)), "model.layers.0.mlp.output");
        assert_eq!(
            name("non_intrusive__model.layers.3.mlp.down_proj.inputs.0", Some(3)),
            "model.layers.3.mlp.down_proj.input"
        );
        assert_eq!(name("hidden_states", Some(7)), "layers.7.hidden_states");
        assert_eq!(name("input_ids", None), "input_ids");
        assert!(is_dumper(Path::new("a/step=0___rank=1___dump_index=2___name=x___layer_id=0.pt")));
        assert!(!is_dumper(Path::new("name=x.pt")));
    }
}
