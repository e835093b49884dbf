//! A prompt of which nothing was recorded: its graphs, built of the model file, and what their inputs hold.

use super::{Labelled, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::builders::{self, Cache, Shape, Values};

/// Tokens that are computed at a time, so that no more than their rows are in memory.
const STEP: usize = 64;

/// The steps of a prompt.
pub struct Prompt {
    graphs: Vec<Labelled>,
    /// By step: which graph, its first position, its number of tokens, and its inputs.
    steps: Vec<(usize, usize, usize, Values)>,
}

impl Prompt {
    /// Tokens at positions from 0, attention in one node or in three; logits of all, or of those from a position on.
    ///
    /// # Errors
    /// An architecture without a builder, a token beyond the vocabulary.
    pub fn new(gguf: &Gguf, tokens: &[u32], flash: bool, logits: usize) -> Result<Prompt> {
        let (mut graphs, mut shapes, mut steps) = (Vec::new(), Vec::<Shape>::new(), Vec::new());
        // Matrices have columns for all positions that were seen, and are whole in a single step alone.
        let length = if flash { STEP } else { tokens.len().max(1) };
        for (number, chunk) in tokens.chunks(length).enumerate() {
            let first = number * length;
            let outputs = (first + chunk.len()).saturating_sub(logits).clamp(1, chunk.len());
            let shape = Shape::step(first, chunk.len(), tokens.len(), flash, Cache::F32);
            let shape = Shape { outputs, ..shape };
            let built = builders::build(gguf, shape)?;
            let inputs = builders::inputs(&built, chunk, first)?;
            let known = shapes.iter().position(|known| *known == shape);
            if known.is_none() {
                shapes.push(shape);
                graphs.push(Labelled::new(built.graph)?);
            }
            steps.push((known.unwrap_or(graphs.len() - 1), first, chunk.len(), inputs));
        }
        Ok(Prompt { graphs, steps })
    }

    /// Each graph once.
    pub fn into_labelled(self) -> Vec<Labelled> {
        self.graphs
    }

    /// The graph of each step, in order.
    pub fn steps(&self) -> Vec<(usize, &Labelled)> {
        self.steps.iter().enumerate().map(|(step, of)| (step, &self.graphs[of.0])).collect()
    }
}

impl Steps for Prompt {
    fn tensor(&self, _step: usize, _checkpoint: Checkpoint) -> Option<Tensor> {
        None
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        self.steps.get(step)?.3.get(name.split('#').next()?).cloned()
    }

    fn positions(&self, step: usize) -> Vec<u32> {
        let (first, count) = self.steps.get(step).map_or((0, 0), |(_, first, count, _)| (*first, *count));
        (first..first + count).map(|position| position as u32).collect()
    }

    fn is_own_graph(&self) -> bool {
        false
    }
}
