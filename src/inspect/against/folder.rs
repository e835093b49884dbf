//! The weights of a Hugging Face folder: one `.safetensors` file, several, or those that an index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use memmap2::Mmap;
use parity_dump::Element;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::files::{TEXT_BYTES_MAX, read};

/// What sharded models list their files in.
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a folder, mapped.
pub struct Folder {
    files: Vec<Mmap>,
    tensors: BTreeMap<String, Stored>,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Stored {
    file: usize,
    offset: usize,
    /// How its values are stored; `None` where that is nothing that can be read here.
    pub element: Option<Element>,
    /// The name of that type.
    pub dtype: String,
    /// Slowest axis first.
    pub shape: Vec<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    /// Opens a folder, or a single file.
    ///
    /// # Errors
    /// No such file, none that is safetensors, an index that names a file outside of the folder or a tensor that its
    /// file lacks, a tensor that stands in two files.
    pub fn open(path: &Path) -> Result<Folder> {
        let mut folder = Folder { files: Vec::new(), tensors: BTreeMap::new() };
        if !path.is_dir() {
            folder.add(path)?;
            return Ok(folder);
        }
        let index = path.join(INDEX);
        let listed = index.exists().then(|| listed(&index)).transpose()?;
        for file in match &listed {
            Some(listed) => listed.weight_map.values().cloned().collect::<BTreeSet<_>>(),
            None => found(path)?,
        } {
            folder.add(&path.join(file))?;
        }
        let lacking = listed.iter().flat_map(|listed| listed.weight_map.iter());
        if let Some((name, file)) = lacking.into_iter().find(|(name, _)| !folder.tensors.contains_key(*name))
        {
            return Err(Error::file(&index, format!("lists {name} in {file}, which does not hold it"))
                .hint("the download may be incomplete"));
        }
        Ok(folder)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let failed = |e: &dyn std::fmt::Display| Error::file(path, format!("cannot be read: {e}"));
        let file = parity_dump::open_regular(path, "cannot be opened")?;
        // SAFETY: the map is read-only; a file that another process truncates meanwhile is outside what any reader
        // of mapped files can guard against.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| failed(&e))?;
        let tensors = SafeTensors::deserialize(&map).map_err(|e| {
            failed(&e)
                .expected("a safetensors file")
                .hint("a Git LFS pointer stands for a file that was not fetched")
        })?;
        let number = self.files.len();
        for (name, view) in tensors.iter() {
            let element = match view.dtype() {
                Dtype::F32 => Some(Element::F32),
                Dtype::F16 => Some(Element::F16),
                Dtype::BF16 => Some(Element::Bf16),
                _ => None,
            };
            let offset = view.data().as_ptr() as usize - map.as_ptr() as usize;
            let dtype = format!("{:?}", view.dtype());
            let stored = Stored { file: number, offset, element, dtype, shape: view.shape().to_vec() };
            if self.tensors.insert(name.to_owned(), stored).is_some() {
                return Err(Error::file(
                    path,
                    format!("holds {name}, and another file of the folder does too"),
                )
                .expected("each tensor once")
                .hint("a folder with two models in it: give the files of one a folder of their own"));
            }
        }
        self.files.push(map);
        Ok(())
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Stored)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), stored))
    }

    /// One tensor.
    pub fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// The bytes of a tensor from its first value on.
    pub fn bytes(&self, stored: &Stored) -> &[u8] {
        let size = stored.element.map_or(0, Element::size);
        let bytes = stored.shape.iter().product::<usize>() * size;
        &self.files[stored.file][stored.offset..stored.offset + bytes]
    }
}

fn listed(index: &Path) -> Result<Index> {
    let text = read(index, TEXT_BYTES_MAX)?;
    let listed: Index = serde_json::from_str(&text)
        .map_err(|e| Error::file(index, format!("is no index of shards: {e}")).expected("a `weight_map`"))?;
    match listed.weight_map.values().find(|file| file.contains(['/', '\\'])) {
        Some(file) => Err(Error::file(index, "names a file outside of its folder").found(file)),
        None => Ok(listed),
    }
}

/// The safetensors files of a folder.
fn found(path: &Path) -> Result<BTreeSet<String>> {
    let failed = |e: std::io::Error| Error::file(path, format!("cannot be listed: {e}"));
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            files.insert(name);
        }
    }
    match files.is_empty() {
        false => Ok(files),
        true => Err(Error::file(path, "holds no .safetensors file")
            .expected("the folder of a Hugging Face model")
            .hint("model.save_pretrained(FOLDER) writes one of a model in pickle files")),
    }
}
