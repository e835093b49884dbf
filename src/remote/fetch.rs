//! Brings a remote dump here: its manifest and graphs, and of its steps the tensors that are needed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parity_dump::manifest::{LEAF_PREFIX, MANIFEST_FILE, Manifest};
use parity_dump::packed::{self, LENGTH_BYTES, Stored, ZSTD_SHUFFLE};
use parity_dump::{Checkpoint, read_manifest, write_manifest};
use rayon::prelude::*;
use tempfile::TempDir;

use super::cache::{Cache, hash};
use super::index::{self, Index};
use super::needed::needed;
use super::store::Store;
use crate::error::{Error, Result};
use crate::files::{OUTPUT_BYTES_MAX, TEXT_BYTES_MAX};
use crate::memory::size;
use crate::select::Selection;
use crate::text::tell;

/// Bytes of a step that are asked for at a time, and held in memory.
const BATCH: u64 = 64 << 20;
/// Bytes of a header that are asked for before it is known how long it is: those of a hundred tensors.
const HEAD: u64 = 16 << 10;
/// Bytes of a header; safetensors has the same limit.
const HEAD_MAX: u64 = 100_000_000;
/// How often it is said how far it is.
const OFTEN: Duration = Duration::from_secs(2);
/// What the manifest says of where a dump was fetched from.
const FROM: &str = "fetched from";

/// Folders that live as long as the process.
static FOLDERS: Mutex<Vec<TempDir>> = Mutex::new(Vec::new());

/// Removes them.
pub fn tidy() {
    FOLDERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clear();
}

/// How much was brought here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Bytes that came from the server.
    pub fetched: u64,
    /// Bytes that were in the cache.
    pub cached: u64,
    /// Tensors, over all steps.
    pub tensors: u64,
    /// Tensors that the dump has.
    pub of: u64,
}

/// Fetches what a selection needs into a folder that lives until [`tidy`].
///
/// # Errors
/// What cannot be fetched, or is no dump.
pub fn temporary(url: &Path, selection: &Selection) -> Result<PathBuf> {
    let made = tempfile::Builder::new().prefix("parity-remote-").tempdir();
    let dir = made.map_err(|e| Error::new("a temporary folder", format!("cannot be made: {e}")))?;
    let path = dir.path().to_owned();
    FOLDERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(dir);
    let got = pull(url, &path, selection)?;
    tell(format_args!(
        "{}: {} fetched, {} from the cache; {} of {} tensors",
        url.display(),
        size(got.fetched),
        size(got.cached),
        got.tensors,
        got.of
    ));
    Ok(path)
}

/// Fetches what a selection needs into a folder, as a plain dump.
///
/// # Errors
/// What cannot be fetched, or is no dump; a folder that cannot be written to.
pub fn pull(url: &Path, dir: &Path, selection: &Selection) -> Result<Fetched> {
    let store = Store::open(url)?;
    let source = Source { cache: Cache::open()?, index: None, counts: Counts::new(), store };
    source.pull(dir, selection)
}

struct Source {
    store: Store,
    cache: Cache,
    index: Option<Index>,
    counts: Counts,
}

/// How far it is.
struct Counts {
    fetched: AtomicU64,
    cached: AtomicU64,
    told: Mutex<Instant>,
}

impl Counts {
    fn new() -> Counts {
        Counts { fetched: AtomicU64::new(0), cached: AtomicU64::new(0), told: Mutex::new(Instant::now()) }
    }

    fn fetched(&self, bytes: usize, url: &str) {
        let all = self.fetched.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        let Ok(mut told) = self.told.try_lock() else { return };
        if told.elapsed() >= OFTEN {
            *told = Instant::now();
            tell(format_args!("{url}: {} fetched", size(all)));
        }
    }
}

/// A step file of which the header is here.
struct Head {
    tensors: Vec<Stored>,
    /// What tells the bytes of this version from those of another, where no index has their hashes.
    version: String,
}

impl Source {
    fn pull(mut self, dir: &Path, selection: &Selection) -> Result<Fetched> {
        fs::create_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be written: {e}")))?;
        let manifest = self.whole(MANIFEST_FILE, None)?;
        write(&dir.join(MANIFEST_FILE), &manifest)?;
        // Under another name, the manifest of what is not here yet would be that of a dump.
        let mut said = read_manifest(dir)?;
        fs::remove_file(dir.join(MANIFEST_FILE)).map_err(|e| Error::file(dir, e))?;
        self.index = said.provenance.remove(index::KEY).map(|hash| self.read_index(&hash)).transpose()?;
        for name in self.beside(&said)? {
            let known = self.index.as_ref().and_then(|index| index.files.get(&name).cloned());
            write(&dir.join(&name), &self.whole(&name, known.as_deref())?)?;
        }
        let heads: Vec<Head> =
            said.steps.par_iter().map(|step| self.head(&step.file)).collect::<Result<_>>()?;
        let names = |head: &Head| head.tensors.iter().filter_map(|t| t.name.parse().ok()).collect::<Vec<_>>();
        let there: HashSet<Checkpoint> = heads.iter().flat_map(names).collect();
        let graphs = graphs(dir, &said)?;
        let wanted = needed(&there, &graphs, selection);
        let is_wanted = |tensor: &Stored| match tensor.name.parse::<Checkpoint>() {
            Ok(id) if !tensor.name.starts_with(LEAF_PREFIX) => wanted.contains(&id),
            // Inputs of the graph, and what has no id: that is for its reader to say.
            _ => true,
        };
        let of = heads.iter().map(|head| head.tensors.len() as u64).sum();
        let tensors = said.steps.par_iter().zip(&heads).map(|(step, head)| {
            let chosen: Vec<Stored> =
                head.tensors.iter().filter(|tensor| is_wanted(tensor)).cloned().collect();
            self.step(dir, &step.file, head, &chosen)?;
            Ok(chosen.len() as u64)
        });
        let tensors = tensors.collect::<Result<Vec<u64>>>()?.iter().sum();
        said.requires.retain(|name| name != ZSTD_SHUFFLE);
        said.provenance.insert(FROM.to_owned(), self.store.url().to_owned());
        write_manifest(dir, &said)?;
        self.cache.shrink();
        let [fetched, cached] =
            [&self.counts.fetched, &self.counts.cached].map(|n| n.load(Ordering::Relaxed));
        Ok(Fetched { fetched, cached, tensors, of })
    }

    /// The index that the manifest was pushed with.
    fn read_index(&self, known: &str) -> Result<Index> {
        let subject = format!("{}/{}", self.store.url(), index::FILE);
        let bytes = match self.cached_file(known) {
            Some(bytes) => bytes,
            None => self.fetch_index(&subject, known)?,
        };
        let index: Index =
            serde_json::from_slice(&bytes).map_err(|e| Error::new(&subject, format!("is no index: {e}")))?;
        if index.schema != index::SCHEMA {
            return Err(Error::new(subject, "another format").expected(index::SCHEMA).found(index.schema));
        }
        Ok(index)
    }

    fn fetch_index(&self, subject: &str, known: &str) -> Result<Vec<u8>> {
        let bytes = self.store.get(index::FILE, OUTPUT_BYTES_MAX)?.unwrap_or_default();
        if hash(&bytes) != known {
            return Err(Error::new(subject, "belongs to another manifest than the one beside it")
                .hint("a push that was interrupted, or is under way? push it again"));
        }
        self.counts.fetched(bytes.len(), self.store.url());
        self.cache.put(known, &bytes);
        Ok(bytes)
    }

    /// The files that are read whole: graphs, hashes, and what was only seen.
    fn beside(&self, manifest: &Manifest) -> Result<Vec<String>> {
        let graphs = manifest.graphs.iter().map(|graph| graph.file.clone());
        let hashes = manifest.steps.iter().filter_map(|step| step.hashes.clone());
        let mut names: Vec<String> = graphs.chain(hashes).collect();
        let all = names.iter().chain(manifest.steps.iter().map(|step| &step.file));
        if let Some(outside) = all.into_iter().find(|name| name.is_empty() || name.contains(['/', '\\'])) {
            return Err(Error::new(self.store.url(), "a file of the manifest lies outside the folder")
                .expected("a file name")
                .found(outside));
        }
        let seen = parity_dump::seen::SEEN_FILE;
        let has_seen = match &self.index {
            Some(index) => index.files.contains_key(seen),
            None => self.store.head(seen).is_ok(),
        };
        names.extend(has_seen.then(|| seen.to_owned()));
        Ok(names)
    }

    /// A whole file; from the cache where its hash is known.
    fn whole(&self, name: &str, known: Option<&str>) -> Result<Vec<u8>> {
        if let Some(bytes) = known.and_then(|known| self.cached_file(known)) {
            return Ok(bytes);
        }
        let bytes = self.store.get(name, TEXT_BYTES_MAX)?.ok_or_else(|| {
            Error::new(format!("{}/{name}", self.store.url()), "there is no such file")
                .expected("a dump, as `parity push` puts it there")
        })?;
        self.counts.fetched(bytes.len(), self.store.url());
        if let Some(known) = known {
            self.check(name, &bytes, known)?;
            self.cache.put(known, &bytes);
        }
        Ok(bytes)
    }

    /// A file of the cache, of whatever length, that has the hash it is called by.
    fn cached_file(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = self.cache.get_any(key).filter(|bytes| hash(bytes) == key)?;
        self.counts.cached.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Some(bytes)
    }

    fn check(&self, what: &str, bytes: &[u8], known: &str) -> Result<()> {
        let found = hash(bytes);
        if found == known {
            return Ok(());
        }
        Err(Error::new(format!("{}/{what}", self.store.url()), "is not what was pushed")
            .expected(format!("SHA-256 {known}, as the index has it"))
            .found(found)
            .hint("push the dump again"))
    }

    /// The header of a step file.
    fn head(&self, file: &str) -> Result<Head> {
        let subject = || format!("{}/{file}", self.store.url());
        let wrong = |e: String| Error::new(subject(), format!("is no step of a dump: {e}"));
        let known = self
            .index
            .as_ref()
            .map(|index| index.steps.get(file).ok_or_else(|| wrong("the index does not have it".to_owned())));
        if let Some(known) = known.transpose()? {
            let cached =
                self.cache.get(&known.head, known.head_bytes).filter(|bytes| hash(bytes) == known.head);
            let bytes = match cached {
                Some(bytes) => bytes,
                None => {
                    let bytes = self.range(file, 0..known.head_bytes.min(HEAD_MAX))?;
                    self.check(file, &bytes, &known.head)?;
                    self.cache.put(&known.head, &bytes);
                    bytes
                }
            };
            return Ok(Head { tensors: packed::stored(&bytes).map_err(wrong)?, version: String::new() });
        }
        let about = self.store.head(file)?;
        let version = [about.e_tag.unwrap_or_default(), about.last_modified.to_rfc3339()].join(" ");
        let mut bytes = self.range(file, 0..HEAD.min(about.size))?;
        let length = bytes.first_chunk::<LENGTH_BYTES>().map(|length| u64::from_le_bytes(*length));
        let end = length.and_then(|length| length.checked_add(LENGTH_BYTES as u64));
        let end = end
            .filter(|end| *end <= HEAD_MAX.min(about.size))
            .ok_or_else(|| wrong("no header".to_owned()))?;
        if end > bytes.len() as u64 {
            let rest = self.range(file, bytes.len() as u64..end)?;
            bytes.extend(rest);
        }
        Ok(Head {
            tensors: packed::stored(&bytes).map_err(wrong)?,
            version: format!("{} {version}", about.size),
        })
    }

    fn range(&self, file: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        let bytes = self.store.ranges(file, &[range])?.pop().unwrap_or_default();
        self.counts.fetched(bytes.len(), self.store.url());
        Ok(bytes)
    }

    /// Writes a step file with the chosen tensors.
    fn step(&self, dir: &Path, file: &str, head: &Head, chosen: &[Stored]) -> Result<()> {
        let path = dir.join(file);
        let failed = |e: std::io::Error| Error::file(&path, format!("cannot be written: {e}"));
        let mut out = BufWriter::new(fs::File::create(&path).map_err(failed)?);
        let mut ready: HashMap<&str, Vec<u8>> = HashMap::new();
        // The closure that is asked for bytes says what is wrong in words; the error itself is kept here.
        let mut error = None;
        let mut left = chosen;
        let get = |tensor: &Stored| {
            if !ready.contains_key(tensor.name.as_str()) {
                let mut sum = 0;
                let n = left
                    .iter()
                    .take_while(|t| {
                        sum += t.range.end - t.range.start;
                        sum <= BATCH
                    })
                    .count();
                let (batch, rest) = left.split_at(n.max(1).min(left.len()));
                left = rest;
                match self.batch(file, head, batch) {
                    Ok(bytes) => ready.extend(batch.iter().map(|t| t.name.as_str()).zip(bytes)),
                    Err(e) => error = Some(e),
                }
            }
            ready.remove(tensor.name.as_str()).ok_or_else(|| format!("{}: was not fetched", tensor.name))
        };
        let written = packed::write_plain(chosen, get, &mut out);
        match error {
            Some(error) => Err(error),
            None => {
                let subject = || format!("{}/{file}", self.store.url());
                written.map_err(|what| Error::new(subject(), format!("cannot be unpacked: {what}")))?;
                out.flush().map_err(failed)
            }
        }
    }

    /// The stored bytes of tensors that lie in a row or near: from the cache, the others from the server.
    fn batch(&self, file: &str, head: &Head, batch: &[Stored]) -> Result<Vec<Vec<u8>>> {
        let known = self.index.as_ref().and_then(|index| index.steps.get(file));
        let key = |tensor: &Stored| match known {
            Some(step) => step.tensors.get(&tensor.name).cloned().ok_or_else(|| {
                Error::new(
                    format!("{}/{file}", self.store.url()),
                    format!("the index has no {}", tensor.name),
                )
            }),
            None => Ok(hash(
                format!("{}\0{file}\0{}\0{:?}", self.store.url(), head.version, tensor.range).as_bytes(),
            )),
        };
        let keys: Vec<String> = batch.iter().map(key).collect::<Result<_>>()?;
        let cached = |(tensor, key): (&Stored, &String)| {
            let bytes = self.cache.get(key, tensor.range.end - tensor.range.start)?;
            (known.is_none() || hash(&bytes) == *key).then_some(bytes)
        };
        let mut all: Vec<Option<Vec<u8>>> = batch.iter().zip(&keys).map(cached).collect();
        let held: usize = all.iter().flatten().map(Vec::len).sum();
        self.counts.cached.fetch_add(held as u64, Ordering::Relaxed);
        let missing: Vec<usize> = (0..batch.len()).filter(|i| all[*i].is_none()).collect();
        let ranges: Vec<_> = missing.iter().map(|i| batch[*i].range.clone()).collect();
        if !ranges.is_empty() {
            for (i, bytes) in missing.into_iter().zip(self.store.ranges(file, &ranges)?) {
                self.counts.fetched(bytes.len(), self.store.url());
                if known.is_some() {
                    self.check(&format!("{file}: {}", batch[i].name), &bytes, &keys[i])?;
                }
                self.cache.put(&keys[i], &bytes);
                all[i] = Some(bytes);
            }
        }
        Ok(all.into_iter().flatten().collect())
    }
}

/// The graphs that were fetched.
fn graphs(dir: &Path, manifest: &Manifest) -> Result<Vec<parity_graph::Graph>> {
    let read = |file: &String| -> Result<Vec<parity_graph::Graph>> {
        let path = dir.join(file);
        let text = crate::files::read(&path, TEXT_BYTES_MAX)?;
        parity_graph::text::read(&text).map_err(|e| Error::file(&path, format!("is no graph: {e}")))
    };
    let all: Vec<_> = manifest.graphs.iter().map(|graph| read(&graph.file)).collect::<Result<_>>()?;
    Ok(all.into_iter().flatten().collect())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| Error::file(path, format!("cannot be written: {e}")))
}
