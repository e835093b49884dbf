//! What is fed to an engine whose nodes are looked at in isolation: the reference's values.

use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::engine::Batch;

/// (T, `width`) rows of a step, where the reference has all of them and they have the model's width.
pub fn rows(
    reference: &dyn Recording,
    checkpoint: Checkpoint,
    batch: &Batch<'_>,
    width: usize,
) -> Option<Vec<f32>> {
    if checkpoint.kind().is_optional() {
        return attention_rows(reference, checkpoint, batch, width);
    }
    let rows = reference.gather(checkpoint, &batch.positions())?;
    (rows.cols == width).then_some(rows.data)
}

/// (T, H·S) scores or probabilities of a step, `width` columns, from rows that are recorded as (H, position + 1);
/// 0 where nothing is visible.
fn attention_rows(
    reference: &dyn Recording,
    checkpoint: Checkpoint,
    batch: &Batch<'_>,
    width: usize,
) -> Option<Vec<f32>> {
    let cached = batch.first + batch.tokens.len();
    let (mut all, mut row) = (vec![0.0; batch.tokens.len() * width], Vec::new());
    for (t, heads) in all.chunks_exact_mut(width.max(1)).enumerate() {
        let seen = batch.first + t + 1;
        let row = reference.row(checkpoint, (seen - 1) as u32, &mut row)?;
        if row.len() * cached != seen * width {
            return None;
        }
        for (head, values) in heads.chunks_exact_mut(cached).zip(row.chunks_exact(seen)) {
            head[..seen].copy_from_slice(values);
        }
    }
    Some(all)
}
