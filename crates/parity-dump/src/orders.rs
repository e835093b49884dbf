//! Rows of heads that lie in another order than they are compared in.

use crate::checkpoint::Checkpoint;
use crate::reader::Dump;
use crate::recorded::Recorded;

/// How the rows of heads are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Orders {
    /// E, where pairs that lie half a head apart are read side by side.
    width: usize,
}

impl Orders {
    /// Whether a tensor is read in another order than it lies in.
    pub(crate) fn concern(self, recorded: &Recorded) -> bool {
        self.width > 1 && recorded.reordered
    }

    /// Rows of whole heads, (E/2, 2) for (2, E/2); others stay.
    pub(crate) fn apply(self, recorded: &Recorded, values: &mut [f32]) {
        if !self.concern(recorded) {
            return;
        }
        let half = self.width / 2;
        let mut lies = vec![0.0; self.width];
        for head in values.chunks_exact_mut(self.width) {
            lies.copy_from_slice(head);
            for i in 0..half {
                (head[2 * i], head[2 * i + 1]) = (lies[i], lies[half + i]);
            }
        }
    }
}

impl Dump {
    /// From here on heads of `width` values of some checkpoints are read with those values side by side that lie half
    /// a head apart, (E/2, 2) for (2, E/2): rows of queries and keys in Hugging Face's order are read as GGUF files of
    /// the `llama` architecture have them. An odd width changes nothing.
    pub fn read_halves_as_pairs(&mut self, width: usize, concerned: impl Fn(Checkpoint) -> bool) {
        self.orders = Orders { width: if width.is_multiple_of(2) { width } else { 0 } };
        for (checkpoint, recorded) in &mut self.tensors {
            recorded.reordered = concerned(*checkpoint);
        }
    }
}
