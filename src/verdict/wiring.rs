//! Whether recorded graphs are wired alike, and as the model file says, without looking at a value: where two of them
//! differ in a number or a source, the first such node is the divergence, whatever the values are.

use super::entry::is_explained;
use super::text::refuted;
use crate::checkpoint::Checkpoint;
use crate::gguf::Gguf;
use crate::model::builders::{self, Shape};
use crate::model::diff::{self, Aspect, Difference, Group, Name, Whose, grouped, sentence};
use crate::report::{CheckpointVerdict, Diagnosis, FirstDivergence, Report, Verdict};
use parity_graph::{Graph, Op};

/// The graphs that one side's recording brings.
pub struct Claim<'a> {
    /// Whose.
    pub side: Whose,
    /// Each once.
    pub graphs: Vec<&'a Graph>,
}

/// What a model file can say of them.
pub struct File<'a> {
    /// The file.
    pub gguf: &'a Gguf,
    /// `general.architecture`.
    pub architecture: &'a str,
    /// Why parity's own engines do not run it, where they do not.
    pub refused: Option<&'a str>,
}

/// Differences that are spelt out.
const SHOWN_MAX: usize = 8;

const OPTIONS_SAID: &str = "wiring: options of the run set this too (--rope-freq-base, --rope-freq-scale, --rope-scaling, \
    --yarn-orig-ctx and its like): where one was given, the recording is of another model than the file; where none was, \
    the metadata is misread";

/// One thing that not all sides agree in.
pub(super) struct Differs {
    pub node: Name,
    pub aspect: Aspect,
    pub has: Vec<(Whose, Option<String>)>,
}

/// What the comparison of one side's graphs with those of the file found.
#[derive(Default)]
struct Compared {
    differences: Vec<Difference>,
    /// What was chosen for the run and not by the file.
    chosen: Vec<String>,
    /// Why no graph could be built of the file.
    unbuilt: Option<String>,
}

/// Says of recorded graphs whether they are the model file's and each other's, or that nobody knows.
pub fn weigh_wiring(report: &mut Report, claims: &[Claim<'_>], file: Option<&File<'_>>) {
    let unsettled = match file {
        None => "no model file was given (-m MODEL), which would settle what is right".to_owned(),
        Some(file) if builders::knows(file.architecture) => match against_file(report, claims, file) {
            None => return,
            Some(why) => format!("no graph could be built of the file ({why})"),
        },
        Some(file) => format!(
            "parity has no graph of its own for {}{}, so that a parameter that was read from the wrong place looks right \
             here",
            file.architecture,
            file.refused.map_or_else(String::new, |why| format!(" ({why})"))
        ),
    };
    if file.is_some() && !claims.is_empty() {
        report.notes.push(format!("the wiring is as the producer declares it: {unsettled}"));
    }
    if let [candidate, reference] = claims {
        between(report, candidate, reference, &unsettled);
    }
}

/// Compares all graphs with those that are built of the file; why none could be built where that is so.
fn against_file(report: &mut Report, claims: &[Claim<'_>], file: &File<'_>) -> Option<String> {
    let compared: Vec<Compared> = claims.iter().map(|claim| of_file(&claim.graphs, file)).collect();
    let unbuilt = compared.iter().find_map(|found| found.unbuilt.clone());
    let all = merged(claims, &compared);
    if all.is_empty() {
        if unbuilt.is_none() && !claims.is_empty() {
            let mut chosen: Vec<&str> =
                compared.iter().flat_map(|found| &found.chosen).map(String::as_str).collect();
            chosen.dedup();
            report.notes.push(format!(
                "the wiring is the model file's: op by op, parameter by parameter, the recorded graph is the one that \
                 parity builds for {}; chosen for the run and not by the file: {}",
                file.architecture,
                chosen.join(", or ")
            ));
        }
        return unbuilt;
    }
    tell(report, &all);
    report.notes.extend(unbuilt.map(|why| format!("no graph could be built of the file: {why}")));
    let unknown = unknown_ops(claims);
    // What is missing may be within an op that nobody knows.
    let Some(first) = all.iter().find(|one| unknown.is_empty() || one.aspect.decides()) else {
        report.notes.push(format!(
            "wiring: it is not decided by what the file asks for, which may be within what parity does not know: {}",
            unknown.join(", ")
        ));
        return None;
    };
    let own = |side: Whose| first.has.iter().find(|(known, _)| *known == side).map(|(_, value)| value);
    let is_candidates = |side: &Whose| {
        *side != Whose::Reference && own(*side).is_some_and(|value| Some(value) != own(Whose::File))
    };
    match [Whose::Recorded, Whose::Candidate].iter().any(is_candidates) {
        true => accuse(report, first, ""),
        false => refute(report, first),
    }
    None
}

/// The ops of recorded graphs that nobody here knows, by name.
fn unknown_ops(claims: &[Claim<'_>]) -> Vec<String> {
    let all = claims
        .iter()
        .flat_map(|claim| &claim.graphs)
        .flat_map(|graph| graph.computed().map(|id| &graph.get(id).op));
    let mut names: Vec<String> = all
        .filter_map(|op| match op {
            Op::Other(name) => Some(name.clone()),
            _ => None,
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// What differs between a side's graphs and those of the file, each thing once.
fn of_file(graphs: &[&Graph], file: &File<'_>) -> Compared {
    let mut out = Compared::default();
    for graph in graphs {
        let found = match builders::build(file.gguf, Shape::of(graph)) {
            Ok(built) => diff::diff(graph, &built.graph).differences,
            Err(error) => {
                out.unbuilt = Some(error.to_string().replace('\n', ","));
                heads(file).map_or_else(Vec::new, |heads| diff::other_heads(graph, heads))
            }
        };
        // The graphs of prefill and decode mostly differ in the same things.
        for one in found {
            let is_same = |known: &Difference| known.node() == one.node() && known.aspect() == one.aspect();
            if !out.differences.iter().any(is_same) {
                out.differences.push(one);
            }
        }
        let choices = Shape::of(graph).choices();
        if !out.chosen.contains(&choices) {
            out.chosen.push(choices);
        }
    }
    out
}

/// Heads of queries and of keys by the file, which need not fit its own tensors.
fn heads(file: &File<'_>) -> Option<[i64; 2]> {
    let key = |name: &str| format!("{}.attention.{name}", file.architecture);
    let said = |name: &str| file.gguf.u32(&key(name)).ok().flatten().map(i64::from);
    let queries = said("head_count")?;
    Some([queries, said("head_count_kv").unwrap_or(queries)])
}

/// What each side has where any of them differs from the file: one that does not differ has what the file has.
fn merged(claims: &[Claim<'_>], compared: &[Compared]) -> Vec<Differs> {
    let mut out: Vec<Differs> = Vec::new();
    for one in compared.iter().flat_map(|found| &found.differences) {
        let (node, aspect) = (one.node(), one.aspect());
        if out.iter().any(|known| known.node == *node && known.aspect == aspect) {
            continue;
        }
        let [_, file] = one.has();
        let of_side = |(claim, found): (&Claim<'_>, &Compared)| {
            let own = found.differences.iter().find(|other| other.node() == node && other.aspect() == aspect);
            (claim.side, own.map_or_else(|| file.clone(), |other| other.has()[0].clone()))
        };
        let mut has: Vec<_> = claims.iter().zip(compared).map(of_side).collect();
        has.push((Whose::File, file));
        out.push(Differs { node: node.clone(), aspect, has });
    }
    out
}

/// Says what differs, in notes.
fn tell(report: &mut Report, all: &[Differs]) {
    let each = all.iter().map(|one| (one.node.clone(), one.aspect.clone(), one.has.clone()));
    let groups: Vec<Group> = grouped(each);
    report.notes.extend(groups.iter().take(SHOWN_MAX).map(|group| format!("wiring: {group}")));
    if groups.len() > SHOWN_MAX {
        report.notes.push(format!("wiring: {} more differences", groups.len() - SHOWN_MAX));
    }
    let is_option = |aspect: &Aspect| matches!(aspect, Aspect::Number(parameter) if parameter.is_option());
    if groups.first().is_some_and(|group| is_option(&group.aspect)) {
        report.notes.push(OPTIONS_SAID.to_owned());
    }
}

/// Compares the graphs of two sides where no file settles which is right.
fn between(report: &mut Report, candidate: &Claim<'_>, reference: &Claim<'_>, unsettled: &str) {
    let all = differences(candidate, reference);
    let Some(first) = all.first() else { return };
    tell(report, &all);
    if let Some(first) = all.iter().find(|one| one.aspect.decides()) {
        return accuse(report, first, &format!("; {unsettled}"));
    }
    let text = format!("the graphs of the two sides are not the same: {}", first.said());
    match report.verdict {
        Verdict::Parity => report.leave_open(text),
        Verdict::Divergence | Verdict::Undecided => report.notes.push(text),
    }
}

/// Numbers and sources in which the graphs of candidate and reference differ, with what the model file has where a graph can
/// be built of it; what differs in the same way in several nodes is one.
pub fn apart(claims: &[Claim<'_>; 2], file: Option<&File<'_>>) -> Vec<Group> {
    let by_file = |file: &File<'_>| {
        let compared: Vec<Compared> = claims.iter().map(|claim| of_file(&claim.graphs, file)).collect();
        merged(claims, &compared)
    };
    let known = file.filter(|file| builders::knows(file.architecture)).map(by_file).unwrap_or_default();
    let mut all = differences(&claims[0], &claims[1]);
    all.retain(|one| one.aspect.decides());
    for one in &mut all {
        if let Some(known) = known.iter().find(|known| known.node == one.node && known.aspect == one.aspect) {
            one.has.clone_from(&known.has);
        }
    }
    grouped(all.into_iter().map(|one| (one.node, one.aspect, one.has)))
}

/// The first thing in which the graphs of two sides differ, whatever it is.
pub fn unlike(claims: &[Claim<'_>; 2]) -> Option<String> {
    differences(&claims[0], &claims[1]).first().map(Differs::said)
}

/// What differs between the graphs of two sides, each thing once.
fn differences(candidate: &Claim<'_>, reference: &Claim<'_>) -> Vec<Differs> {
    let mut all: Vec<Differs> = Vec::new();
    for graph in &candidate.graphs {
        let tokens = |graph: &Graph| Shape::of(graph).tokens;
        let alike = reference.graphs.iter().find(|other| tokens(other) == tokens(graph));
        let Some(other) = alike.or(reference.graphs.first()) else { continue };
        for one in diff::diff(graph, other).differences {
            let (node, aspect, [ours, theirs]) = (one.node().clone(), one.aspect(), one.has());
            let known = all.iter().any(|known| known.node == node && known.aspect == aspect);
            // What a step of other tokens reads may have another form.
            if !known && (alike.is_some() || matches!(aspect, Aspect::Number(_))) {
                let has = vec![(candidate.side, ours), (reference.side, theirs)];
                all.push(Differs { node, aspect, has });
            }
        }
    }
    all
}

impl Differs {
    /// With the node.
    fn said(&self) -> String {
        let colon = if matches!(self.aspect, Aspect::Number(_)) { ":" } else { "" };
        format!("{}{colon} {}", self.node, sentence(&self.aspect, &self.has))
    }

    /// Behind the node's name.
    fn said_of_it(&self) -> String {
        let it = if matches!(self.aspect, Aspect::Number(_)) { "" } else { "it " };
        format!("{it}{}", sentence(&self.aspect, &self.has))
    }

    /// Whether candidate and reference differ in it, and not both from the file alike.
    fn tells_sides_apart(&self) -> bool {
        let own = |side: Whose| self.has.iter().find(|(known, _)| *known == side).map(|(_, value)| value);
        own(Whose::Candidate) != own(Whose::Reference)
    }

    /// The fault that it is, where the catalogue has a name for it.
    fn diagnosis(&self) -> Vec<Diagnosis> {
        let of = |fault: &str| Diagnosis {
            fault: fault.to_owned(),
            explains: 1.0,
            text: self.said_of_it(),
            fix: parity_graph::fault::find(fault).map(|entry| entry.fix.to_owned()),
        };
        self.aspect.fault().map(of).into_iter().collect()
    }
}

/// The candidate's graph is wired otherwise than it should be: that is the divergence, unless its values are wrong before.
pub(super) fn accuse(report: &mut Report, first: &Differs, unsettled: &str) {
    let said = first.said_of_it() + unsettled;
    report.verdict = Verdict::Divergence;
    report.reason = None;
    let Some(id) = first.node.checkpoint() else {
        if report.first_divergence.is_none() {
            report.reason = Some(format!("the graphs are not wired alike: {}{unsettled}", first.said()));
        }
        return;
    };
    let place = |id: Checkpoint| report.checkpoints.iter().position(|entry| entry.id == id);
    let (own, found) = (place(id), report.first_divergence.as_ref().map(|found| place(found.checkpoint)));
    let is_first = found.is_none_or(|found| own.is_some_and(|own| found.is_some_and(|found| own < found)));
    let mut diagnosis = first.diagnosis();
    diagnosis.iter_mut().for_each(|named| named.text += unsettled);
    if let Some(entry) =
        own.and_then(|at| report.checkpoints.get_mut(at)).filter(|entry| !entry.verdict.is_fault())
    {
        (entry.verdict, entry.evidence) = (CheckpointVerdict::Origin, Some(said.clone()));
        entry.diagnosis.clone_from(&diagnosis);
    }
    if is_first {
        report.first_divergence = Some(FirstDivergence {
            inputs: own.map_or_else(Vec::new, |at| report.checkpoints[at].inputs.clone()),
            residual: diagnosis.is_empty().then_some(said),
            diagnosis,
            ..FirstDivergence::at(id, CheckpointVerdict::Origin)
        });
    }
    if own.is_none_or(|at| report.checkpoints[at].verdict == CheckpointVerdict::Origin) {
        report.originates(id);
    }
    if first.tells_sides_apart() {
        inherit(report, own, id);
    }
}

/// The reference alone is wired otherwise than the file says.
pub(super) fn refute(report: &mut Report, first: &Differs) {
    let wrong = |said: String| format!("the reference itself is wrong at {}: {said}", first.node);
    let mut reason = wrong(first.said_of_it());
    let id = first.node.checkpoint();
    let own = id.and_then(|id| report.checkpoints.iter().position(|entry| entry.id == id));
    if let Some(entry) = own.map(|at| &mut report.checkpoints[at]).filter(|entry| !entry.verdict.is_fault()) {
        (entry.verdict, entry.evidence) = (CheckpointVerdict::Reference, Some(reason.clone()));
        entry.diagnosis = first.diagnosis();
        reason = if entry.diagnosis.is_empty() { reason } else { refuted(entry) };
    }
    if report.verdict != Verdict::Divergence {
        (report.verdict, report.reason) = (Verdict::Undecided, Some(reason));
    }
    if let Some(id) = id {
        inherit(report, own, id);
    }
}

/// Values behind a node that is wired otherwise are no match where they differ by more than rounding, however healthy
/// the nodes are that computed them.
fn inherit(report: &mut Report, own: Option<usize>, from: Checkpoint) {
    let behind = own.map_or(0, |at| at + 1);
    for entry in report.checkpoints.iter_mut().skip(behind).filter(|e| e.verdict == CheckpointVerdict::Match)
    {
        let locals = entry.local.candidate.as_ref().zip(entry.numbers.as_ref());
        let differs = |(ours, numbers)| !is_explained(numbers, ours, entry.local.reference.as_ref());
        if locals.is_some_and(differs) {
            entry.verdict = CheckpointVerdict::Inherited;
            entry.evidence =
                Some(format!("it is healthy; what it differs by comes from {from} or before it"));
        }
    }
}
