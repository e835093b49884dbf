//! The mistakes behind faulty nodes, by name.

use super::Judgement;
use crate::audit::{Audits, Context};
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::diagnose::diagnose;
use crate::model::Model;

/// Faulty nodes that are diagnosed: the later ones are mostly the same mistake in other layers.
const DIAGNOSED_MAX: usize = 8;

/// Names the mistakes in the first faulty nodes of either side.
pub fn name(
    judgement: &mut Judgement,
    audits: &Audits,
    recordings: &[&dyn Recording],
    model: &Model,
) -> Result<()> {
    for (side, (audit, recording)) in audits.sides.iter().zip(recordings).enumerate() {
        let graph = &audit.graph;
        let (numerics, recorded_unit) = (audit.numerics, audit.recorded_unit);
        let fed = recordings.get(1).copied().filter(|_| audits.isolated && side == 0);
        let context =
            Context { gguf: &model.gguf, graph, recording: *recording, numerics, recorded_unit, fed };
        for checkpoint in audit.origins().take(DIAGNOSED_MAX) {
            let node = audit.nodes.get(&checkpoint).and_then(|node| node.as_ref().ok());
            let wrong = node.map_or(&[][..], |node| &node.rows_beyond);
            let mut found = diagnose(&context, model, checkpoint, wrong)?;
            found.inputs = graph.node(checkpoint).map(|node| node.inputs.clone()).unwrap_or_default();
            if side == 0 {
                judgement.named.insert(checkpoint, found);
            } else if let Some(best) = found.diagnosis.into_iter().next() {
                let note = format!("the reference at {checkpoint}: {} ({})", best.text, best.fault);
                judgement.notes.push(note);
                judgement.named_reference.insert(checkpoint, best);
            }
        }
    }
    Ok(())
}
