//! Some tensors of a dump, as an engine that exposes no more would have recorded it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use parity_dump::checkpoint::{Checkpoint, Kind};
use safetensors::tensor::{SafeTensors, serialize};
use serde_json::Value;

/// Copies a dump with those of its tensors that `some` names, by an engine that declares its arithmetic as that.
pub fn copy(from: &Path, to: &Path, declared: Option<&str>, some: &dyn Fn(Kind) -> bool) {
    fs::create_dir_all(to).unwrap();
    let text = fs::read_to_string(from.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    manifest["producer"]["name"] = "an engine".into();
    manifest["producer"]["numerics"] = declared.into();
    for step in manifest["steps"].as_array().unwrap() {
        let file = step["file"].as_str().unwrap();
        let bytes = fs::read(from.join(file)).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        let is_some = |name: &str| name.parse::<Checkpoint>().is_ok_and(|id| some(id.kind()));
        let kept: HashMap<&str, _> = all.iter().filter(|(name, _)| is_some(name)).collect();
        fs::write(to.join(file), serialize(kept, None).unwrap()).unwrap();
    }
    if let Some(rows) = manifest["rows"].as_object_mut() {
        rows.retain(|name, _| name.parse::<Checkpoint>().is_ok_and(|id| some(id.kind())));
    }
    fs::write(to.join("manifest.json"), manifest.to_string()).unwrap();
}
