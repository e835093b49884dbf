//! The rows of one checkpoint, wherever its steps lie.

use crate::checkpoint::Checkpoint;
use crate::dtype::Element;

/// All rows of one checkpoint, over all steps.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub(crate) parts: Vec<Part>,
    /// (position, part, row within the part), by position.
    pub(crate) rows: Vec<(u32, u32, u32)>,
    /// Whether its rows are read in another order than they lie in.
    pub(crate) reordered: bool,
}

/// The tensor of one checkpoint in one step.
#[derive(Clone, Debug)]
pub struct Part {
    /// Index of the file.
    pub(crate) file: usize,
    /// Index of the step.
    pub(crate) step: usize,
    /// Byte offset of the first element in the file.
    pub(crate) offset: usize,
    /// Element type.
    pub element: Element,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// Whether the shape is (H, T, S), whose token rows are not contiguous.
    pub(crate) matrix: bool,
    /// Token rows of the tensor that it is a part of: of all steps, where one file holds them.
    pub(crate) of_rows: usize,
}

impl Recorded {
    /// Positions that were recorded, ascending.
    pub fn positions(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.rows.iter().map(|row| row.0)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether all of it lies in the dump as f32, the type that values of any engine fit in.
    pub fn is_in_f32(&self) -> bool {
        self.parts.iter().all(|part| part.element == Element::F32)
    }

    /// Index of the row at `position`.
    pub fn find(&self, position: u32) -> Option<usize> {
        self.rows.binary_search_by_key(&position, |row| row.0).ok()
    }

    /// Elements of the row with this index, as [`Dump::row`] gives it.
    pub fn width_of(&self, row: usize) -> usize {
        let (position, part, _) = self.rows[row];
        let part = &self.parts[part as usize];
        match part.matrix {
            true => part.shape[0] * part.shape[2].min(position as usize + 1),
            false => part.row_width(),
        }
    }

    /// The tensor of the step in which the row with this index was computed.
    pub fn part_of(&self, row: usize) -> &Part {
        &self.parts[self.rows[row].1 as usize]
    }

    /// Elements of one row, of the first part; the attention matrices' rows differ.
    pub fn width(&self) -> usize {
        self.parts.first().map_or(0, Part::row_width)
    }

    /// Shape of one token row, e.g. [H, E], of the first part; [H, S] of the attention matrices.
    pub fn row_shape(&self) -> Vec<usize> {
        self.parts.first().map_or(Vec::new(), |part| match part.matrix {
            true => vec![part.shape[0], part.shape[2]],
            false => part.shape[1..].to_vec(),
        })
    }

    /// The tensors of the steps, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
}

impl Part {
    pub(crate) fn new(
        checkpoint: Checkpoint,
        (file, step): (usize, usize),
        offset: usize,
        element: Element,
        shape: Vec<usize>,
    ) -> Self {
        let matrix = checkpoint.kind().is_optional();
        let of_rows = shape.get(usize::from(matrix)).copied().unwrap_or(0);
        Part { file, step, offset, element, shape, matrix, of_rows }
    }

    /// The rows of one step, where the tensor holds those of all steps, one step behind the other.
    pub(crate) fn of_step(&self, step: usize, first: usize, rows: usize) -> Part {
        let axis = self.axis();
        let mut part = Part { step, ..self.clone() };
        part.offset += first * self.shape[axis + 1..].iter().product::<usize>() * self.element.size();
        part.shape[axis] = rows;
        part
    }

    /// Axis of the token rows.
    pub(crate) fn axis(&self) -> usize {
        usize::from(self.matrix)
    }

    /// Token rows of the whole tensor; none where it has not so many axes.
    pub(crate) fn rows(&self) -> Option<usize> {
        self.shape.get(self.axis()).copied()
    }

    /// All values, in the order of the shape.
    pub(crate) fn values(&self, file: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; self.shape.iter().product()];
        let of_one = values.len() / if self.matrix { self.shape[0].max(1) } else { 1 };
        let apart = if self.matrix { self.of_rows * self.shape[2] } else { 0 };
        for (head, values) in values.chunks_exact_mut(of_one.max(1)).enumerate() {
            let start = self.offset + head * apart * self.element.size();
            self.element.decode(&file[start..start + of_one * self.element.size()], values);
        }
        values
    }

    /// What all steps have in common: the axes of a token row, of the attention matrices the heads.
    pub(crate) fn of_one_row(&self) -> &[usize] {
        if self.matrix { &self.shape[..1] } else { &self.shape[1..] }
    }

    pub(crate) fn row_width(&self) -> usize {
        self.shape[1..].iter().product()
    }
}
