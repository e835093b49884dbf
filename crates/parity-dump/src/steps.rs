//! What single steps recorded, for those who follow a graph step by step.

use crate::checkpoint::Checkpoint;
use crate::reader::Dump;

impl Dump {
    /// What one step recorded of a checkpoint: its shape, the position of each row, and all values.
    pub fn in_step(&self, step: usize, checkpoint: Checkpoint) -> Option<(Vec<usize>, Vec<u32>, Vec<f32>)> {
        let recorded = self.tensors.get(&checkpoint)?;
        let part = recorded.parts.iter().find(|part| part.step == step)?;
        let positions = self.rows_of(checkpoint, &self.manifest.steps.get(step)?.positions);
        let mut values = part.values(&self.files[part.file]);
        self.orders.apply(recorded, &mut values);
        Some((part.shape.clone(), positions, values))
    }

    /// How many rows of a checkpoint a step has, without reading them; `None` where it has no tensor of it.
    pub fn rows_in_step(&self, step: usize, checkpoint: Checkpoint) -> Option<usize> {
        self.tensors.get(&checkpoint)?.parts.iter().find(|part| part.step == step)?;
        Some(self.rows_of(checkpoint, &self.manifest.steps.get(step)?.positions).len())
    }
}
