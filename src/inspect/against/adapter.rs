//! Adapters of low rank as PEFT saves them: named and arranged as a model file has its weights.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use serde::Deserialize;

use super::folder::{Folder, Stored};
use super::names::{Part, Place, Wanted, modules, role, wanted};
use super::sources::Heads;
use super::view::{Order, View};
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::files::{TEXT_BYTES_MAX, read};
use crate::gguf::{Adapter, DType, Gguf, Pair, TensorInfo};
use crate::numerics::Storage;
use parity_graph::weights::{LORA_A, LORA_B, WEIGHT};

/// The matrices, where PEFT saves them.
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT says of an adapter beside its file.
const CONFIG: &str = "adapter_config.json";

#[derive(Deserialize)]
struct Config {
    lora_alpha: f32,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    alpha_pattern: IndexMap<String, f32>,
}

impl Config {
    fn read(beside: &Path) -> Result<Config> {
        let path = beside.join(CONFIG);
        let text = read(&path, TEXT_BYTES_MAX)?;
        let failed = |e| Error::file(&path, format!("is no configuration of a LoRA adapter: {e}"));
        let config: Config = serde_json::from_str(&text).map_err(failed)?;
        match config.use_dora {
            true => Err(Error::file(
                &path,
                "is of an adapter with magnitudes (DoRA), which parity does not follow",
            )
            .hint("merge it into the model: model.merge_and_unload()")),
            false => Ok(config),
        }
    }

    /// What is divided by the rank, of a module.
    fn alpha(&self, module: &str, rank: usize) -> f32 {
        let is_of = |key: &str| module == key || module.ends_with(&format!(".{key}"));
        let alpha =
            self.alpha_pattern.iter().find(|(key, _)| is_of(key)).map_or(self.lora_alpha, |own| *own.1);
        // rsLoRA divides by the root of the rank (arXiv 2312.03732).
        if self.use_rslora { alpha * (rank as f32).sqrt() } else { alpha }
    }
}

/// FILE[:SCALE] as a user writes it.
pub fn scaled(text: &str) -> (PathBuf, f32) {
    let parted = text.rsplit_once(':').and_then(|(path, scale)| Some((path, scale.parse::<f32>().ok()?)));
    match parted {
        Some((path, scale)) if scale.is_finite() && !Path::new(text).exists() => (path.into(), scale),
        _ => (text.into(), 1.0),
    }
}

/// A model with adapters, each with its scale.
///
/// # Errors
/// Those of [`adapter`].
pub fn with_adapters(file: ModelFile, adapters: &[(PathBuf, f32)]) -> Result<ModelFile> {
    adapters.iter().try_fold(file, |file, (path, scale)| {
        let gguf = file.into_gguf();
        let adapter = adapter(path, *scale, &gguf)?;
        Ok(ModelFile::of(gguf.with_adapter(adapter)?))
    })
}

/// Reads an adapter: a GGUF file, a safetensors file of PEFT, or the folder of one. What it adds is scaled by `strength`
/// besides alpha / rank.
///
/// # Errors
/// A file that is neither, a module that the model file has no tensor of its own of, values of an unknown type.
pub fn adapter(path: &Path, strength: f32, gguf: &Gguf) -> Result<Adapter> {
    let is_peft = path.is_dir() || path.extension().is_some_and(|extension| extension == "safetensors");
    if !is_peft {
        return Adapter::open(path, strength);
    }
    let file = if path.is_dir() { path.join(WEIGHTS) } else { path.to_owned() };
    if !file.exists() {
        return Err(Error::file(path, "holds no adapter")
            .expected(format!("{WEIGHTS} and {CONFIG}, as PEFT saves them"))
            .found(format!("no {WEIGHTS}"))
            .hint("an older adapter_model.bin: load it with PEFT and save_pretrained it again"));
    }
    let folder = Folder::open(&file)?;
    let config = Config::read(file.parent().unwrap_or(Path::new("")))?;
    let architecture = gguf.str("general.architecture")?.unwrap_or_default();
    let width = Heads::of(gguf, architecture).map_or(0, |heads| heads.width);
    let mut pairs: IndexMap<String, Pair> = IndexMap::new();
    let halves = ["lora_A", "lora_B"];
    for (name, a) in folder.tensors().filter(|(name, _)| name.contains(halves[0])) {
        let of_b = name.replacen(halves[0], halves[1], 1);
        let b = folder.get(&of_b).ok_or_else(|| Error::file(path, format!("holds {name}, and no {of_b}")))?;
        let place = Place::of(name);
        let words: Vec<&str> = place.rest.iter().copied().take_while(|word| *word != halves[0]).collect();
        let module = words.join(".");
        let weight = weight_of(gguf, &place, &module).ok_or_else(|| {
            Error::file(
                path,
                format!("is for {module} ({name}), of which the model has no tensor of its own"),
            )
            .expected(format!("modules that tensors of {} were made of", gguf.path().display()))
            .hint(
                "convert_lora_to_gguf.py of llama.cpp takes what it can; or merge the adapter into the model",
            )
        })?;
        let order = match wanted(architecture, role(&weight).0) {
            Some(Wanted::Pairs) => Order::Pairs(width),
            _ => Order::AsStored,
        };
        let a = read_matrix(path, &folder, (name, a), (&weight, LORA_A), Order::AsStored)?;
        let b = read_matrix(path, &folder, (&of_b, b), (&weight, LORA_B), order)?;
        let alpha = config.alpha(&module, b.0.cols());
        pairs.insert(weight, Pair { a, b, alpha });
    }
    let other = folder.tensors().find(|(name, _)| !halves.iter().any(|half| name.contains(half)));
    if let Some((name, _)) = other {
        return Err(Error::file(path, format!("holds {name}, which is no matrix of an adapter"))
            .expected("lora_A and lora_B alone")
            .hint("merge what was trained besides into the model"));
    }
    Ok(Adapter::new(path, strength, pairs))
}

/// The weight of the model file that was made of a module alone.
fn weight_of(gguf: &Gguf, place: &Place<'_>, module: &str) -> Option<String> {
    let is_it = |name: &str| {
        let (part, layer, bias) = role(name);
        let made = modules(part).iter().any(|(known, of)| *known == module && *of == Part::Whole);
        !bias && name.ends_with(WEIGHT) && layer == place.layer && place.expert.is_none() && made
    };
    gguf.tensors().map(|info| &info.name).find(|name| is_it(name)).cloned()
}

/// A matrix in f32, its rows in the file's order.
fn read_matrix(
    path: &Path,
    folder: &Folder,
    (name, stored): (&str, &Stored),
    (weight, half): (&str, &str),
    order: Order,
) -> Result<(TensorInfo, Vec<u8>)> {
    let wrong = |message: &str| {
        Error::file(path, format!("{name}: {message}")).found(format!("{} {:?}", stored.dtype, stored.shape))
    };
    let (Some(element), [rows, cols]) = (stored.element, &stored.shape[..]) else {
        return Err(wrong("is no matrix in F32, F16 or BF16"));
    };
    let (rows, cols) = (*rows, *cols);
    if let Order::Pairs(width) = order
        && (width == 0 || rows % width != 0)
    {
        return Err(wrong("has no whole number of heads"));
    }
    let view = View {
        bytes: folder.bytes(stored),
        element,
        start: 0,
        shape: [rows, cols],
        row: cols,
        col: 1,
        order,
        add: 0.0,
    };
    let (mut row, mut bytes) = (vec![0.0; cols], Vec::with_capacity(rows * cols * size_of::<f32>()));
    for number in 0..rows {
        view.read(number, &mut row);
        bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
    }
    let info = TensorInfo {
        name: format!("{weight}.{half}"),
        dtype: DType::F32,
        shape: vec![rows, cols],
        offset: 0,
        byte_len: bytes.len(),
        shard: 0,
        loaded: Storage::F32,
    };
    Ok((info, bytes))
}
