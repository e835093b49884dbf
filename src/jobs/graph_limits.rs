//! What the execution of a recorded graph needs memory for: told before it begins.

use std::path::Path;

use parity_graph::{Id, Op};

use crate::audit::Labelled;
use crate::engine::op_by_op::{Program, dtype};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::memory;

/// Bytes of an element that is kept in memory: its value in f64, and how far it may be from the producer's.
const KEPT_BYTES: u64 = 16;
/// Bytes of an element that a node reads: a copy in f64, rounded as the arithmetic has it.
const READ_BYTES: u64 = 16;
/// Bytes of an element that is judged: as recorded, exactly, its bound, what is carried, what the engine has.
const JUDGED_BYTES: u64 = 5 * 8;
/// Bytes of an element of a matmul of which few rows are judged: as recorded.
const SAMPLED_BYTES: u64 = 4;

const HINT: &str = "record with a smaller context (llama.cpp: -c N) or a shorter prompt, or PARITY_MEMORY=BYTES where this is wrong";

/// What is done with a graph.
#[derive(Clone, Copy, PartialEq)]
pub enum Work {
    /// Nodes are judged: of matmuls with weights a few rows.
    Audit,
    /// Nodes are executed and all of their rows judged.
    Run,
}

/// Refuses graphs whose execution needs more memory than there is; `subject` is the recording.
///
/// # Errors
/// Names what most of the memory is for.
pub fn check(subject: &Path, steps: &[(usize, &Labelled)], gguf: &Gguf, work: Work) -> Result<()> {
    let needs = steps.iter().map(|(_, labelled)| Need::of(&labelled.program, gguf, work));
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
    fn of(program: &Program, gguf: &Gguf, work: Work) -> Need {
        let graph = &program.graph;
        let elements = |id: Id| match dtype(graph.get(id)) {
            Some(_) => graph.get(id).elements() as u64,
            // Nothing is known of such a type, and nothing kept.
            None => 0,
        };
        let weight = |id: Id| {
            graph.is_leaf(id) && !program.is_viewed(id) && gguf.tensor(&graph.get(id).name).is_some()
        };
        let is_matmul = |id: Id| matches!(graph.get(id).op, Op::MulMat | Op::MulMatId);
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
            let sampled = work == Work::Audit && is_matmul(id) && graph.sources(id).any(weight);
            let own = if sampled { SAMPLED_BYTES } else { JUDGED_BYTES };
            now.node = read.saturating_mul(READ_BYTES).saturating_add(elements(id).saturating_mul(own));
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
