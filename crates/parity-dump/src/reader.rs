//! Reads a dump, memory-mapped: a folder, or one `.safetensors` file from a foreign engine.
//!
//! Rows are token positions: the steps of a dump are laid side by side, so that a position is one row
//! of a checkpoint whether it was computed in a prefill, in a chunk or as one decode step.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;

use crate::checkpoint::{Checkpoint, usual_order};
use crate::dtype::Element;
use crate::error::DumpError;
use crate::files::{element_of, map_file, read_manifest, unreadable};
use crate::leaves::LeafPart;
use crate::life::Chosen;
use crate::manifest::{LEAF_PREFIX, Manifest};
use crate::orders::Orders;
use crate::packed::{ZSTD_SHUFFLE, map_step};
use crate::recorded::{Part, Recorded};
use crate::seen::{self, SeenPart, SeenTensors};

/// A dump on disk.
pub struct Dump {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) files: Vec<Mmap>,
    pub(crate) tensors: HashMap<Checkpoint, Recorded>,
    seen: SeenTensors,
    foreign: Vec<String>,
    notes: Vec<String>,
    /// Inputs by step and name.
    pub(crate) leaves: BTreeMap<(usize, String), LeafPart>,
    /// Checkpoints whose rows are read in another order than they lie in.
    pub(crate) orders: Orders,
    /// Numbers of the rows that are looked at, where not all are.
    pub(crate) chosen: Option<Chosen>,
}

impl Dump {
    /// Opens a dump folder or a single `.safetensors` file.
    ///
    /// # Errors
    /// Names the file and what is wrong with it: no manifest, another schema, a shape that does not fit
    /// the positions, an element type other than F32, F16, BF16.
    pub fn open(path: &Path) -> Result<Dump, DumpError> {
        if path.is_dir() { Dump::open_folder(path) } else { crate::single::open(path) }
    }

    fn open_folder(dir: &Path) -> Result<Dump, DumpError> {
        let mut dump = Dump::from_parts(dir, read_manifest(dir)?, Vec::new());
        for (index, step) in dump.manifest.steps.clone().into_iter().enumerate() {
            if step.file.contains(['/', '\\']) {
                return Err(DumpError::new(dir, "a step file lies outside the folder")
                    .expected_found("a file name", step.file));
            }
            let path = dir.join(&step.file);
            dump.add_file(&path, index, &step.positions)?;
        }
        dump.sort_rows();
        dump.seen = seen::read(dir, dump.manifest.tokens.len())?;
        Ok(dump)
    }

    /// A dump of one mapped file whose tensors are listed by the caller.
    pub(crate) fn from_parts(path: &Path, manifest: Manifest, foreign: Vec<String>) -> Dump {
        let (tensors, seen) = (HashMap::new(), SeenTensors::new());
        let (files, notes) = (Vec::new(), Vec::new());
        let (path, leaves, orders) = (path.to_owned(), BTreeMap::new(), Orders::default());
        Dump { path, manifest, files, tensors, seen, foreign, notes, leaves, orders, chosen: None }
    }

    /// Notes the tensors whose names are no checkpoint ids.
    pub(crate) fn set_foreign(&mut self, names: Vec<String>) {
        self.foreign = names;
    }

    /// Takes the arithmetic that a user says its producer has, whatever the dump declares.
    pub fn declare(&mut self, numerics: String) {
        self.manifest.producer.numerics = Some(numerics);
    }

    /// Takes no notice of the graphs that the dump brings: nothing says what their inputs were.
    pub fn without_graphs(&mut self) {
        self.manifest.graphs.clear();
    }

    /// Says that this is the dump that was made of another engine's at `path`: what of that is no checkpoint, and what
    /// a reader must know of how it was made.
    pub fn stands_for(&mut self, path: &Path, foreign: Vec<String>, notes: Vec<String>) {
        (self.path, self.foreign, self.notes) = (path.to_owned(), foreign, notes);
    }

    /// Reads checkpoints as others from here on, where `to` names one.
    pub fn rename(&mut self, to: impl Fn(Checkpoint) -> Option<Checkpoint>) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(id, recorded)| (to(id).unwrap_or(id), recorded)).collect();
    }

    fn add_file(&mut self, path: &Path, step: usize, positions: &[u32]) -> Result<(), DumpError> {
        let packed = self.manifest.requires.iter().any(|name| name == ZSTD_SHUFFLE);
        let map = if packed { map_step(path)? } else { map_file(path)? };
        let tensors = SafeTensors::deserialize(&map).map_err(|e| unreadable(path, &e))?;
        let file = self.files.len();
        let mut parts = Vec::new();
        for (name, view) in tensors.iter() {
            let offset = view.data().as_ptr() as usize - map.as_ptr() as usize;
            if self.take_leaf(step, name, &view, (file, offset)) {
                continue;
            }
            let Some(checkpoint) = self.checkpoint_of(name) else {
                self.foreign.push(name.to_owned());
                continue;
            };
            let element = element_of(path, name, view.dtype())?;
            let part = Part::new(checkpoint, (file, step), offset, element, view.shape().to_vec());
            parts.push((checkpoint, part));
        }
        for (checkpoint, part) in parts {
            let rows = self.rows_of(checkpoint, positions);
            self.add_part(path, checkpoint, part, &rows)?;
        }
        self.files.push(map);
        Ok(())
    }

    /// The checkpoint that a tensor's name stands for. Where a graph says what is computed, every name of the
    /// grammar is one; where none does, a name outside of layers has no dot, as modules of other engines have, and
    /// one that is a slip of the pen away from a fixed id is a mistake.
    pub(crate) fn checkpoint_of(&self, name: &str) -> Option<Checkpoint> {
        let checkpoint = name.parse::<Checkpoint>().ok().filter(|_| !name.starts_with(LEAF_PREFIX))?;
        let own = !self.manifest.graphs.is_empty() || checkpoint.kind().is_fixed();
        let plain = checkpoint.layer_index().is_some() || !name.contains('.');
        (own || plain && checkpoint.likely_meant().is_none()).then_some(checkpoint)
    }

    /// The positions that a checkpoint has of a step's.
    pub(crate) fn rows_of(&self, checkpoint: Checkpoint, positions: &[u32]) -> Vec<u32> {
        match self.manifest.rows.get(&checkpoint) {
            Some(listed) => positions.iter().copied().filter(|p| listed.contains(p)).collect(),
            None => positions.to_vec(),
        }
    }

    pub(crate) fn add_map(&mut self, map: Mmap) {
        self.files.push(map);
    }

    pub(crate) fn add_part(
        &mut self,
        path: &Path,
        checkpoint: Checkpoint,
        part: Part,
        positions: &[u32],
    ) -> Result<(), DumpError> {
        let axis = part.axis();
        let fits = match part.matrix {
            true => part.shape.len() == 3,
            false => part.shape.len() >= 2,
        };
        let fits = fits && part.shape[axis] == positions.len();
        if !fits {
            return Err(DumpError::new(path, format!("{checkpoint} has the wrong number of token rows"))
                .expected_found(
                    format!("{} rows on axis {axis}", positions.len()),
                    format!("shape {:?}", part.shape),
                )
                .hint("`positions` of the step and `rows` of the manifest say which rows a tensor has"));
        }
        if positions.is_empty() {
            return Ok(());
        }
        if part.shape.contains(&0) {
            return Err(DumpError::new(path, format!("{checkpoint} has rows without a value"))
                .expected_found("no axis of length 0", format!("shape {:?}", part.shape)));
        }
        // What a graph computes beside the vocabulary may be as wide as the cache, or a state without token rows.
        let known = self.tensors.get(&checkpoint).filter(|_| checkpoint.kind().is_fixed());
        let known = known.and_then(|recorded| recorded.parts.first());
        // Heads may be written as one axis or as two.
        let width = |part: &Part| part.of_one_row().iter().product::<usize>();
        if let Some(known) = known.filter(|known| width(known) != width(&part)) {
            return Err(DumpError::new(path, format!("{checkpoint} changes its shape from step to step"))
                .expected_found(
                    format!("rows of {:?}", known.of_one_row()),
                    format!("rows of {:?}", part.of_one_row()),
                ));
        }
        let recorded = self.tensors.entry(checkpoint).or_insert(Recorded {
            parts: Vec::new(),
            rows: Vec::new(),
            reordered: false,
        });
        let index = recorded.parts.len() as u32;
        recorded.rows.extend(positions.iter().enumerate().map(|(row, &p)| (p, index, row as u32)));
        recorded.parts.push(part);
        Ok(())
    }

    /// Orders every checkpoint's rows by position; where a position was computed twice the later one counts. And
    /// names each foreign tensor once.
    pub(crate) fn sort_rows(&mut self) {
        self.foreign.sort();
        self.foreign.dedup();
        for recorded in self.tensors.values_mut() {
            recorded.rows.sort_by_key(|&(position, part, _)| (position, std::cmp::Reverse(part)));
            recorded.rows.dedup_by_key(|row| row.0);
        }
    }

    /// The folder or file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the dump says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Token at each position; 0 of rows that are not looked at.
    pub fn tokens(&self) -> &[u32] {
        self.chosen.as_ref().map_or(&self.manifest.tokens, |chosen| &chosen.tokens)
    }

    /// Tensors whose names are no checkpoint ids.
    pub fn foreign(&self) -> &[String] {
        &self.foreign
    }

    /// What a reader must know of how it was made of another engine's dump.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Checkpoints in their usual order: which it was, the graph says, where there is one.
    pub fn checkpoints(&self) -> impl Iterator<Item = Checkpoint> + '_ {
        usual_order(self.tensors.keys().copied()).into_iter()
    }

    /// What is known of a checkpoint that was seen only in part, step by step.
    pub fn seen(&self, checkpoint: Checkpoint) -> &[SeenPart] {
        self.seen.get(&checkpoint).map_or(&[], Vec::as_slice)
    }

    /// Checkpoints that were seen only in part, in their usual order.
    pub fn seen_checkpoints(&self) -> impl Iterator<Item = Checkpoint> + '_ {
        usual_order(self.seen.keys().copied()).into_iter()
    }

    /// What was recorded of a checkpoint.
    pub fn get(&self, checkpoint: Checkpoint) -> Option<&Recorded> {
        self.tensors.get(&checkpoint)
    }

    /// First position of the step in which `position` was computed.
    pub fn step_start(&self, position: u32) -> u32 {
        let step = self.manifest.steps.iter().rev().find(|step| step.positions.contains(&position));
        step.and_then(|step| step.positions.iter().min().copied()).unwrap_or(0)
    }

    /// Row `row` of a recorded checkpoint as f32, (width,): see [`Recorded::width`].
    ///
    /// Of attention matrices, (H, S), only the first `position + 1` cached positions of every head are
    /// given, (H, position + 1): the others are masked and their values are nobody's concern.
    pub fn row(&self, recorded: &Recorded, row: usize, out: &mut Vec<f32>) {
        let (position, part, within) = recorded.rows[row];
        let part = &recorded.parts[part as usize];
        let file = &self.files[part.file];
        let size = part.element.size();
        out.clear();
        if part.matrix {
            let (heads, rows, cached) = (part.shape[0], part.of_rows, part.shape[2]);
            let seen = cached.min(position as usize + 1);
            out.resize(heads * seen, 0.0);
            for head in 0..heads {
                let start = part.offset + (head * rows + within as usize) * cached * size;
                part.element
                    .decode(&file[start..start + seen * size], &mut out[head * seen..(head + 1) * seen]);
            }
        } else {
            let width = part.row_width();
            out.resize(width, 0.0);
            let start = part.offset + within as usize * width * size;
            part.element.decode(&file[start..start + width * size], out);
            self.orders.apply(recorded, out);
        }
    }

    /// Rows at `positions` as one matrix, (positions, width); `None` where one of them was not recorded.
    /// For all checkpoints but those whose rows differ in width, as the attention matrices' do.
    pub fn gather(&self, checkpoint: Checkpoint, positions: &[u32]) -> Option<Vec<f32>> {
        let recorded = self.get(checkpoint)?;
        let mut values = Vec::with_capacity(positions.len() * recorded.width());
        let mut row_values = Vec::new();
        for &position in positions {
            values.extend_from_slice(self.row_values(recorded, recorded.find(position)?, &mut row_values));
        }
        Some(values)
    }

    /// [`Dump::row`] where it lies, or converted into `buffer`.
    pub fn row_values<'a>(&'a self, recorded: &Recorded, row: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        if let Some(values) = self.row_in_place(recorded, row) {
            return values;
        }
        self.row(recorded, row, buffer);
        buffer
    }

    /// The row where it lies, (width,): if it lies there as f32, aligned and in one piece.
    fn row_in_place(&self, recorded: &Recorded, row: usize) -> Option<&[f32]> {
        let (_, part, within) = recorded.rows[row];
        let part = &recorded.parts[part as usize];
        let lies_as_read = !part.matrix && part.element == Element::F32 && !self.orders.concern(recorded);
        if !lies_as_read || cfg!(target_endian = "big") {
            return None;
        }
        let bytes = part.row_width() * part.element.size();
        let start = part.offset + within as usize * bytes;
        // SAFETY: any four bytes are an f32.
        let (before, values, after) =
            unsafe { self.files[part.file][start..start + bytes].align_to::<f32>() };
        (before.is_empty() && after.is_empty()).then_some(values)
    }
}
