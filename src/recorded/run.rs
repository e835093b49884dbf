//! The graph of a recording executed by parity's own machine, from the recording's inputs alone, and compared with it.

use std::collections::BTreeMap;

use parity_dump::Dump;
use parity_dump::manifest::Producer;

use super::entry::{Known, assemble, entries};
use super::{Foreign, audit::interrupted, is_left_out, limits, side, tried};
use crate::arithmetic::{Arithmetic, Hypothesis};
use crate::audit::recorded::{self, Arrangement, Finding, Findings, Labelled, Steps};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{Accumulator, Comparison, Status, TokenSums, Tolerances};
use crate::engine::machine::{Conductor, Machine, Node, Number, Unknown, Value, own};
use crate::error::{Error, Result};
use crate::faults::rewritten::diagnose;
use crate::numerics::{Numerics, Products};
use crate::ops::source::{Data, contiguous};
use crate::ops::{Args, Check, Source, Strided};
use crate::report::Report;
use crate::select::Selection;

/// What of a run is looked at, and how it computes.
pub struct RunOptions {
    /// Which nodes.
    pub selection: Selection,
    /// The user's tolerances.
    pub tolerances: Tolerances,
    /// f32, f64, or as llama.cpp's CPU kernels round.
    pub numerics: Numerics,
    /// Whether nodes that the reference lacks are no obstacle to parity.
    pub allow_missing: bool,
}

/// Executes the recorded graph in all its steps and compares node by node.
///
/// # Errors
/// An arithmetic that the machine does not have.
pub fn run(dump: &Dump, foreign: &Foreign, options: &RunOptions) -> Result<Report> {
    let arithmetic = match options.numerics.products {
        Products::F32 | Products::F64 => Arithmetic::EXACT,
        Products::LlamaCpu => Arithmetic::LLAMA_CPU,
        _ => {
            return Err(Error::new("--numerics", "is none that a recorded graph is executed in")
                .expected("f32, f64 or llama-cpu")
                .found(options.numerics));
        }
    };
    let recorded = foreign.graphs(dump)?;
    let (graphs, judged) = (recorded.steps(), recorded.judged(dump, dump));
    limits::check(dump.path(), &graphs, &foreign.gguf, limits::Work::Run)?;
    let all = recorded::order(&graphs, &|_| true);
    let selected = foreign.selected(all.clone(), &options.selection);
    let theirs = recorded::audit(&judged, &graphs, &foreign.gguf, &|_| true, &diagnose)?;
    let ours = match options.numerics.products {
        Products::F64 => execute::<f64>(&judged, foreign, &graphs, &all, options, arithmetic)?,
        _ => execute::<f32>(&judged, foreign, &graphs, &all, options, arithmetic)?,
    };
    let shown = all.iter().filter(|id| !is_left_out(**id, &theirs, &judged, &options.selection));
    let known = shown.map(|&id| Known {
        id,
        comparison: ours.comparisons.get(&id),
        candidate: ours.findings.nodes.get(&id),
        reference: theirs.nodes.get(&id),
        across: ours.findings.is_bridged(id),
    });
    let ([ours_in_full, ours_screened], [in_full, screened]) = (ours.findings.rows(), theirs.rows());
    let rows = [ours_in_full + in_full, ours_screened + screened];
    let mut report = assemble(
        entries(known, &|id| selected.contains(&id)),
        &graphs,
        &|id| tried(&ours.findings, id),
        options.allow_missing,
        rows,
    );
    report.tokens = ours.tokens.report();
    report.reference = Some(side(dump, Some(dump.path().display().to_string())));
    report.candidate = side(dump, None);
    report.candidate.producer = Producer {
        name: "parity".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        backend: Some("cpu".to_owned()),
        device: None,
        numerics: Some(options.numerics.to_string()),
    };
    report.candidate.provenance.clear();
    report.notes.extend(interrupted(dump));
    foreign.weigh_wiring(&recorded, &mut report);
    report.notes.extend(ours.notes);
    Ok(report)
}

/// What an execution came to.
struct Executed {
    findings: Findings,
    comparisons: BTreeMap<Checkpoint, Comparison>,
    tokens: TokenSums,
    notes: Vec<String>,
}

fn execute<S: Number>(
    dump: &dyn Steps,
    foreign: &Foreign,
    graphs: &[(usize, &Labelled)],
    selected: &[Checkpoint],
    options: &RunOptions,
    arithmetic: Arithmetic,
) -> Result<Executed> {
    let mut machine: Machine<'_, S> = Machine::new(&foreign.gguf, arithmetic);
    let mut runner = Runner {
        step: 0,
        dump,
        labelled: None,
        selected,
        options,
        sums: BTreeMap::new(),
        findings: Findings::default(),
        tokens: TokenSums::default(),
        notes: Vec::new(),
    };
    for &(step, labelled) in graphs {
        (runner.step, runner.labelled) = (step, Some(labelled));
        machine.step(&labelled.program, &|id| labelled.input(dump, step, id), &mut runner)?;
    }
    let Runner { sums, findings, tokens, notes, .. } = runner;
    let comparisons = sums.into_iter().map(|(id, pair)| (id, pair.comparison(id))).collect();
    Ok(Executed { findings, comparisons, tokens, notes })
}

/// The two sides of one node.
struct Pair {
    sums: Accumulator,
    row_shape: Vec<usize>,
    tolerated: bool,
    missing: bool,
}

impl Pair {
    fn comparison(self, checkpoint: Checkpoint) -> Comparison {
        let rows = self.sums.n_rows() as u64;
        let within = (self.tolerated && rows > 0).then(|| self.sums.within_tolerance());
        let status = if self.missing { Status::MissingReference } else { Status::Compared };
        Comparison {
            checkpoint,
            status,
            numbers: self.sums.numbers(&self.row_shape),
            row_shape: self.row_shape,
            within_tolerance: within,
            rows_compared: rows,
            rows_expected: rows,
            seen: None,
        }
    }
}

/// Executes, compares with what was recorded, and holds its own results to f64.
struct Runner<'a> {
    step: usize,
    dump: &'a dyn Steps,
    labelled: Option<&'a Labelled>,
    selected: &'a [Checkpoint],
    options: &'a RunOptions,
    sums: BTreeMap<Checkpoint, Pair>,
    findings: Findings,
    tokens: TokenSums,
    notes: Vec<String>,
}

impl<S: Number> Conductor<S> for Runner<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, S>, &Unknown>,
    ) -> Result<Value<S>> {
        let value = own(node, args);
        let labelled = self.labelled;
        let Some((labelled, id)) =
            labelled.and_then(|graph| Some((graph, graph.labels.get(node.id).copied()??)))
        else {
            return Ok(value);
        };
        let wanted = self.selected.contains(&id);
        let recorded = self.dump.tensor(self.step, id);
        let arranged = recorded.as_ref().and_then(|recorded| labelled.arrange(node.id, id, recorded));
        let (Some(recorded), Some(arranged)) = (recorded, arranged) else {
            if wanted {
                self.findings.at(id).unrecorded += 1;
            }
            return Ok(value);
        };
        let mut values = match value {
            Ok(values) => values.data,
            Err(unknown) => {
                if wanted {
                    self.findings.at(id).cannot(&unknown.0);
                }
                // What cannot be computed is taken over, so that what follows can be.
                let theirs = arranged.of_node(&recorded.values, |_| 0.0);
                return Ok(Ok(theirs.into_iter().map(S::from_f64).collect::<Vec<S>>().into()));
            }
        };
        if wanted {
            let finding = self.findings.at(id);
            finding.row_shape = recorded.shape.get(1..).unwrap_or_default().to_vec();
            hold(finding, node, args, &values, &arranged);
            self.compare(id, &values, &recorded, &arranged);
        }
        if node.rule.is_some_and(|rule| matches!(rule.check, Check::Choice(_))) {
            self.follow(id, &mut values, &recorded, &arranged);
        }
        Ok(Ok(values.into()))
    }
}

impl Runner<'_> {
    /// Compares the rows of a node with what was recorded of them.
    fn compare<S: Number>(
        &mut self,
        id: Checkpoint,
        values: &[S],
        theirs: &recorded::Tensor,
        at: &Arrangement,
    ) {
        let tolerance = self.options.tolerances.of(id);
        let pair = self.sums.entry(id).or_insert_with(|| Pair {
            sums: Accumulator::new(tolerance),
            row_shape: theirs.shape.get(1..).unwrap_or_default().to_vec(),
            tolerated: !tolerance.is_empty(),
            missing: false,
        });
        let single: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        let ours = at.of_rows(&single);
        for (row, &position) in at.positions().iter().enumerate() {
            let (a, b) = (at.row(&ours, row), at.row(&theirs.values, row));
            pair.sums.row(position, &a, &b);
            if id == Checkpoint::global(Kind::Logits) {
                self.tokens.row(position, &a, &b);
            }
        }
    }

    /// Goes on with the choice that was recorded: where scores differ by rounding alone, both are right, and values of
    /// another choice could not be compared.
    fn follow<S: Number>(
        &mut self,
        id: Checkpoint,
        values: &mut [S],
        theirs: &recorded::Tensor,
        at: &Arrangement,
    ) {
        let recorded = at.of_node(&theirs.values, |_| 0.0);
        let differ = values.iter().zip(&recorded).filter(|(own, other)| own.to_f64() != **other).count();
        if differ == 0 {
            return;
        }
        self.notes.push(format!(
            "{id} chose otherwise than the reference in {differ} of {} places (step {}); what follows goes by the \
             reference's choice, which its audit judges",
            values.len(),
            self.step
        ));
        values.iter_mut().zip(recorded).for_each(|(own, other)| *own = S::from_f64(other));
    }
}

/// Holds the machine's own result to f64.
fn hold<S: Number>(
    finding: &mut Finding,
    node: &Node<'_>,
    args: std::result::Result<&Args<'_, S>, &Unknown>,
    values: &[S],
    arranged: &Arrangement,
) {
    let (Ok(args), Some(rule)) = (args, node.rule) else { return };
    let doubles: Vec<Option<Vec<f64>>> = args
        .sources
        .iter()
        .map(|source| match source.as_ref().map(|source| &source.data) {
            Some(Data::Values(values)) => Some(values.to_vec().into_iter().map(|x| x.to_f64()).collect()),
            _ => None,
        })
        .collect();
    let sources = args.sources.iter().zip(&doubles).map(|(source, doubles)| {
        source.as_ref().map(|source| {
            let data = match (&source.data, doubles) {
                (Data::Weight(weight), _) => Data::Weight(*weight),
                (Data::Values(values), doubles) => Data::Values(Strided {
                    data: doubles.as_deref().unwrap_or_default(),
                    offset: 0,
                    shape: values.shape,
                    strides: contiguous(values.shape),
                }),
            };
            Source { dtype: source.dtype, data }
        })
    });
    let Args { name, params, shape, dtype, arithmetic, .. } = *args;
    let double: Args<'_, f64> = Args { name, params, sources: sources.collect(), shape, dtype, arithmetic };
    let values: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
    let tried = [Hypothesis { name: "its own", arithmetic: *arithmetic }];
    let looked_at = |element: usize| arranged.is_recorded(element);
    let sight = recorded::Sight { looked_at: &looked_at, carried: &[] };
    match recorded::judge(rule, &double, &values, &sight, &tried) {
        Ok(held) => finding.add(held, arranged, arranged.positions().len()),
        Err(unknown) => finding.cannot(&unknown.0),
    }
}
