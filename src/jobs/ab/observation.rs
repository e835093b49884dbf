//! Whether looking changes what is computed: a run of which nothing but the logits is read, beside one of which every node
//! is. Where they differ, the node is searched for whose observation changes it: one that is not fused any more then, or whose
//! inputs nothing can overtake any more.

use parity_dump::Dump;
use parity_graph::{Graph, Id, label};
use serde::Serialize;

use super::side::{Recorded, Recording, record};
use super::{Side, diff};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{bits, common_positions};
use crate::dump::Graphs;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::jobs::bitwise::execution_order;
use crate::record::{Filter, Observe};
use crate::report::words::{answer, because, count};
use crate::report::{Report, Verdict};

/// Name and version of what is printed.
pub const SCHEMA: &str = "parity-observation/1";

/// What came of looking.
#[derive(Clone, Debug, Serialize)]
pub struct Observation {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Rows of logits that were compared.
    pub rows: usize,
    /// Positions of those that are not the same bits.
    pub differing: Vec<u32>,
    /// Whether two runs that nobody looks at are equal; looked at where rows differ.
    pub steady: bool,
    /// The node whose observation changes them; null where looking changes nothing, or no single node was found.
    pub node: Option<Checkpoint>,
    /// What may be one kernel without the observation.
    pub group: Vec<String>,
    /// How many runs it took.
    pub runs: usize,
    /// The answer, in sentences.
    pub answer: Vec<String>,
}

impl Observation {
    /// Whether looking changes nothing; of a run that differs from itself nothing can be said.
    pub fn verdict(&self) -> Verdict {
        match (self.rows, self.differing.is_empty()) {
            (0, _) => Verdict::Undecided,
            _ if !self.steady => Verdict::Undecided,
            (_, true) => Verdict::Parity,
            (_, false) => Verdict::Divergence,
        }
    }

    /// For people.
    pub fn render(&self) -> String {
        let head = match self.verdict() {
            Verdict::Parity => "UNCHANGED: looking changes no bit of the logits",
            Verdict::Divergence => "CHANGED: looking changes the logits",
            Verdict::Undecided if self.rows > 0 => "UNDECIDED: the run differs from itself",
            Verdict::Undecided => "UNDECIDED: no row of logits could be compared",
        };
        let lines: Vec<String> = self.answer.iter().map(|sentence| format!("  {sentence}")).collect();
        [vec![head.to_owned()], lines].concat().join("\n") + "\n"
    }
}

/// The runs of one command, each looked at in another way.
struct Looking<'a> {
    side: &'a Side,
    how: &'a Recording<'a>,
    /// The run of which the logits alone are read, and its tokens for the others.
    unseen: (Recorded, Dump),
    runs: usize,
}

/// Looks at a command in ways that differ, and finds the node whose observation changes its logits.
///
/// # Errors
/// A program that cannot be recorded.
pub fn observation(side: &Side, how: &Recording<'_>, judged: &diff::Options) -> Result<Observation> {
    let unseen = record(&named(side, "unseen"), &unseen_by(how), None)?;
    let dump = Dump::open(&unseen.dir)?;
    let mut looking = Looking { side, how, unseen: (unseen, dump), runs: 1 };
    let seen = looking.at("seen", Filter::default())?;
    let whole = Dump::open(&seen.dir)?;
    let (rows, differing) = looking.apart(&whole)?;
    let mut found = Observation {
        schema: SCHEMA,
        rows,
        differing,
        steady: true,
        node: None,
        group: Vec::new(),
        runs: 0,
        answer: vec![format!("{} of logits compared", count(rows, "row"))],
    };
    if !found.differing.is_empty() && looking.differs_from_itself()? {
        found.steady = false;
        found.answer.push(
            "two runs that nobody looks at differ too, so that this says nothing of looking: parity ab --repeat finds where"
                .to_owned(),
        );
    } else if !found.differing.is_empty() {
        looking.search(&whole, &mut found)?;
        found.answer.push(which_is_wrong(&seen, judged)?);
    }
    found.runs = looking.runs;
    Ok(found)
}

fn named(side: &Side, name: &str) -> Side {
    Side { name: name.to_owned(), ..side.clone() }
}

/// How a run is recorded of which the logits alone are read.
fn unseen_by<'a>(how: &Recording<'a>) -> Recording<'a> {
    let filter = Filter { layers: None, globs: vec![Kind::Logits.name().to_owned()] };
    Recording { observe: Observe::None, filter, ..how.clone() }
}

impl Looking<'_> {
    /// Whether another run that nobody looks at has other logits.
    fn differs_from_itself(&mut self) -> Result<bool> {
        self.runs += 1;
        let again = record(&named(self.side, "again"), &unseen_by(self.how), Some(&self.unseen.0.forced()))?;
        Ok(!self.apart(&Dump::open(&again.dir)?)?.1.is_empty())
    }

    /// A run of which some nodes are asked for, one by one.
    fn at(&mut self, name: &str, filter: Filter) -> Result<Recorded> {
        self.runs += 1;
        let how = Recording { observe: Observe::Nodes, filter, ..self.how.clone() };
        record(&named(self.side, name), &how, Some(&self.unseen.0.forced()))
    }

    /// How many rows of logits a run shares with the one that nobody looked at, and where their bits differ.
    fn apart(&self, run: &Dump) -> Result<(usize, Vec<u32>)> {
        let unseen = &self.unseen.1;
        let common = common_positions(run.tokens(), unseen.tokens());
        let found = bits::differing(run, unseen, Checkpoint::global(Kind::Logits), common);
        Ok(found.map_or((0, Vec::new()), |found| (found.compared, found.rows)))
    }

    /// Whether the logits change where the first so many nodes are looked at.
    fn changes(&mut self, nodes: &[Checkpoint]) -> Result<bool> {
        let ids = nodes.iter().chain([&Checkpoint::global(Kind::Logits)]).map(ToString::to_string).collect();
        let run = self.at("looked", Filter { layers: None, globs: ids })?;
        let dump = Dump::open(&run.dir)?;
        let (rows, differing) = self.apart(&dump)?;
        drop(dump);
        std::fs::remove_dir_all(&run.dir)
            .map_err(|e| Error::file(&run.dir, format!("cannot be removed: {e}")))?;
        Ok(rows > 0 && !differing.is_empty())
    }

    /// The first node in the order of execution whose observation, with those before it, changes the logits.
    fn search(&mut self, whole: &Dump, found: &mut Observation) -> Result<()> {
        let mut nodes = execution_order(whole)?;
        nodes.retain(|id| id.kind() != Kind::Logits);
        // Looking at the first `least` changes nothing, at the first `most` it does.
        let (mut least, mut most) = (0, nodes.len());
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            (self.how.say)(&format!("looking at the first {middle} of {} nodes", nodes.len()));
            match self.changes(&nodes[..middle])? {
                true => most = middle,
                false => least = middle,
            }
        }
        let Some(node) = most.checked_sub(1).and_then(|last| nodes.get(last)).copied() else { return Ok(()) };
        let alone = self.changes(&[node])?;
        found.node = Some(node);
        found.group = group(whole, node)?;
        let with = if alone { "" } else { " together with those before it" };
        found.answer.push(format!(
            "the logits are those of a run that nobody looks at unless {node} is looked at{with}: without that {} may be one \
             kernel, or something overtakes what {node} reads",
            found.group.join(" + ")
        ));
        Ok(())
    }
}

/// The op of a node with those that read it or that it reads, and that nothing else does: what a backend may fuse.
fn group(dump: &Dump, node: Checkpoint) -> Result<Vec<String>> {
    for graph in Graphs::read(dump)?.all() {
        let labels = label::labels(graph);
        let Some(id) = graph.computed().find(|id| labels[*id] == Some(node)) else { continue };
        let before = graph
            .sources(id)
            .map(|src| graph.storage(src))
            .find(|src| !graph.is_leaf(*src) && readers(graph, *src).len() == 1);
        let after = Some(readers(graph, id)).filter(|readers| readers.len() == 1).map(|readers| readers[0]);
        let chain = before.into_iter().chain([id]).chain(after);
        return Ok(chain.map(|id| graph.get(id).op.name().to_owned()).collect());
    }
    Ok(Vec::new())
}

/// The nodes that compute something of what a node computed.
fn readers(graph: &Graph, node: Id) -> Vec<Id> {
    let reads = |reader: &Id| {
        !graph.get(*reader).op.is_view() && graph.sources(*reader).any(|src| graph.storage(src) == node)
    };
    graph.computed().filter(reads).collect()
}

/// Whether the run that was looked at is healthy: then the one that nobody looks at is not.
fn which_is_wrong(seen: &Recorded, judged: &diff::Options) -> Result<String> {
    let file = ModelFile::open(&seen.model)?;
    let options = crate::jobs::audit::Options {
        selection: judged.selection.clone(),
        rows: judged.audit.unwrap_or_default(),
        allow_missing: judged.allow_missing,
    };
    let report: Report = crate::jobs::audit::audit(&mut Dump::open(&seen.dir)?, &file, &options)?;
    Ok(match report.verdict {
        Verdict::Parity => {
            "every node that is looked at is healthy: it is the run that nobody looks at that is wrong, or another order of sums"
                .to_owned()
        }
        _ => format!("the run that is looked at: {}: {}", answer(&report), because(&report)),
    })
}
