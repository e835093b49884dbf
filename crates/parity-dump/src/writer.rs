//! Writes a dump folder step by step, so that an interruption loses at most the step it falls into.
//!
//! A step file is written under a temporary name behind a reserved header, then renamed; the manifest
//! is replaced after every step, and says `complete` only at the end.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::dtype::Element;
use crate::error::DumpError;
use crate::files::{failed, write_manifest};
use crate::life::Life;
use crate::manifest::{GraphFile, LEAF_PREFIX, MANIFEST_FILE, Manifest, ModelInfo, Producer, Step};
use crate::seen::{self, SEEN_FILE, SeenTensors};

/// Begins the name of the folder, within that of a dump, of another context of the same program: its number follows.
pub const CONTEXT: &str = "context-";

/// Bytes that one tensor's entry takes in a safetensors header at most: name 96, shape and offsets six
/// numbers of up to 20 digits, and 60 of punctuation.
const ENTRY_BYTES: usize = 96 + 6 * 20 + 60;

/// Bytes to keep free in front of a step's tensors for the safetensors header of `tensors` entries;
/// a multiple of 8, so that the tensors behind it are aligned.
pub const fn header_bytes(tensors: usize) -> usize {
    ((tensors + 1) * ENTRY_BYTES).next_multiple_of(8)
}

/// Writes a dump folder.
pub struct Writer {
    dir: PathBuf,
    manifest: Manifest,
    open: Option<OpenStep>,
}

/// A step that tensors are being appended to.
struct OpenStep {
    path: PathBuf,
    file: BufWriter<File>,
    positions: Vec<u32>,
    header: HeaderText,
    header_bytes: usize,
    rows: Vec<(Checkpoint, Vec<u32>)>,
    /// Index of the graph that computes it.
    graph: Option<usize>,
    /// Its file of hashes.
    hashes: Option<String>,
    life: Life,
}

impl Writer {
    /// Starts a dump in `dir`, which must be new, empty or an earlier dump (which is replaced).
    pub fn create(dir: &Path, producer: Producer, model: ModelInfo) -> Result<Writer, DumpError> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, "cannot create the folder", &e))?;
        clear(dir)?;
        let writer = Writer { dir: dir.to_owned(), manifest: Manifest::new(producer, model), open: None };
        writer.write_manifest()?;
        Ok(writer)
    }

    /// What the manifest will say, to add a prompt, provenance or unmapped nodes to.
    pub fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// Starts a step of at most `tensors` tensors: `tokens` stand at `positions`, both (T,).
    pub fn begin_step(&mut self, tokens: &[u32], positions: &[u32], tensors: usize) -> Result<(), DumpError> {
        assert!(self.open.is_none(), "the step before is finished");
        assert_eq!(tokens.len(), positions.len(), "a position for each token");
        for (&token, &position) in tokens.iter().zip(positions) {
            let position = position as usize;
            if position >= self.manifest.tokens.len() {
                self.manifest.tokens.resize(position + 1, 0);
            }
            self.manifest.tokens[position] = token;
        }
        let path = self.dir.join(format!("step-{:04}.safetensors.part", self.manifest.steps.len()));
        let file = File::create(&path).map_err(|e| failed(&path, "cannot create the file", &e))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let header_bytes = header_bytes(tensors);
        file.seek(SeekFrom::Start(header_bytes as u64 + 8)).map_err(|e| failed(&path, "cannot write", &e))?;
        let (header, rows) = (HeaderText::default(), Vec::new());
        self.open = Some(OpenStep {
            path,
            file,
            positions: positions.to_vec(),
            header,
            header_bytes,
            rows,
            graph: None,
            hashes: None,
            life: Life::default(),
        });
        Ok(())
    }

    /// Appends one tensor of the open step: little-endian `bytes`, C-contiguous, slowest axis first.
    ///
    /// `rows` are the positions of its token rows where these are not all of the step's.
    pub fn tensor(
        &mut self,
        checkpoint: Checkpoint,
        element: Element,
        shape: &[usize],
        bytes: &[u8],
        rows: Option<&[u32]>,
    ) -> Result<(), DumpError> {
        assert_eq!(shape.iter().product::<usize>() * element.size(), bytes.len(), "{checkpoint} {shape:?}");
        self.begin_tensor(checkpoint, element, shape, rows);
        self.append(bytes)
    }

    /// Announces a tensor whose bytes follow in pieces through [`Writer::append`], all of them before
    /// the next tensor.
    pub fn begin_tensor(
        &mut self,
        checkpoint: Checkpoint,
        element: Element,
        shape: &[usize],
        rows: Option<&[u32]>,
    ) {
        let step = self.open.as_mut().expect("a step is open");
        let bytes = shape.iter().product::<usize>() * element.size();
        step.header.entry(&checkpoint.to_string(), element.name(), shape, bytes as u64);
        if let Some(rows) = rows {
            step.rows.push((checkpoint, rows.to_vec()));
        }
    }

    /// Announces an input of the step, by its name without [`LEAF_PREFIX`]; its bytes follow as those of a tensor.
    ///
    /// `dtype` is `F32`, `F16`, `I32` or `I64`.
    pub fn begin_leaf(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: usize) {
        let step = self.open.as_mut().expect("a step is open");
        step.header.entry(&format!("{LEAF_PREFIX}{name}"), dtype, shape, bytes as u64);
    }

    /// Writes a graph's text beside the steps: a number by which [`Writer::step_graph`] refers to it.
    pub fn graph(&mut self, text: &str) -> Result<usize, DumpError> {
        let index = self.manifest.graphs.len();
        let file = format!("graph-{index:04}.txt");
        let path = self.dir.join(&file);
        let part = self.dir.join(format!("{file}.part"));
        fs::write(&part, text).map_err(|e| failed(&part, "cannot write", &e))?;
        fs::rename(&part, &path).map_err(|e| failed(&part, "cannot rename", &e))?;
        self.manifest.graphs.push(GraphFile { file, steps: Vec::new() });
        Ok(index)
    }

    /// Says which graph computes the open step.
    pub fn step_graph(&mut self, index: usize) {
        self.open.as_mut().expect("a step is open").graph = Some(index);
    }

    /// Says of the open step at which positions and of which sequences its rows are, and what happened before it: `positions`
    /// were numbers of rows then, counted over all steps.
    pub fn step_life(&mut self, life: Life) {
        self.open.as_mut().expect("a step is open").life = life;
    }

    /// Writes the hashes of the open step, lines of [`crate::hashes::Hashed`], whose values are not kept.
    pub fn step_hashes(&mut self, lines: &str) -> Result<(), DumpError> {
        let name = format!("step-{:04}.hashes", self.manifest.steps.len());
        let part = self.dir.join(format!("{name}.part"));
        fs::write(&part, lines).map_err(|e| failed(&part, "cannot write", &e))?;
        fs::rename(&part, self.dir.join(&name)).map_err(|e| failed(&part, "cannot rename", &e))?;
        self.open.as_mut().expect("a step is open").hashes = Some(name);
        Ok(())
    }

    /// Appends the next bytes of the tensor that was begun last.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), DumpError> {
        let step = self.open.as_mut().expect("a step is open");
        step.file.write_all(bytes).map_err(|e| failed(&step.path, "cannot write", &e))
    }

    /// Notes that the open step has no row of a checkpoint that other steps have.
    pub fn no_rows(&mut self, checkpoint: Checkpoint) {
        self.open.as_mut().expect("a step is open").rows.push((checkpoint, Vec::new()));
    }

    /// Drops the open step, if any, and its file: it was interrupted.
    pub fn discard_step(&mut self) {
        if let Some(step) = self.open.take() {
            let (file, _unwritten) = step.file.into_parts();
            drop(file);
            // The file has only its temporary name: one that stays is never read.
            let _ = fs::remove_file(&step.path);
        }
    }

    /// Writes the manifest as it stands, with the dump still incomplete.
    pub fn save_manifest(&self) -> Result<(), DumpError> {
        self.write_manifest()
    }

    /// [`Writer::tensor`] from values.
    pub fn tensor_f32(
        &mut self,
        checkpoint: Checkpoint,
        shape: &[usize],
        values: &[f32],
    ) -> Result<(), DumpError> {
        if cfg!(target_endian = "little") {
            // SAFETY: every bit pattern of an f32 is four valid bytes.
            let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
            return self.tensor(checkpoint, Element::F32, shape, bytes, None);
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(checkpoint, Element::F32, shape, &bytes, None)
    }

    /// Finishes the open step: its file gets its header and its name, and the manifest lists it.
    pub fn end_step(&mut self) -> Result<(), DumpError> {
        let mut step = self.open.take().expect("a step is open");
        let header = step.header.finish(step.header_bytes).ok_or_else(|| {
            DumpError::new(&step.path, "too many tensors in one step")
                .expected_found(format!("a header of {} bytes", step.header_bytes), "a longer one")
        })?;
        let written = step.file.seek(SeekFrom::Start(0)).and_then(|_| {
            step.file.write_all(&(step.header_bytes as u64).to_le_bytes())?;
            step.file.write_all(&header)?;
            step.file.flush()
        });
        written.map_err(|e| failed(&step.path, "cannot write", &e))?;
        drop(step.file);
        let name = format!("step-{:04}.safetensors", self.manifest.steps.len());
        fs::rename(&step.path, self.dir.join(&name)).map_err(|e| failed(&step.path, "cannot rename", &e))?;
        self.merge_rows(&step.positions, step.rows);
        if let Some(graph) = step.graph.and_then(|index| self.manifest.graphs.get_mut(index)) {
            graph.steps.push(self.manifest.steps.len());
        }
        let OpenStep { positions, hashes, life, .. } = step;
        self.manifest.steps.push(Step { file: name, positions, hashes, life });
        self.write_manifest()
    }

    /// Writes what is known of checkpoints that were seen only in part.
    pub fn seen(&self, seen: &SeenTensors) -> Result<(), DumpError> {
        seen::write(&self.dir, seen)
    }

    /// Drops the open step and says that the dump ends here, for a `reason`.
    pub fn stop(&mut self, reason: &str) -> Result<(), DumpError> {
        self.discard_step();
        self.manifest.stop(reason);
        self.write_manifest()
    }

    /// Marks the dump complete, unless it stopped.
    pub fn finish(mut self) -> Result<(), DumpError> {
        assert!(self.open.is_none(), "the last step is finished");
        self.manifest.complete = self.manifest.stopped.is_none();
        self.write_manifest()
    }

    /// Notes which positions each checkpoint has, once one of them lacks some.
    fn merge_rows(&mut self, positions: &[u32], partial: Vec<(Checkpoint, Vec<u32>)>) {
        let earlier: Vec<u32> =
            self.manifest.steps.iter().flat_map(|s| s.positions.iter().copied()).collect();
        for (&known, rows) in &mut self.manifest.rows {
            if !partial.iter().any(|(checkpoint, _)| *checkpoint == known) {
                rows.extend_from_slice(positions);
            }
        }
        for (checkpoint, rows) in partial {
            self.manifest.rows.entry(checkpoint).or_insert_with(|| earlier.clone()).extend(rows);
        }
    }

    fn write_manifest(&self) -> Result<(), DumpError> {
        write_manifest(&self.dir, &self.manifest)
    }
}

/// The JSON header of a safetensors file whose tensors are appended one after another.
#[derive(Clone, Debug, Default)]
pub struct HeaderText {
    json: String,
    end: u64,
}

impl HeaderText {
    /// Adds a tensor of `bytes` bytes behind those before it.
    pub fn entry(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: u64) {
        let separator = if self.json.is_empty() { '{' } else { ',' };
        let begin = self.end;
        self.end += bytes;
        // Names are checkpoint ids or safetensors names, which JSON need not escape.
        let _ = write!(
            self.json,
            r#"{separator}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{}]}}"#,
            self.end
        );
    }

    /// The header padded with spaces to `bytes`; `None` where it is longer.
    pub fn finish(&self, bytes: usize) -> Option<Vec<u8>> {
        let mut text = if self.json.is_empty() { "{".to_owned() } else { self.json.clone() };
        text.push('}');
        let mut header = text.into_bytes();
        if header.len() > bytes {
            return None;
        }
        header.resize(bytes, b' ');
        Some(header)
    }
}

/// Removes what an earlier dump left in the folder, those of other contexts of its program too, and nothing else.
fn clear(dir: &Path) -> Result<(), DumpError> {
    let mut left = Vec::new();
    list(dir, true, &mut left)?;
    for (path, is_folder) in left {
        let removed = if is_folder { fs::remove_dir(&path) } else { fs::remove_file(&path) };
        removed.map_err(|e| failed(&path, "cannot remove it", &e))?;
    }
    Ok(())
}

/// What a dump's folder holds, with whether it is a folder, which comes behind what is in it.
///
/// # Errors
/// Where something in it is no part of a dump.
fn list(dir: &Path, may_hold_others: bool, all: &mut Vec<(PathBuf, bool)>) -> Result<(), DumpError> {
    let entries = fs::read_dir(dir).map_err(|e| failed(dir, "cannot list the folder", &e))?;
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let ours = match name.strip_prefix(CONTEXT) {
            Some(number) => is_folder && may_hold_others && number.parse::<usize>().is_ok(),
            None => ["step-", "graph-", MANIFEST_FILE, SEEN_FILE].iter().any(|start| name.starts_with(start)),
        };
        if !ours || is_folder && !name.starts_with(CONTEXT) {
            return Err(DumpError::new(dir, "the folder holds something that is no dump")
                .expected_found("an empty folder or an earlier dump", format!("`{name}` in it"))
                .hint("choose another folder"));
        }
        if is_folder {
            list(&path, false, all)?;
        }
        all.push((path, is_folder));
    }
    Ok(())
}
