//! A recording in which something else stands in place of some of its tensors, or nothing.

use super::{Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::numerics::Numerics;

/// Such a recording.
pub struct Instead<'a> {
    /// What was recorded.
    pub steps: &'a dyn Steps,
    /// What stands in place of a node of a step: `None` where that is what was recorded, and nothing within it where it is hidden.
    pub of: &'a dyn Fn(usize, Checkpoint) -> Option<Option<Tensor>>,
    /// Which of the rows that are looked at otherwise are looked at here; of none, whether all are.
    pub chosen: &'a dyn Fn(Option<u32>) -> bool,
}

impl Steps for Instead<'_> {
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        (self.of)(step, checkpoint).unwrap_or_else(|| self.steps.tensor(step, checkpoint))
    }

    fn rows(&self, step: usize, checkpoint: Checkpoint) -> Option<usize> {
        match (self.of)(step, checkpoint) {
            Some(other) => other.map(|other| other.positions.len()),
            None => self.steps.rows(step, checkpoint),
        }
    }

    fn is_chosen(&self, row: Option<u32>) -> bool {
        self.steps.is_chosen(row) && (self.chosen)(row)
    }

    fn knows_caches(&self, step: usize) -> bool {
        self.steps.knows_caches(step)
    }

    fn fed(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        self.steps.fed(step, checkpoint)
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        self.steps.leaf(step, name)
    }

    fn positions(&self, step: usize) -> Vec<u32> {
        self.steps.positions(step)
    }

    fn is_own_graph(&self) -> bool {
        self.steps.is_own_graph()
    }

    fn declared(&self) -> Option<Numerics> {
        self.steps.declared()
    }

    fn ranks(&self) -> Option<usize> {
        self.steps.ranks()
    }
}
