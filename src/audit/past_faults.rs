//! Past faults: a dump may be wrong where its engine is not, by a copy that went wrong. What reads such a node was computed
//! from what it should be, and looks wrong beside what was recorded.
//!
//! So what reads a wrong node, and is wrong too, is judged once more as if that node had not been recorded. Where rounding
//! then explains it, it is no fault of its own.

mod before;
mod overwritten;

use std::collections::HashSet;

use indexmap::IndexMap;

use super::instead::Instead;
use super::{AuditRows, Finding, Findings, How, Labelled, Reads, Steps, loaded, open_choices, passes, reads};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;
pub use overwritten::{Beside, Overwritten};

/// What is missing of a reader that is not judged without its inputs.
const UNKNOWN: &str = "what it was computed from, which is recorded wrongly";
/// How many times nearer a reader must be to what comes of its inputs as they should be than to what comes of those that were
/// recorded, where what rounding explains without them is so wide that it would explain a mistake too: an order of sums that nobody
/// knows, say.
const NEARER: f64 = 2.0;

/// Audits a recording: see [`passes::audit`]; by the weights as its producer keeps them.
///
/// # Errors
/// None that concerns a single node: that is undecided.
pub fn audit(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    how: &How<'_>,
) -> Result<Findings> {
    let (loaded, rounded) = match loaded::kept(steps, graphs, gguf)? {
        Some(kept) => kept,
        None => {
            let findings = judged(steps, graphs, gguf, how)?;
            match loaded::behind(steps, graphs, gguf, &findings)? {
                Some(kept) => kept,
                None => return Ok(findings),
            }
        }
    };
    let findings = judged(steps, graphs, &rounded, how)?;
    Ok(Findings { loaded, ..findings })
}

fn judged(steps: &dyn Steps, graphs: &[(usize, &Labelled)], gguf: &Gguf, how: &How<'_>) -> Result<Findings> {
    let mut findings = passes::audit(steps, graphs, gguf, how)?;
    if let Some(told) = open_choices::told(steps, graphs, gguf, &findings)? {
        let wants = |id: Checkpoint| told.sums.contains(&id);
        let of = |step, id| told.orders.get(&(step, id)).cloned().map(Some);
        let chosen = Instead { steps, of: &of, chosen: &|_| true };
        let again = passes::audit(&chosen, graphs, gguf, &How { wants: &wants, ..*how })?;
        for (id, mut found) in again.nodes.into_iter().filter(|(id, found)| wants(*id) && found.judged > 0) {
            found.bridged.extend(open_choices::order_of(id));
            findings.nodes.insert(id, found);
        }
    }
    let reads = reads(graphs);
    before::accuse((steps, graphs, gguf), how, &reads, &mut findings)?;
    let wrong = findings.all_wrong();
    let inputs = findings.order.iter().filter(|id| wrong.contains(*id));
    let inputs = inputs.map(|id| (*id, wrong_inputs(*id, &reads, &findings, &wrong, false)));
    let mut open: Inputs = inputs.filter(|(_, of)| !of.is_empty()).collect();
    let mut unknown = None;
    let mut rounds = 0;
    while rounds < ROUNDS {
        // What was wrong beside inputs that are cleared by now is wrong by itself: a layer's output behind a sum that was computed of
        // the output before, where all of them were overwritten.
        while let Some(own) =
            open.iter().position(|(_, of)| !of.iter().any(|id| is_in_question(*id, &open, &findings)))
        {
            open.shift_remove_index(own);
        }
        // Of what reads what is itself in question the latter is settled first.
        let is_known = |input: &&Checkpoint| !open.contains_key(*input) && findings.nodes[*input].is_wrong();
        let known = |of: &[Checkpoint]| of.iter().filter(is_known).copied().collect::<Vec<_>>();
        let some: Inputs = open.iter().map(|(reader, of)| (*reader, known(of))).collect();
        let some: Inputs = some.into_iter().filter(|(_, of)| !of.is_empty()).collect();
        if some.is_empty() {
            break;
        }
        open.retain(|reader, _| !some.contains_key(reader));
        unknown = unknown.or(clear(&some, (steps, graphs, gguf), how.rows, &mut findings)?);
        let is_cleared = some.keys().any(|reader| !findings.nodes[reader].is_wrong());
        rounds += usize::from(!is_cleared);
    }
    let far = behind_wrong(&reads, &findings);
    if !far.is_empty() {
        unknown = unknown.or(clear(&far, (steps, graphs, gguf), how.rows, &mut findings)?);
    }
    overwritten::note((steps, graphs, gguf), (how.rows, unknown), &reads, &mut findings)?;
    Ok(findings)
}

/// Readers that are wrong, and which of their inputs are.
type Inputs = IndexMap<Checkpoint, Vec<Checkpoint>>;

/// Whether a node that is read is wrong, or may be.
fn is_in_question(id: Checkpoint, open: &Inputs, findings: &Findings) -> bool {
    open.contains_key(&id) || findings.nodes[&id].is_wrong()
}

/// How many readers of readers are looked at one after the other where nothing is cleared by it.
const ROUNDS: usize = 3;

/// Last readers of a layer that are still wrong, and all of their inputs in it that are: what is recorded wrongly, and computed from what
/// is as well, looks like a mistake of its own beside it.
fn behind_wrong(reads: &Reads, findings: &Findings) -> Inputs {
    let wrong = findings.all_wrong();
    let readers = findings.order.iter().filter(|id| wrong.contains(*id));
    let inputs = |id: Checkpoint, far: bool| wrong_inputs(id, reads, findings, &wrong, far);
    let is_open = |id: &Checkpoint| findings.nodes[id].contradicted_by.is_none();
    // Those that read no more so were judged without all that they read.
    let reads_more = |(id, of): &(Checkpoint, Vec<Checkpoint>)| {
        of.iter().any(is_open)
            && of.len() > inputs(*id, false).iter().filter(|input| of.contains(input)).count()
    };
    let mut far: Inputs = readers.map(|id| (*id, inputs(*id, true))).filter(reads_more).collect();
    let read: HashSet<Checkpoint> = far.values().flatten().copied().collect();
    far.retain(|reader, _| !read.contains(reader));
    far
}

/// Clears readers that rounding explains where their `inputs` are computed again, which are recorded wrongly then; the first of those
/// that are not judged without them.
fn clear(
    inputs: &Inputs,
    (steps, graphs, gguf): (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    rows: AuditRows,
    findings: &mut Findings,
) -> Result<Option<Checkpoint>> {
    // In the rows that are wrong alone: of the others a long stretch hides how much nearer one row is.
    let audits = inputs.keys().filter_map(|reader| findings.nodes[reader].audit());
    let beyond: HashSet<u32> = audits.flat_map(|audit| audit.rows_beyond).collect();
    let wants = |id: Checkpoint| inputs.contains_key(&id);
    let how = How { rows, wants: &wants, diagnose: None, look: None, only: None };
    let chosen = |row: Option<u32>| row.is_some_and(|row| beyond.contains(&row));
    let without = |hidden: HashSet<Checkpoint>| {
        let of = |_, id| hidden.contains(&id).then_some(None);
        passes::bounded(&Instead { steps, of: &of, chosen: &chosen }, graphs, gguf, &how)
    };
    // What is known by now to be recorded wrongly lies before others, where what is between was not recorded.
    let known =
        findings.nodes.iter().filter(|(_, finding)| finding.contradicted_by.is_some()).map(|(id, _)| *id);
    let mut past = without(inputs.values().flatten().copied().chain(known).collect())?;
    let explained = |found: &Finding| found.judged > 0 && found.is_healthy();
    // What rounding of its inputs explains so widely that it would explain a mistake too says nothing against them: such
    // a reader was accused for the sums of f16 of 4864 terms that it read.
    let settled = |found: &Finding| explained(found) && !found.is_blind();
    let is_unsettled = |found: &Finding| explained(found) && !settled(found);
    let is_open = inputs.keys().filter_map(|reader| past.nodes.get(reader)).any(is_unsettled);
    // How near readers are as they were recorded is asked of those alone that are explained, and not settled without that.
    let as_recorded = if is_open { without(HashSet::new())? } else { Findings::default() };
    let mut unknown = None;
    for (reader, inputs) in inputs {
        let Some(found) = past.nodes.swap_remove(reader) else { continue };
        let far = |finding: &Finding| finding.audit().map(|audit| audit.local.rel_l2);
        let recorded = as_recorded.nodes.get(reader).and_then(far);
        let nearer = recorded.zip(far(&found)).is_some_and(|(recorded, past)| NEARER * past < recorded);
        // One that is nearer to what comes of its inputs as they should be, and not explained by that either, has a fault of its own.
        if !explained(&found) {
            continue;
        }
        let settled = settled(&found);
        for input in inputs.iter().filter(|_| settled || nearer) {
            findings.at(*input).contradicted_by.get_or_insert(*reader);
        }
        if !settled {
            unknown.get_or_insert(*reader);
        }
        let found = if settled { found } else { found.as_undecided(UNKNOWN) };
        findings.nodes.insert(*reader, found);
    }
    Ok(unknown)
}

/// What a node reads of what is wrong, be it through others that were not recorded; `far`, of its layer alone, and through what is wrong
/// there as well.
fn wrong_inputs(
    of: Checkpoint,
    reads: &Reads,
    findings: &Findings,
    wrong: &HashSet<Checkpoint>,
    far: bool,
) -> Vec<Checkpoint> {
    let mut crossed = findings.nodes[&of].bridged.clone();
    let (mut out, mut seen, mut open) = (Vec::new(), HashSet::from([of]), vec![of]);
    while let Some(reader) = open.pop() {
        for input in reads.get(&reader).into_iter().flatten().filter(|input| seen.insert(**input)) {
            let is_of_layer = input.layer_index() == of.layer_index();
            if wrong.contains(input) && (is_of_layer || !far) {
                out.push(*input);
                if far {
                    crossed.extend(findings.nodes[input].bridged.iter().copied());
                    open.push(*input);
                }
            } else if crossed.contains(input) {
                open.push(*input);
            }
        }
    }
    out
}
