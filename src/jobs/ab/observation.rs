//! Whether looking changes what is computed: a run of which nothing but the logits is read, beside one that is looked at.
//! Where bits differ, rounding may explain it: a kernel that fuses nodes adds up in another order. Where it does not, the
//! node is searched for whose observation heals the run: one that is not fused any more then, or whose inputs nothing can
//! overtake any more.

use std::path::Path;

use parity_dump::Dump;
use serde::Serialize;

use super::repeat::ended;
use super::side::{Recorded, Recording, record};
use super::unseen::{Group, group, over_rounding};
use super::{Side, diff};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{self, Tolerances, bits, common_positions};
use crate::error::{Error, Result};
use crate::jobs::audit::{self, audit};
use crate::jobs::bitwise::execution_order;
use crate::record::{Filter, Observe};
use crate::report::words::{answer, because, count, number};
use crate::report::{FirstDivergence, Report, Verdict};

/// Name and version of what is printed.
pub const SCHEMA: &str = "parity-observation/1";

/// What came of looking.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observation {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Rows of logits that were compared.
    pub rows: usize,
    /// Positions of those that are not the same bits.
    pub differing: Vec<u32>,
    /// Whether two runs that nobody looks at are equal; looked at where rows differ.
    pub steady: bool,
    /// Whether rounding explains the logits of the run that nobody looks at; null where none differ, or it cannot be said.
    pub explained: Option<bool>,
    /// Their distance from exact arithmetic over what rounding explains; null as there.
    pub over_bound: Option<f64>,
    /// The node whose observation changes them; null where looking changes nothing, or no single node was found.
    pub node: Option<Checkpoint>,
    /// What may be one kernel without the observation.
    pub group: Vec<String>,
    /// What is wrong first where that group is left alone and everything else is looked at; null where nothing is.
    pub wrong: Option<FirstDivergence>,
    /// How many runs it took.
    pub runs: usize,
    /// The answer, in sentences.
    pub answer: Vec<String>,
}

impl Observation {
    /// Whether looking changes nothing but roundings; of a run that differs from itself nothing can be said.
    pub fn verdict(&self) -> Verdict {
        match self.explained {
            _ if self.rows == 0 || !self.steady => Verdict::Undecided,
            _ if self.differing.is_empty() => Verdict::Parity,
            Some(true) => Verdict::Parity,
            Some(false) => Verdict::Divergence,
            None => Verdict::Undecided,
        }
    }

    /// For people.
    pub fn render(&self) -> String {
        let head = match self.verdict() {
            Verdict::Parity if self.differing.is_empty() => "UNCHANGED: looking changes no bit of the logits",
            Verdict::Parity => {
                "UNCHANGED but for rounding: looking changes bits of the logits, and rounding explains it"
            }
            Verdict::Divergence => "CHANGED: looking changes the logits by more than rounding explains",
            Verdict::Undecided if self.rows == 0 => "UNDECIDED: no row of logits could be compared",
            Verdict::Undecided if !self.steady => "UNDECIDED: the run differs from itself",
            Verdict::Undecided => "UNDECIDED: looking changes bits of the logits, by rounding or not",
        };
        let lines: Vec<String> = self.answer.iter().map(|sentence| format!("  {sentence}")).collect();
        [vec![head.to_owned()], lines].concat().join("\n") + "\n"
    }
}

/// The runs of one command, each looked at in another way.
struct Looking<'a> {
    side: &'a Side,
    how: &'a Recording<'a>,
    /// The run that was looked at as the user asks, and whose tokens all others compute.
    seen: (&'a Recorded, Dump),
    /// The run of which the logits alone are read.
    unseen: Dump,
    runs: usize,
}

/// Looks at a command in ways that differ, and finds the node whose observation changes its logits.
///
/// # Errors
/// A program that cannot be recorded.
pub fn observation(side: &Side, how: &Recording<'_>, judged: &diff::Options) -> Result<Observation> {
    let observe = if how.observe == Observe::Auto { Observe::Nodes } else { how.observe };
    let how = &Recording { observe, ..how.clone() };
    let seen = record(&named(side, "seen"), how, None)?;
    if let Some(why) = ended(&seen, &Dump::open(&seen.dir)?) {
        return Err(Error::new("parity ab --observation", why).expected("a run to its end"));
    }
    let (mut looking, mut found) = Looking::at_both(side, how, &seen)?;
    looking.runs += 1;
    if !found.differing.is_empty() {
        let options = audit::Options {
            selection: judged.selection.clone(),
            rows: judged.audit.unwrap_or_default(),
            allow_missing: judged.allow_missing,
        };
        let report = audit(&mut Dump::open(&seen.dir)?, &seen.file()?, &options)?;
        looking.weigh(&mut found, Some(&report))?;
        if found.steady {
            looking.search(&mut found)?;
        }
    }
    found.runs = looking.runs;
    Ok(found)
}

/// The same of a side that was recorded already: where its logits are other ones when nobody looks, and rounding does not
/// explain it, the node whose observation heals it is searched for. `healthy`: whether the recording is.
///
/// # Errors
/// A program that cannot be recorded.
pub fn of_side(side: &Side, how: &Recording<'_>, seen: &Recorded, healthy: bool) -> Result<Observation> {
    let (mut looking, mut found) = Looking::at_both(side, how, seen)?;
    if !found.differing.is_empty() && healthy {
        looking.weigh(&mut found, None)?;
        if found.steady && found.explained == Some(false) {
            looking.search(&mut found)?;
        }
    }
    if found.differing.is_empty() {
        let dir = looking.unseen.path().to_owned();
        drop(looking.unseen);
        remove(&dir)?;
    }
    found.runs = looking.runs;
    Ok(found)
}

fn named(side: &Side, name: &str) -> Side {
    Side { name: name.to_owned(), ..side.clone() }
}

fn remove(dir: &Path) -> Result<()> {
    std::fs::remove_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be removed: {e}")))
}

impl<'a> Looking<'a> {
    /// A run that is looked at, and the same that nobody looks at: where their logits differ.
    fn at_both(
        side: &'a Side,
        how: &'a Recording<'a>,
        seen: &'a Recorded,
    ) -> Result<(Looking<'a>, Observation)> {
        let unseen = unseen(side, how, seen, "unseen")?;
        let looking = Looking { side, how, seen: (seen, Dump::open(&seen.dir)?), unseen, runs: 1 };
        let (rows, differing) = apart(&looking.seen.1, &looking.unseen);
        let found = Observation {
            schema: SCHEMA,
            rows,
            differing,
            steady: true,
            explained: None,
            over_bound: None,
            node: None,
            group: Vec::new(),
            wrong: None,
            runs: 0,
            answer: vec![format!("{} of logits compared", count(rows, "row"))],
        };
        Ok((looking, found))
    }

    /// Whether the run that nobody looks at differs from itself, and whether rounding explains its logits; `report` is what
    /// an audit says of the one that is looked at.
    fn weigh(&mut self, found: &mut Observation, report: Option<&Report>) -> Result<()> {
        self.runs += 1;
        let again = unseen(self.side, self.how, self.seen.0, "again")?;
        let bits = apart(&again, &self.unseen).1;
        found.steady = bits.is_empty();
        let rows =
            format!("looking changes bits of {} of {}", found.differing.len(), count(found.rows, "row"));
        if let Some(wrong) = report.filter(|report| report.verdict == Verdict::Divergence) {
            found.explained = Some(false);
            found.answer.push(format!(
                "{rows}; the run that is looked at is wrong itself: {}: {}",
                answer(wrong),
                because(wrong)
            ));
        } else {
            let file = self.seen.0.file()?;
            let over = over_rounding(&self.seen.1, &self.unseen, &file)?;
            (found.explained, found.over_bound) = (over.map(|own| own.over <= 1.0), over.map(|own| own.over));
            found.answer.push(match over {
                Some(own) if own.over <= 1.0 => format!(
                    "{rows}, and rounding explains it: its logits are {} from exact arithmetic where nobody looks, and \
                     rounding explains {}",
                    number(own.distance),
                    number(own.band)
                ),
                Some(own) => format!(
                    "{rows}: every node that is looked at is healthy, and where nobody looks the logits are {} from exact \
                     arithmetic, {} times what rounding explains",
                    number(own.distance),
                    number(own.over)
                ),
                None => format!(
                    "{rows}; whether rounding explains it cannot be said: it decides a choice on the way to the logits, or \
                     an op has no rule"
                ),
            });
        }
        if !found.steady {
            found.answer.push(
                "two runs that nobody looks at differ too, so that this says nothing of looking: parity ab --repeat finds where"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// A run of which some nodes alone are looked at, as the first was.
    fn at(&mut self, name: &str, nodes: impl Iterator<Item = Checkpoint>) -> Result<Dump> {
        self.runs += 1;
        let ids = nodes.chain([Checkpoint::global(Kind::Logits)]).map(|id| id.to_string()).collect();
        // What was looked at node by node is again, and so is what was kept.
        let observe = match self.seen.1.manifest().observed.as_deref() {
            Some("outputs") => Observe::Outputs,
            _ => Observe::Nodes,
        };
        let how = Recording { observe, filter: Filter { layers: None, globs: ids }, ..self.how.clone() };
        let name = format!("{}-{name}", self.side.name);
        opened(&record(&named(self.side, &name), &how, Some(&self.seen.0.forced()))?)
    }

    /// Whether looking at these nodes changes the logits: their bits, or, where rounding does not explain those that nobody
    /// looks at, so that they are nearer to those of the run that is looked at.
    fn changes(&mut self, nodes: &[Checkpoint], explained: Option<bool>) -> Result<bool> {
        let run = self.at("looked", nodes.iter().copied())?;
        let (rows, differing) = apart(&run, &self.unseen);
        let changed = rows > 0 && !differing.is_empty();
        let changed = match explained {
            Some(false) if changed => !(distance(&run, &self.seen.1) >= distance(&run, &self.unseen)),
            _ => changed,
        };
        let dir = run.path().to_owned();
        drop(run);
        remove(&dir)?;
        Ok(changed)
    }

    /// The first node in the order of execution whose observation, with those before it, changes the logits; and what is
    /// wrong where its like is left alone.
    fn search(&mut self, found: &mut Observation) -> Result<()> {
        let mut nodes = execution_order(&self.seen.1)?;
        nodes.retain(|id| id.kind() != Kind::Logits);
        // Looking at the first `least` changes nothing, at the first `most` it does.
        let (mut least, mut most) = (0, nodes.len());
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            (self.how.say)(&format!("looking at the first {middle} of {} nodes", nodes.len()));
            match self.changes(&nodes[..middle], found.explained)? {
                true => most = middle,
                false => least = middle,
            }
        }
        let Some(node) = most.checked_sub(1).and_then(|last| nodes.get(last)).copied() else { return Ok(()) };
        let alone = self.changes(&[node], found.explained)?;
        let group = group(&self.seen.1, node)?;
        (found.node, found.group) = (Some(node), group.ops.clone());
        let with = if alone { "" } else { " together with those before it" };
        let what = match found.explained {
            Some(false) => "wrong",
            _ => "those of a run that nobody looks at",
        };
        found.answer.push(format!(
            "the logits are {what} unless {node} is looked at{with}: without that {} may be one kernel, or something \
             overtakes what {node} reads",
            group.ops.join(" + ")
        ));
        self.leave_alone(found, &nodes, &group)
    }

    /// Records everything but a group, so that it is computed as when nobody looks, and judges what is behind it.
    fn leave_alone(&mut self, found: &mut Observation, nodes: &[Checkpoint], group: &Group) -> Result<()> {
        let others: Vec<Checkpoint> = nodes.iter().filter(|id| !group.alike.contains(id)).copied().collect();
        let mut dump = self.at("left", others.into_iter())?;
        let file = self.seen.0.file()?;
        let options = audit::Options { allow_missing: true, ..audit::Options::default() };
        let report = audit(&mut dump, &file, &options)?;
        let left = format!(
            "with {} left alone and everything else looked at",
            count(group.alike.len(), "such node")
        );
        found.answer.push(match (&report.first_divergence, found.explained) {
            (Some(first), _) => {
                format!("{left}, it is wrong first at {}: {}", first.checkpoint, because(&report))
            }
            (None, Some(false)) => format!("{left}, no node is wrong: looking at others heals it too"),
            (None, _) => format!("{left}, no node is wrong"),
        });
        // Logits hide what a node shows.
        if report.first_divergence.is_some() {
            found.explained = Some(false);
        }
        found.wrong = report.first_divergence;
        Ok(())
    }
}

/// A run of which the logits alone are read.
fn unseen(side: &Side, how: &Recording<'_>, seen: &Recorded, name: &str) -> Result<Dump> {
    let filter = Filter { layers: None, globs: vec![Kind::Logits.name().to_owned()] };
    let how = Recording { observe: Observe::None, filter, ..how.clone() };
    let name = format!("{}-{name}", side.name);
    opened(&record(&named(side, &name), &how, Some(&seen.forced()))?)
}

fn opened(run: &Recorded) -> Result<Dump> {
    Ok(Dump::open(&run.dir)?)
}

/// How many rows of logits two runs share, and where their bits differ.
fn apart(run: &Dump, other: &Dump) -> (usize, Vec<u32>) {
    let common = common_positions(run.tokens(), other.tokens());
    let found = bits::differing(run, other, Checkpoint::global(Kind::Logits), common);
    found.map_or((0, Vec::new()), |found| (found.compared, found.rows))
}

/// ‖run - other‖ / ‖other‖ of the logits; NaN where nothing is in common.
fn distance(run: &Dump, other: &Dump) -> f64 {
    let logits = [Checkpoint::global(Kind::Logits)];
    let compared = compare::dumps(run, other, &logits, &Tolerances::default());
    compared.first().and_then(|found| found.numbers.as_ref()).map_or(f64::NAN, |numbers| numbers.rel_l2)
}
