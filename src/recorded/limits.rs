//! What the execution of a recorded graph needs memory for: told before it begins.

use std::path::Path;

use parity_graph::Id;

use crate::audit::recorded::Labelled;
use crate::engine::machine::{Program, dtype};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::memory;

/// Bytes of an element that is kept in memory: its value in f64, and how far it may be from the producer's.
const KEPT_BYTES: u64 = 16;
/// Bytes of an element that a node reads: a copy in f64, rounded as the arithmetic has it.
const READ_BYTES: u64 = 16;
/// Bytes of an element that a node computes: as recorded, exactly, its bound, what is carried, what the engine has.
const COMPUTED_BYTES: u64 = 5 * 8;

const HINT: &str = "record with a smaller context (llama.cpp: -c N) or a shorter prompt, or PARITY_MEMORY=BYTES where this is wrong";

/// Refuses graphs whose execution needs more memory than there is; `subject` is the recording.
///
/// # Errors
/// Names what most of the memory is for.
pub fn check(subject: &Path, steps: &[(usize, &Labelled)], gguf: &Gguf) -> Result<()> {
    let needs = steps.iter().map(|(_, labelled)| Need::of(&labelled.program, gguf));
    let Some(most) = needs.max_by_key(Need::bytes) else { return Ok(()) };
    memory::require(&subject.display().to_string(), &most.parts(), HINT)
}

/// Bytes that one node needs while it is computed, with everything that is alive then.
#[derive(Clone, Copy, Default)]
struct Need {
    states: u64,
    alive: u64,
    node: u64,
}

impl Need {
    /// The most that any node of a graph needs.
    fn of(program: &Program, gguf: &Gguf) -> Need {
        let graph = &program.graph;
        let elements = |id: Id| match dtype(graph.get(id)).is_some_and(|dtype| dtype.block_len() == 1) {
            true => graph.get(id).elements() as u64,
            // Kept in blocks: rules read the file itself, and what else is of such a type is not known.
            false => 0,
        };
        let weight = |id: Id| {
            graph.is_leaf(id) && !program.is_viewed(id) && gguf.tensor(&graph.get(id).name).is_some()
        };
        let mut kept = vec![false; graph.tensors.len()];
        let (mut now, mut most) = (Need::default(), Need::default());
        for id in program.executed() {
            let used = || graph.sources(id).chain([id]);
            for root in used().map(|used| graph.root(used)).filter(|&root| !weight(root)) {
                if !std::mem::replace(&mut kept[root], true) {
                    let part = now.part(program, root);
                    *part = part.saturating_add(elements(root).saturating_mul(KEPT_BYTES));
                }
            }
            let read = graph
                .sources(id)
                .filter(|&source| !weight(source))
                .map(elements)
                .fold(0, u64::saturating_add);
            now.node =
                read.saturating_mul(READ_BYTES).saturating_add(elements(id).saturating_mul(COMPUTED_BYTES));
            if now.bytes() > most.bytes() {
                most = now;
            }
            for root in used().map(|used| graph.root(used)) {
                if !program.is_used_after(root, id) && !program.is_written(root) && kept[root] {
                    kept[root] = false;
                    let part = now.part(program, root);
                    *part = part.saturating_sub(elements(root).saturating_mul(KEPT_BYTES));
                }
            }
        }
        most
    }

    fn part(&mut self, program: &Program, root: Id) -> &mut u64 {
        if program.is_written(root) { &mut self.states } else { &mut self.alive }
    }

    fn bytes(&self) -> u64 {
        self.states.saturating_add(self.alive).saturating_add(self.node)
    }

    fn parts(&self) -> [(&'static str, u64); 3] {
        [
            ("caches and states", self.states),
            ("values that later nodes read", self.alive),
            ("the largest node", self.node),
        ]
    }
}
