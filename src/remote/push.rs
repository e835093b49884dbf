//! Puts a dump elsewhere: packed, with the hashes of everything in it. The manifest comes last, so that nobody reads half of it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use memmap2::Mmap;
use parity_dump::manifest::{MANIFEST_FILE, Manifest};
use parity_dump::packed::{self, Stored, ZSTD_SHUFFLE};
use parity_dump::{Dump, seen};

use super::cache::hash;
use super::index::{self, Index, Step};
use super::store::Store;
use crate::error::{Error, Result};

/// Bytes of a part of a large file; S3 takes at least 5 MiB, and at most 10 000 parts.
const PART: usize = 16 << 20;

/// What was put there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Bytes of the steps as they lie here.
    pub plain: u64,
    /// Bytes of them there.
    pub stored: u64,
    /// How many there are.
    pub steps: usize,
}

/// Puts a whole dump at an address; `progress` is told how many steps are there, and of how many.
///
/// # Errors
/// What is no complete dump, another dump that is there already (without `force`), and the server's.
pub fn push(dump: &Path, url: &Path, force: bool, progress: &dyn Fn(usize, usize)) -> Result<Pushed> {
    let opened = Dump::open(dump)?;
    if !dump.is_dir() {
        return Err(Error::file(dump, "is a single file").expected("a dump folder"));
    }
    if !opened.manifest().complete {
        return Err(Error::file(dump, "was not recorded to its end")
            .hint("what was interrupted is no reference for others: record it again"));
    }
    let store = Store::open(url)?;
    refuse_another(&store, dump, force)?;
    let mut manifest = opened.manifest().clone();
    drop(opened);
    let (mut index, mut all) = (
        Index { schema: index::SCHEMA.to_owned(), files: BTreeMap::new(), steps: BTreeMap::new() },
        Pushed::default(),
    );
    for name in beside(dump, &manifest) {
        let bytes = fs::read(dump.join(&name)).map_err(|e| Error::file(&dump.join(&name), e))?;
        index.files.insert(name.clone(), hash(&bytes));
        store.put(&name, bytes)?;
    }
    let steps = manifest.steps.len();
    for (done, step) in manifest.steps.iter().enumerate() {
        progress(done, steps);
        let (entry, plain, stored) = put_step(&store, dump, &step.file)?;
        index.steps.insert(step.file.clone(), entry);
        (all.plain, all.stored, all.steps) = (all.plain + plain, all.stored + stored, all.steps + 1);
    }
    progress(steps, steps);
    if !manifest.requires.iter().any(|name| name == ZSTD_SHUFFLE) {
        manifest.requires.push(ZSTD_SHUFFLE.to_owned());
    }
    let failed = |e: serde_json::Error| Error::file(dump, format!("its manifest cannot be written: {e}"));
    let index = serde_json::to_vec(&index).map_err(failed)?;
    manifest.provenance.insert(index::KEY.to_owned(), hash(&index));
    store.put(index::FILE, index)?;
    store.put(MANIFEST_FILE, serde_json::to_vec_pretty(&*manifest.for_file()).map_err(failed)?)?;
    Ok(all)
}

/// Refuses to replace a dump, unless that is asked for.
fn refuse_another(store: &Store, dump: &Path, force: bool) -> Result<()> {
    if force || store.get(MANIFEST_FILE, u64::MAX)?.is_none() {
        return Ok(());
    }
    Err(Error::new(store.url(), "holds a dump already")
        .expected("an address where there is none")
        .hint(format!("parity push {} {} --force replaces it", dump.display(), store.url())))
}

/// The files beside the steps.
fn beside(dump: &Path, manifest: &Manifest) -> Vec<String> {
    let graphs = manifest.graphs.iter().map(|graph| graph.file.clone());
    let hashes = manifest.steps.iter().filter_map(|step| step.hashes.clone());
    let seen = Some(seen::SEEN_FILE.to_owned()).filter(|name| dump.join(name).is_file());
    graphs.chain(hashes).chain(seen).collect()
}

/// Packs one step and puts it there: its entry in the index, bytes here and there.
fn put_step(store: &Store, dump: &Path, name: &str) -> Result<(Step, u64, u64)> {
    let path = dump.join(name);
    let failed = |e: std::io::Error| Error::file(&path, format!("cannot be read: {e}"));
    let wrong = |e: String| Error::file(&path, format!("is no step of a dump: {e}"));
    let mut file = tempfile::tempfile().map_err(failed)?;
    // SAFETY: a file that another process truncates meanwhile is outside what readers of mapped files can guard against.
    let own = unsafe { Mmap::map(&File::open(&path).map_err(failed)?) }.map_err(failed)?;
    let plain = own.len() as u64;
    if packed::is_packed(&packed::stored(&own).map_err(wrong)?) {
        std::io::copy(&mut &own[..], &mut file).map_err(failed)?;
    } else {
        packed::pack(&path, &mut file)?;
    }
    // SAFETY: nobody else has the file: it has no name.
    let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
    let tensors = packed::stored(&map).map_err(wrong)?;
    let head_bytes = tensors.first().map_or(map.len() as u64, |first| first.range.start);
    let bytes = |tensor: &Stored| &map[tensor.range.start as usize..tensor.range.end as usize];
    let hashes = tensors.iter().map(|tensor| (tensor.name.clone(), hash(bytes(tensor)))).collect();
    let entry = Step { head_bytes, head: hash(&map[..head_bytes as usize]), tensors: hashes };
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    if map.len() <= PART {
        store.put(name, map.to_vec())?;
    } else {
        let mut parts = std::iter::from_fn(|| {
            let mut part = Vec::with_capacity(PART);
            match (&file).take(PART as u64).read_to_end(&mut part) {
                Ok(0) => None,
                other => Some(other.map(|_| part)),
            }
        });
        store.put_parts(name, &mut parts)?;
    }
    Ok((entry, plain, map.len() as u64))
}
