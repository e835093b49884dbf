//! A recording without some of its checkpoints: what it would show if they had not been recorded.

use indexmap::IndexSet;

use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::tensor::Matrix;
use parity_dump::manifest::Manifest;

/// See the module.
pub struct Masked<'a> {
    /// The whole.
    pub recording: &'a dyn Recording,
    /// What is left out.
    pub hidden: &'a IndexSet<Checkpoint>,
}

impl Masked<'_> {
    fn shows(&self, checkpoint: Checkpoint) -> bool {
        !self.hidden.contains(&checkpoint)
    }
}

impl Recording for Masked<'_> {
    fn manifest(&self) -> &Manifest {
        self.recording.manifest()
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.recording.checkpoints().into_iter().filter(|checkpoint| self.shows(*checkpoint)).collect()
    }

    fn positions(&self, checkpoint: Checkpoint) -> Vec<u32> {
        if self.shows(checkpoint) { self.recording.positions(checkpoint) } else { Vec::new() }
    }

    fn gather(&self, checkpoint: Checkpoint, positions: &[u32]) -> Option<Matrix<f32>> {
        self.recording.gather(checkpoint, positions).filter(|_| self.shows(checkpoint))
    }

    fn row<'a>(
        &'a self,
        checkpoint: Checkpoint,
        position: u32,
        buffer: &'a mut Vec<f32>,
    ) -> Option<&'a [f32]> {
        self.recording.row(checkpoint, position, buffer).filter(|_| self.shows(checkpoint))
    }

    fn row_shape(&self, checkpoint: Checkpoint) -> Vec<usize> {
        if self.shows(checkpoint) { self.recording.row_shape(checkpoint) } else { Vec::new() }
    }
}
