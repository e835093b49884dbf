//! Dumps in folders: parity's own, arrays file by file, SGLang's two dumpers, msprobe, llama-debug.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parity_dump::Element;
use parity_dump::manifest::{LEAF_PREFIX, MANIFEST_FILE, Manifest, SCHEMA};
use serde_json::Value;

use super::single::{self, FileFormat, arrays, raw, safetensors};
use super::{entries, has_ending, name_of, number_behind, sglang, stem_of};
use crate::error::{Error, Result};
use crate::files;
use crate::foreign::array::{Array, Type};
use crate::foreign::{Foreign, Pass};

/// The folders of a folder that are one rank each, in order of rank; none where there is another kind of thing.
///
/// # Errors
/// A folder that cannot be listed, ranks that are not 0, 1, 2, ….
pub fn ranks(path: &Path) -> Result<Vec<PathBuf>> {
    let mut found: BTreeMap<usize, PathBuf> = BTreeMap::new();
    for entry in entries(path)?.into_iter().filter(|entry| entry.is_dir()) {
        let name = name_of(&entry);
        let words = ["rank", "tp_rank", "tp", "shard", "gpu", "worker"];
        let Some(rank) = words.iter().find_map(|word| number_behind(&name, word)) else { continue };
        if let Some(other) = found.insert(rank, entry.clone()) {
            return Err(Error::file(path, format!("rank {rank} is there twice"))
                .expected("one folder a rank, of one run")
                .found(format!("{} and {name}", name_of(&other))));
        }
    }
    if !found.keys().copied().eq(0..found.len()) {
        return Err(Error::file(path, "some ranks are missing")
            .expected(format!("ranks 0 to {}", found.len().saturating_sub(1)))
            .found(format!("{:?}", found.keys().collect::<Vec<_>>())));
    }
    Ok(found.into_values().collect())
}

/// What lies in a folder: one dump, or those of several ranks.
///
/// # Errors
/// Nothing that can be read, with the line that makes something of it.
pub fn folder(path: &Path) -> Result<Vec<Foreign>> {
    if path.join(MANIFEST_FILE).is_file() {
        return own(path).map(|own| vec![own]);
    }
    if path.join("dump.json").is_file() {
        let pass = msprobe_pass(path)?;
        return Ok(vec![Foreign::new(path, "msprobe", vec![pass])]);
    }
    let all = entries(path)?;
    if let Some(raw) = all.iter().find_map(|entry| llama_debug_of(entry).transpose()) {
        return raw.map(|raw| vec![raw]);
    }
    let steps = numbered(&all, &["step", "pass", "iter"], Path::is_dir);
    if !steps.is_empty() {
        return passes_in_folders(path, &steps);
    }
    let files: Vec<PathBuf> = all.into_iter().filter(|entry| entry.is_file()).collect();
    if files.iter().any(|file| sglang::is_dumper(file)) {
        return sglang::dumper(path, &files);
    }
    let passes = numbered(&files, &["pass", "step"], |file| has_ending(file, &["pt", "npz", "safetensors"]));
    if !passes.is_empty() {
        let read = |file: &PathBuf| Ok(Pass { arrays: arrays(file)?.1, ..Pass::default() });
        let passes = passes.iter().map(read).collect::<Result<Vec<Pass>>>()?;
        return Ok(vec![Foreign::new(path, "passes", passes)]);
    }
    if let [one] = files.as_slice()
        && has_ending(one, &["npz", "pt", "pth", "safetensors"])
    {
        return single::file(one).map(|one| vec![one]);
    }
    let mut pass = Pass::default();
    for file in files.iter().filter(|file| has_ending(file, &["npy", "pt", "pth"])) {
        let (format, found) = arrays(file)?;
        let own = if format == FileFormat::Npy || found.len() == 1 {
            found
        } else {
            prefixed(found, &stem_of(file))
        };
        pass.arrays.extend(own);
    }
    if pass.arrays.is_empty() {
        return Err(Error::file(path, "holds no dump that can be read")
            .expected(format!("{MANIFEST_FILE}, .npy or .pt files, rank0 rank1 …, step0 step1 …, or msprobe's dump.json"))
            .found(format!("{} files, none of these", files.len()))
            .hint("parity record makes a dump of llama.cpp; an engine writes one with parity_dump.save: docs/your-engine.md"));
    }
    Ok(vec![Foreign::new(path, "arrays", vec![pass])])
}

/// Files or folders that are numbered, in the order of their numbers.
fn numbered(all: &[PathBuf], words: &[&str], is: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let number = |path: &PathBuf| words.iter().find_map(|word| number_behind(&name_of(path), word));
    let mut found: Vec<(usize, PathBuf)> =
        all.iter().filter(|path| is(path)).filter_map(|path| Some((number(path)?, path.clone()))).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

fn prefixed(arrays: Vec<Array>, prefix: &str) -> Vec<Array> {
    let named = |array: Array| {
        let name = format!("{prefix}.{}", array.name);
        array.named(name)
    };
    arrays.into_iter().map(named).collect()
}

/// A folder for each pass, in which each rank may have one of its own.
fn passes_in_folders(path: &Path, steps: &[PathBuf]) -> Result<Vec<Foreign>> {
    let mut out: Vec<Foreign> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let ranks = ranks(step)?;
        // msprobe writes `rank` where there is no rank.
        let alone = vec![if step.join("rank").is_dir() { step.join("rank") } else { step.clone() }];
        let ranks = if ranks.is_empty() { alone } else { ranks };
        if number > 0 && ranks.len() != out.len() {
            return Err(Error::file(step, "has another number of ranks than the step before")
                .expected(out.len())
                .found(ranks.len()));
        }
        for (rank, folder) in ranks.iter().enumerate() {
            let mut read = self::folder(folder)?;
            let (Some(mut one), true) = (read.pop(), read.is_empty()) else {
                return Err(Error::file(folder, "has ranks within ranks"));
            };
            match out.get_mut(rank) {
                Some(known) => {
                    known.passes.append(&mut one.passes);
                    known.complete &= one.complete;
                    known.stopped = known.stopped.take().or(one.stopped);
                }
                None => out.push(Foreign {
                    provenance: one.provenance,
                    complete: one.complete,
                    stopped: one.stopped,
                    ..Foreign::new(path, one.format, one.passes)
                }),
            }
        }
    }
    Ok(out)
}

/// A dump of our own whose names are another engine's.
fn own(path: &Path) -> Result<Foreign> {
    let file = path.join(MANIFEST_FILE);
    let text = files::read(&file, files::OUTPUT_BYTES_MAX)?;
    // Ids of `rows` may be any names here.
    let mut json: Value = serde_json::from_str(&text)
        .map_err(|e| Error::file(&file, format!("is no manifest of a dump: {e}")))?;
    let listed: BTreeMap<String, Vec<u32>> = match json.get_mut("rows").map(Value::take) {
        Some(rows) if !rows.is_null() => serde_json::from_value(rows)
            .map_err(|e| Error::file(&file, format!("`rows` lists positions by name: {e}")))?,
        _ => BTreeMap::new(),
    };
    if let Some(object) = json.as_object_mut() {
        object.remove("rows");
    }
    let manifest: Manifest = serde_json::from_value(json)
        .map_err(|e| Error::file(&file, format!("is no manifest of a dump: {e}")))?;
    if manifest.schema != SCHEMA {
        return Err(Error::file(&file, "another dump format").expected(SCHEMA).found(&manifest.schema));
    }
    parity_dump::refuse_unknown(&file, &manifest.requires)?;
    parity_dump::refuse_numbered(&file, &manifest.requires)?;
    let mut passes = Vec::with_capacity(manifest.steps.len());
    for step in &manifest.steps {
        if step.file.contains(['/', '\\']) {
            return Err(Error::file(path, "a step file lies outside the folder").found(&step.file));
        }
        let token = |p: &u32| manifest.tokens.get(*p as usize).copied();
        let tokens = step.positions.iter().map(token).collect::<Option<Vec<u32>>>().ok_or_else(|| {
            Error::file(&file, format!("{} has a position without a token", step.file))
                .expected(format!("positions below {}", manifest.tokens.len()))
        })?;
        let mut arrays = safetensors(&path.join(&step.file))?;
        arrays.retain(|array| !array.name.starts_with(LEAF_PREFIX));
        let of_step = |(name, rows): (&String, &Vec<u32>)| {
            let rows = step.positions.iter().copied().filter(|p| rows.contains(p)).collect();
            (name.clone(), rows)
        };
        let rows = listed.iter().map(of_step).collect();
        passes.push(Pass { arrays, tokens: Some(tokens), positions: Some(step.positions.clone()), rows });
    }
    let mut out = Foreign::new(path, "parity-dump/1", passes);
    (out.producer, out.model, out.prompt) = (manifest.producer, manifest.model, manifest.prompt);
    (out.provenance, out.complete, out.stopped) = (manifest.provenance, manifest.complete, manifest.stopped);
    Ok(out)
}

/// One pass of msprobe's: `dump.json` says which file is which module's input or output.
fn msprobe_pass(path: &Path) -> Result<Pass> {
    let file = path.join("dump.json");
    let text = files::read(&file, files::OUTPUT_BYTES_MAX)?;
    let json: Value =
        serde_json::from_str(&text).map_err(|e| Error::file(&file, format!("is no JSON: {e}")))?;
    let data = json.get("data").and_then(Value::as_object).ok_or_else(|| {
        Error::file(&file, "is none of msprobe's").expected("an object `data`, of modules").found("none")
    })?;
    let folder = path.join("dump_tensor_data");
    let mut pass = Pass::default();
    for (call, what) in data {
        // Module.model.layers.0.mlp.Qwen2MLP.forward.0
        let Some((module, _)) = call.split_once(".forward.") else { continue };
        let module = module.strip_prefix("Module.").unwrap_or(module);
        let module = module.rsplit_once('.').map_or(module, |(module, _class)| module);
        for (key, suffix) in [("output", ""), ("input_args", ".input")] {
            let listed = what.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            for (number, tensor) in listed.iter().enumerate() {
                let Some(name) = tensor.get("data_name").and_then(Value::as_str) else { continue };
                if name.contains(['/', '\\']) {
                    return Err(Error::file(&file, "a tensor lies outside the folder").found(name));
                }
                let index = if listed.len() > 1 { format!(".{number}") } else { String::new() };
                let name_here = format!("{module}{suffix}{index}");
                let found = arrays(&folder.join(name))?.1;
                pass.arrays.extend(found.into_iter().take(1).map(|array| array.named(&name_here)));
            }
        }
    }
    match pass.arrays.is_empty() {
        true => Err(Error::file(&file, "lists no tensor with its values")
            .expected("what msprobe writes with \"task\": \"tensor\"")
            .found(format!("\"task\": {}", json.get("task").unwrap_or(&Value::Null)))
            .hint("set \"task\": \"tensor\" and \"level\": \"L0\" in msprobe's config.json, and dump again")),
        false => Ok(pass),
    }
}

/// What `llama-debug --save-logits` writes: `llamacpp-MODEL.bin` and `llamacpp-MODEL-tokens.bin`.
///
/// # Errors
/// Tokens that are missing.
pub fn llama_debug_of(path: &Path) -> Result<Option<Foreign>> {
    let stem = stem_of(path);
    let is_logits = stem.starts_with("llamacpp-") && has_ending(path, &["bin"]);
    if !is_logits || stem.ends_with("-tokens") || stem.ends_with("-embeddings") {
        return Ok(None);
    }
    let tokens = path.with_file_name(format!("{stem}-tokens.bin"));
    let tokens = raw(&tokens, "tokens", Type::Int(4), 1)?;
    let logits = raw(path, "result_output", Type::Float(Element::F32), 1)?;
    let mut out =
        Foreign::new(path, "llama-debug", vec![Pass { arrays: vec![tokens, logits], ..Pass::default() }]);
    out.producer = single::producer("llama.cpp");
    Ok(Some(out))
}
