//! The GGUF format: metadata and tensors of a model file, mapped into memory.

mod adapter;
mod blocks;
mod dtype;
pub mod misread;
mod parse;
mod split;
mod tensor;
mod value;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use indexmap::IndexMap;
use memmap2::Mmap;

pub use adapter::{Adapter, Pair};
pub use blocks::{decode, groups, minima, minimum_group};
pub use dtype::DType;
pub use parse::{Parsed, parse};
pub use tensor::{TensorInfo, TensorRef};
pub use value::{Array, FromValue, Value, ValueType};

use crate::error::{Error, Result};
use crate::numerics::Storage;
use parity_graph::weights;

/// What an engine rounds as it loads it, and to which type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Weights of norms, vectors in f32.
    pub norms: Option<Storage>,
    /// Biases, likewise.
    pub biases: Option<Storage>,
    /// The table of embeddings.
    pub tables: Option<Storage>,
    /// The weight of the last product, where it is no table.
    pub head: Option<Storage>,
    /// All other weights.
    pub matrices: Option<Storage>,
}

/// A model file, or the files of a split model.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    version: u32,
    metadata: IndexMap<String, Value>,
    tensors: IndexMap<String, TensorInfo>,
    /// One map per file.
    maps: Vec<Mmap>,
    /// What is added to its matmuls, in this order.
    adapters: Vec<Arc<Adapter>>,
}

impl Gguf {
    /// Maps a file and reads its metadata and tensor table. Any file of a split model
    /// (`NAME-00001-of-00003.gguf`) opens all of it.
    pub fn open(path: &Path) -> Result<Gguf> {
        let mut gguf = Gguf {
            path: path.to_owned(),
            version: 0,
            metadata: IndexMap::new(),
            tensors: IndexMap::new(),
            maps: vec![],
            adapters: vec![],
        };
        let first = gguf.add_file(path)?;
        match split::shards(path, &first.metadata)? {
            None => gguf.add_tensors(path, first)?,
            Some(shards) => {
                gguf.maps.clear();
                for (index, shard) in shards.iter().enumerate() {
                    let parsed = gguf.add_file(shard)?;
                    split::check(shard, &parsed.metadata, index, shards.len())?;
                    gguf.add_tensors(shard, parsed)?;
                }
                split::check_total(path, &gguf.metadata, gguf.tensors.len())?;
            }
        }
        Ok(gguf)
    }

    /// Maps one file and reads it.
    fn add_file(&mut self, path: &Path) -> Result<Parsed> {
        let failed = |error| Error::file(path, format!("cannot be read: {error}"));
        let file = parity_dump::open_regular(path, "cannot be read")?;
        // SAFETY: the map is only read. A model file that someone truncates while it is mapped ends the
        // process by SIGBUS, as with every program that maps models; nothing is corrupted.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        let parsed = parse(&path.display().to_string(), &map)?;
        self.maps.push(map);
        Ok(parsed)
    }

    /// Takes over the tensors of the file that was mapped last, and the metadata of the first.
    fn add_tensors(&mut self, path: &Path, parsed: Parsed) -> Result<()> {
        let shard = self.maps.len() - 1;
        if shard == 0 {
            (self.version, self.metadata) = (parsed.version, parsed.metadata);
        }
        for mut info in parsed.tensors {
            info.shard = shard;
            if let Some(twin) = self.tensors.insert(info.name.clone(), info) {
                let error = Error::file(path, format!("has tensor `{}` twice", twin.name));
                return Err(
                    error.hint("the file is damaged or was put together wrongly: convert the model anew")
                );
            }
        }
        Ok(())
    }

    /// The same file as an engine has it that rounds some of its tensors as it loads them; `None` where that changes none.
    ///
    /// # Errors
    /// A file that can no longer be opened.
    pub fn loaded(&self, loaded: Loaded) -> Result<Option<Gguf>> {
        let is_exact = |info: &TensorInfo, storage: Storage| match info.dtype {
            DType::F16 => storage == Storage::F16,
            DType::BF16 => storage == Storage::Bf16,
            DType::F32 if info.is_plain_vector() => self.tensor(&info.name).is_some_and(|tensor| {
                let values: Vec<f32> = tensor.decode();
                values.into_iter().all(|value| storage.holds(value))
            }),
            _ => false,
        };
        let of = |info: &TensorInfo| {
            let storage = match info.name.strip_suffix(".weight") {
                _ if info.is_bias() => loaded.biases,
                _ if info.is_plain_vector() => loaded.norms,
                Some(weights::TOKEN_EMBD) => loaded.tables,
                Some(weights::OUTPUT) => loaded.head,
                _ => loaded.matrices,
            };
            storage.filter(|storage| info.dtype.is_decodable() && !is_exact(info, *storage))
        };
        let rounded: Vec<(usize, Storage)> =
            self.tensors().enumerate().filter_map(|(i, info)| Some((i, of(info)?))).collect();
        if rounded.is_empty() {
            return Ok(None);
        }
        let mut gguf = Gguf { adapters: self.adapters.clone(), ..Gguf::open(&self.path)? };
        rounded.into_iter().for_each(|(i, storage)| gguf.tensors[i].loaded = storage);
        Ok(Some(gguf))
    }

    /// The same file with one more adapter: [`Gguf::tensor`] knows its matrices too, [`Gguf::tensors`] does not.
    ///
    /// # Errors
    /// An adapter of another model.
    pub fn with_adapter(self, adapter: Adapter) -> Result<Gguf> {
        adapter.check(&self)?;
        let adapters = self.adapters.iter().cloned().chain([Arc::new(adapter)]).collect();
        Ok(Gguf { adapters, ..self })
    }

    /// What is added to its matmuls, in this order.
    pub fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        self.adapters.iter().map(Arc::as_ref)
    }

    /// The adapters that have matrices for a weight, with these.
    pub fn adapters_of(&self, weight: &str) -> impl Iterator<Item = (&Adapter, &Pair)> {
        self.adapters().filter_map(move |adapter| Some((adapter, adapter.pair(weight)?)))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All metadata in the order of the file.
    pub fn metadata(&self) -> &IndexMap<String, Value> {
        &self.metadata
    }

    /// A metadata value as it is stored.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A metadata value as a `T`; `None` where absent, an error where it is something else.
    pub fn value<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let read = T::from_value(value).ok_or_else(|| {
            self.error(format!("metadata `{key}` has the wrong type"))
                .expected(T::EXPECTED)
                .found(format!("{} {value}", value.value_type().name()))
                .hint("convert the model anew with llama.cpp's convert_hf_to_gguf.py")
        })?;
        Ok(Some(read))
    }

    /// A metadata value as a `T`; an error where absent.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.value(key)?.ok_or_else(|| {
            self.error(format!("lacks metadata `{key}`"))
                .expected(T::EXPECTED)
                .hint(format!("`parity inspect {}` lists what the file holds", self.path.display()))
        })
    }

    /// All tensors in the order of the file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.values()
    }

    /// A tensor of any type and shape.
    pub fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        let Some(info) = self.tensors.get(name) else {
            let (weight, kind, number) = weights::of_adapter(name)?;
            return self.adapters_of(weight).nth(number)?.1.half(kind);
        };
        let bytes = &self.maps[info.shard][info.offset..info.offset + info.byte_len];
        Some(TensorRef { info, bytes })
    }

    /// A weight that a graph reads.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn weight(&self, name: &str) -> Result<TensorRef<'_>> {
        self.tensor(name).ok_or_else(|| {
            self.error(format!("no tensor {name}"))
                .hint(format!("parity inspect {} lists the tensors", self.path.display()))
        })
    }

    /// A tensor that can be decoded and has this shape (slowest axis first), or an error.
    pub fn require_tensor(&self, name: &str, shape: &[usize]) -> Result<TensorRef<'_>> {
        self.optional_tensor(name, shape)?.ok_or_else(|| {
            self.error(format!("lacks tensor `{name}`"))
                .expected(format!("shape {shape:?}"))
                .hint(format!("`parity inspect {}` lists what the file holds", self.path.display()))
        })
    }

    /// As [`Gguf::require_tensor`], `None` where there is no such tensor.
    pub fn optional_tensor(&self, name: &str, shape: &[usize]) -> Result<Option<TensorRef<'_>>> {
        let Some(tensor) = self.tensor(name) else { return Ok(None) };
        let info = tensor.info;
        if info.shape != shape {
            return Err(self
                .error(format!("tensor `{name}` has another shape than the metadata says"))
                .expected(format!("{shape:?}, slowest axis first"))
                .found(format!("{:?}", info.shape))
                .hint("the file was converted wrongly, or its metadata edited: convert the model anew"));
        }
        if !info.dtype.is_decodable() {
            let decodable: Vec<_> = DType::all().filter(|t| t.is_decodable()).map(DType::name).collect();
            return Err(self
                .error(format!("tensor `{name}` has a type that parity cannot decode"))
                .expected(decodable.join(", "))
                .found(info.dtype)
                .hint(
                    "requantise the model from its original: `llama-quantize MODEL-F16.gguf NEW.gguf Q4_K_M`",
                ));
        }
        Ok(Some(tensor))
    }

    fn error(&self, message: String) -> Error {
        Error::file(&self.path, message)
    }
}

macro_rules! typed {
    ($($get:ident, $require:ident -> $t:ty, $what:literal;)*) => {
        impl Gguf {$(
            #[doc = concat!("A metadata value as ", $what, "; `None` where absent, an error where it is something else.")]
            pub fn $get(&self, key: &str) -> Result<Option<$t>> {
                self.value(key)
            }

            #[doc = concat!("A metadata value as ", $what, "; an error where absent.")]
            pub fn $require(&self, key: &str) -> Result<$t> {
                self.require(key)
            }
        )*}
    };
}

typed! {
    u32, require_u32 -> u32, "an integer";
    i32, require_i32 -> i32, "an integer";
    u64, require_u64 -> u64, "an integer";
    f32, require_f32 -> f32, "a float";
    bool, require_bool -> bool, "a bool";
    str, require_str -> &str, "a string";
    strings, require_strings -> &[String], "an array of strings";
    f32s, require_f32s -> Vec<f32>, "an array of floats";
    i32s, require_i32s -> Vec<i32>, "an array of integers";
    u32s, require_u32s -> Vec<u32>, "an array of integers";
}
