//! What the machine computed as a dump that carries its graphs and inputs, as a recording of llama.cpp does.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use parity_dump::manifest::{ModelInfo, Producer};
use parity_dump::{Dump, Element, Writer};
use parity_graph::{Id, text};
use parity_record::map::Capture;

use super::RunOptions;
use super::steps::Prepared;
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;

/// The values of a node as a dump has them: token rows first, attention matrices as (H, T, S).
pub struct Rows<'a> {
    /// Which node.
    pub id: Checkpoint,
    /// Position of each row.
    pub positions: &'a [u32],
    /// Slowest axis first.
    pub shape: &'a [usize],
    /// In that shape.
    pub values: &'a [f32],
}

impl<'a> Rows<'a> {
    /// Of a node that is shown as `capture` says.
    pub fn new(id: Checkpoint, capture: &'a Capture, positions: &'a [u32], values: &'a [f32]) -> Rows<'a> {
        Rows { id, positions, shape: &capture.shape, values }
    }

    /// Where the elements of a row begin, and how many lie there: of a matrix (H, T, S) one piece for each head, cut to
    /// the positions that the row's token can see.
    fn pieces(&self, row: usize) -> Vec<std::ops::Range<usize>> {
        let piece = |start: usize, width: usize| start..start + width;
        match (self.id.kind().is_optional(), self.shape) {
            (true, &[heads, rows, cached]) => {
                let seen = cached.min(self.positions[row] as usize + 1);
                (0..heads).map(|head| piece((head * rows + row) * cached, seen)).collect()
            }
            _ => {
                let width = self.values.len() / self.positions.len().max(1);
                vec![piece(row * width, width)]
            }
        }
    }

    /// The last row of what is no matrix.
    pub fn last(&self) -> Option<&'a [f32]> {
        let width = self.values.len() / self.positions.len().max(1);
        self.values.get(self.values.len().checked_sub(width)?..)
    }

    /// Puts the reference's rows into `theirs`, laid out as these, and 1 into `known` wherever one stands.
    pub fn take(&self, dump: &Dump, common: u32, theirs: &mut [f32], known: &mut [f32]) {
        let mut buffer = Vec::new();
        for (row, &position) in self.positions.iter().enumerate().filter(|(_, position)| **position < common)
        {
            let Some(values) = Recording::row(dump, self.id, position, &mut buffer) else { continue };
            let pieces = self.pieces(row);
            if values.len() != pieces.iter().map(ExactSizeIterator::len).sum::<usize>() {
                continue;
            }
            let mut rest = values;
            for piece in pieces {
                let (first, after) = rest.split_at(piece.len());
                theirs[piece.clone()].copy_from_slice(first);
                known[piece].fill(1.0);
                rest = after;
            }
        }
    }
}

/// A dump that is being written.
pub struct Sink {
    writer: Writer,
    /// Numbers of the graphs that were written, by the run's own.
    graphs: BTreeMap<usize, usize>,
    /// Of the tokens of the open step.
    positions: Vec<u32>,
}

impl Sink {
    /// Begins a dump in a folder.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn new(dir: &Path, producer: Producer, model: ModelInfo, options: &RunOptions) -> Result<Sink> {
        let mut writer = Writer::create(dir, producer, model)?;
        writer.manifest_mut().prompt.clone_from(&options.prompt);
        Ok(Sink { writer, graphs: BTreeMap::new(), positions: Vec::new() })
    }

    /// Begins a step with its inputs.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn begin(
        &mut self,
        number: usize,
        graph: &Prepared<'_>,
        tokens: &[u32],
        positions: &[u32],
        inputs: &dyn Fn(Id) -> Option<Vec<f64>>,
    ) -> Result<()> {
        let tensors = &graph.labelled.program.graph;
        let known = match self.graphs.get(&number) {
            Some(known) => *known,
            None => self.writer.graph(&text::write(tensors))?,
        };
        self.graphs.insert(number, known);
        self.positions = positions.to_vec();
        self.writer.begin_step(tokens, positions, tensors.tensors.len())?;
        self.writer.step_graph(known);
        for leaf in &graph.leaves {
            let tensor = tensors.get(leaf.leaf);
            let Some(values) = inputs(leaf.leaf) else { continue };
            let Some((dtype, bytes)) = encoded(&tensor.dtype, &values) else { continue };
            let rank = tensor.ne.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1);
            let shape: Vec<usize> = tensor.ne[..rank].iter().rev().copied().collect();
            self.writer.begin_leaf(&leaf.name, dtype, &shape, bytes.len());
            self.writer.append(&bytes)?;
        }
        Ok(())
    }

    /// Writes the values of a node; of an attention matrix the columns that its tokens can see.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn tensor(&mut self, rows: &Rows<'_>) -> Result<()> {
        let (mut shape, mut values) = (rows.shape.to_vec(), std::borrow::Cow::Borrowed(rows.values));
        if let (true, &[heads, n, cached]) = (rows.id.kind().is_optional(), rows.shape) {
            let seen = rows.positions.last().map_or(0, |&last| last as usize + 1).min(cached);
            shape = vec![heads, n, seen];
            values = rows.values.chunks(cached.max(1)).flat_map(|row| &row[..seen]).copied().collect();
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let some = Some(rows.positions).filter(|positions| *positions != self.positions);
        Ok(self.writer.tensor(rows.id, Element::F32, &shape, &bytes, some)?)
    }

    /// Ends the step.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn end(&mut self) -> Result<()> {
        Ok(self.writer.end_step()?)
    }

    /// Ends the dump.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(self) -> Result<()> {
        Ok(self.writer.finish()?)
    }
}

/// The bytes of a leaf in the type that its graph has it in, with the name that safetensors has for that; `None` of a
/// type that dumps do not hold.
fn encoded(dtype: &str, values: &[f64]) -> Option<(&'static str, Vec<u8>)> {
    Some(match dtype {
        "f32" => ("F32", values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect()),
        "f16" => ("F16", values.iter().flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect()),
        "i32" => ("I32", values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect()),
        "i64" => ("I64", values.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect()),
        _ => return None,
    })
}
