//! Token rows of a checkpoint in a step, which of the attention matrices do not lie side by side.

use crate::checkpoint::Checkpoint;

/// The token rows of one checkpoint in one step.
pub struct Rows<'a> {
    /// Position of the first row.
    pub first: u32,
    /// T
    pub len: usize,
    /// Shape of one row.
    pub shape: Vec<usize>,
    /// (T, width), or (H, T, S) of the attention matrices.
    values: &'a [f32],
    heads_first: bool,
}

impl<'a> Rows<'a> {
    /// Rows of `values`, whose shape has the slowest axis first, from position `first` on.
    pub fn new(checkpoint: Checkpoint, first: u32, shape: &[usize], values: &'a [f32]) -> Self {
        let heads_first = checkpoint.kind().is_optional();
        let (len, row) =
            if heads_first { (shape[1], vec![shape[0], shape[2]]) } else { (shape[0], shape[1..].to_vec()) };
        Rows { first, len, shape: row, values, heads_first }
    }

    /// Values of one row.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }

    /// Row t; of the attention matrices (H, position + 1).
    pub fn row<'b>(&'b self, t: usize, buffer: &'b mut Vec<f32>) -> &'b [f32] {
        if !self.heads_first {
            return &self.values[t * self.width()..(t + 1) * self.width()];
        }
        let (heads, cached) = (self.shape[0], self.shape[1]);
        let seen = cached.min((self.first as usize + t) + 1);
        buffer.clear();
        for head in 0..heads {
            let start = (head * self.len + t) * cached;
            buffer.extend_from_slice(&self.values[start..start + seen]);
        }
        buffer
    }
}
