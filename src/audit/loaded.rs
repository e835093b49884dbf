//! Engines that keep weights in a narrower type than the file: a loader that converts whatever it reads, or the weights of norms
//! and biases alone. Every node that reads one is then off alike, which is one finding and no bug of a node.

use std::collections::BTreeSet;

use indexmap::IndexSet;
use parity_graph::weights::{self, Name};
use parity_graph::{Id, Op};

use super::best::scouts;
use super::simulate::Stretch;
use super::storage_types::shown;
use super::{Exact, Finding, Findings, Labelled, Steps, exact, is_recorded};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::{Gguf, Loaded, TensorRef};
use crate::numerics::Storage;
use crate::watch;

/// Nodes that are looked at, from the first to the last.
const NODES_MAX: usize = 8;
/// Matmuls that are, which cost more.
const MATMULS_MAX: usize = 5;
/// Rows of each.
const ROWS_MAX: usize = 4;
/// How much of a node's error rounded weights must leave at most, in all that are looked at: half of its square where values
/// are kept in the same type, and next to nothing in f32.
const LEFT: f64 = 0.81;
/// The same of matmuls where nothing else shows it: roundings of f32 are far less than that.
const LEFT_ALONE: f64 = 0.01;
/// Elements of a weight up to which a matmul with it is looked at.
const WEIGHT_MAX: usize = 1 << 23;

/// What is looked at of a node: its recorded rows at some positions.
pub(super) type Sampled = (Checkpoint, BTreeSet<u32>);

/// What a producer rounds as it loads it, where most of the nodes that are looked at show it, since one may be wrong, or most of
/// the vectors that show anything; and the model file as it reads it.
///
/// # Errors
/// A file that cannot be read.
pub fn kept(steps: &dyn Steps, graphs: &[(usize, &Labelled)], gguf: &Gguf) -> Result<Option<(Loaded, Gguf)>> {
    if steps.is_own_graph() {
        return Ok(None);
    }
    let any = |labelled: &Labelled, id: Id, is: &dyn Fn(&TensorRef<'_>) -> bool| {
        let graph = &labelled.program.graph;
        graph.sources(id).filter_map(|source| gguf.tensor(&graph.get(source).name)).any(|weight| is(&weight))
    };
    let reads = |labelled: &Labelled, id: Id, vectors: bool, most: usize| {
        let is = |weight: &TensorRef<'_>| {
            weight.info.is_plain_vector() == vectors && weight.info.elements() <= most
        };
        any(labelled, id, &is)
    };
    let vectors = [Op::Mul, Op::Add].map(|of| {
        sampled(steps, graphs, NODES_MAX, |labelled, id, op| {
            *op == of && reads(labelled, id, true, usize::MAX)
        })
    });
    let rows = sampled(steps, graphs, 1, |labelled, id, op| {
        *op == Op::GetRows && reads(labelled, id, false, usize::MAX)
    });
    // Of a file most of whose matrices were of that type before an adapter was merged into some, those alone show it.
    let changes = |labelled: &Labelled, id: Id, storage: Storage| {
        any(labelled, id, &|weight| !holds_row(weight, storage))
    };
    let matmuls = |storage: Storage| {
        sampled(steps, graphs, MATMULS_MAX, |labelled, id, op| {
            matches!(op, Op::MulMat | Op::MulMatId)
                && reads(labelled, id, false, WEIGHT_MAX)
                && changes(labelled, id, storage)
        })
    };
    let file = (steps, graphs, gguf);
    let filed = |nodes: &[Sampled]| errors(steps, graphs, gguf, nodes);
    let filed_rows = filed(&rows)?;
    let filed_vectors = [filed(&vectors[0])?, filed(&vectors[1])?];
    let mut loaded = Loaded::default();
    for kept in [Storage::F16, Storage::Bf16] {
        let storage = Some(kept);
        if loaded.norms.is_none() && loaded.biases.is_none() {
            let [norms, biases] = of_vectors(file, (&vectors, &filed_vectors), storage)?;
            loaded = Loaded { norms, biases, ..loaded };
        }
        if loaded.matrices.is_some() {
            continue;
        }
        loaded = of_matrices(file, (&rows, &filed_rows), matmuls(kept), (loaded, storage))?;
    }
    // Of norms and biases that nobody recorded what follows them says whether they are rounded like matrices.
    if loaded.matrices.is_some() && vectors.iter().flatten().count() < 2 {
        loaded = with_vectors(steps, graphs, gguf, loaded)?;
    }
    Ok(gguf.loaded(loaded)?.map(|gguf| (loaded, gguf)))
}

/// With tables and matrices, if they are rounded to this. Rows of a table are exact, so that operands which are rounded as well do not
/// matter beside them. What they do not show matmuls must show alone.
fn of_matrices(
    file: (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    (rows, filed_rows): (&[Sampled], &[Option<f64>]),
    matmuls: Vec<Sampled>,
    (loaded, storage): (Loaded, Option<Storage>),
) -> Result<Loaded> {
    let (steps, graphs, gguf) = file;
    let of_tables = Loaded { tables: storage, ..Loaded::default() };
    let of_rows = compared(file, filed_rows, of_tables, (rows, LEFT))?;
    let left = if of_rows.is_shown(1) { LEFT } else { LEFT_ALONE };
    let of_matrices = Loaded { matrices: storage, head: storage, ..of_tables };
    let filed = errors(steps, graphs, gguf, &matmuls)?;
    let of_matmuls = compared(file, &filed, of_matrices, (&matmuls, left))?;
    let are_rounded = of_matmuls.is_shown(matmuls.len().clamp(1, 2));
    // Operands that are rounded to the same type hide whether weights were.
    let are_hidden = loaded.tables.is_none() && of_rows.is_shown(1) && of_matmuls.is_open();
    if !are_rounded && !are_hidden {
        return Ok(loaded);
    }
    let unrounded = unrounded_head(file, storage)?;
    let is_table = unrounded == Some(weights::TOKEN_EMBD);
    let are_shown = are_hidden || of_rows.changed == 0 || of_rows.is_shown(1);
    let tables = storage.filter(|_| are_shown && !is_table);
    let head = storage.filter(|_| unrounded.is_none());
    Ok(if are_rounded {
        Loaded { tables, head, matrices: storage, ..loaded }
    } else {
        Loaded { tables, ..loaded }
    })
}

/// Whether the weight of the last product, which may be the table of embeddings, is left as it is where those of others are rounded, as
/// engines leave it that compute logits in f32: by its name.
fn unrounded_head(
    (steps, graphs, gguf): (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    storage: Option<Storage>,
) -> Result<Option<&'static str>> {
    let rounded = Loaded { head: storage, tables: storage, ..Loaded::default() };
    for part in [weights::OUTPUT, weights::TOKEN_EMBD] {
        let head = sampled(steps, graphs, 1, |labelled, id, op| {
            let graph = &labelled.program.graph;
            let is_head = |source: Id| Name::of(&graph.get(source).name).part == part;
            *op == Op::MulMat && graph.sources(id).any(is_head)
        });
        if head.is_empty() {
            continue;
        }
        let filed = errors(steps, graphs, gguf, &head)?;
        if compared((steps, graphs, gguf), &filed, rounded, (&head, LEFT))?.is_denied() {
            return Ok(Some(part));
        }
    }
    Ok(None)
}

/// What norms and biases are rounded to, if to this: a loader that rounds some rounds the others too, where these do not say that it
/// leaves them.
fn of_vectors(
    file: (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    (nodes, filed): (&[Vec<Sampled>; 2], &[Vec<Option<f64>>; 2]),
    storage: Option<Storage>,
) -> Result<[Option<Storage>; 2]> {
    let both = Loaded { norms: storage, biases: storage, ..Loaded::default() };
    let of = |i: usize| compared(file, &filed[i], both, (&nodes[i], LEFT));
    let [norms, biases] = [of(0)?, of(1)?];
    let is_said = [norms.and(&biases), norms, biases].iter().any(|one| one.is_said(2));
    Ok([norms, biases].map(|one| storage.filter(|_| is_said && !one.is_denied())))
}

/// What a producer rounds as it loads it, and the model file as it reads it, where that alone leaves f32's roundings of nodes behind
/// much that was not recorded, as logits alone are, and nothing else explains or names what they are off by.
///
/// # Errors
/// A file that cannot be read; those of the machine.
pub fn behind(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    findings: &Findings,
) -> Result<Option<(Loaded, Gguf)>> {
    if steps.is_own_graph() || watch::over().is_some() || shown(steps, graphs) != Storage::F32 {
        return Ok(None);
    }
    let is_open = |found: &Finding| {
        let is_unknown = found.is_wrong() || found.undecided.is_some() || found.hidden().is_some();
        (found.judged == 0 || !found.bridged.is_empty()) && found.diagnosis().0.is_empty() && is_unknown
    };
    let is_open =
        |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(is_open) && is_recorded(steps, graphs, **id);
    let open: IndexSet<Checkpoint> = findings.order.iter().filter(is_open).copied().collect();
    let some = scouts(&open);
    if some.is_empty() {
        return Ok(None);
    }
    let distances = |gguf: &Gguf| Stretch::of_known(steps, graphs, gguf).distances(Arithmetic::EXACT, &some);
    let filed = distances(gguf)?;
    // One of them may be wrong, whatever the weights are.
    let are_most = |count: usize| 2 * count >= some.len();
    for kept in [Storage::F16, Storage::Bf16].map(Some) {
        let vectors = Loaded { norms: kept, biases: kept, ..Loaded::default() };
        let matrices = Loaded { tables: kept, head: kept, matrices: kept, ..Loaded::default() };
        for loaded in [vectors, matrices, Loaded { norms: kept, biases: kept, ..matrices }] {
            let Some(rounded) = gguf.loaded(loaded)? else { continue };
            let is_nearer =
                |(id, left): &(Checkpoint, f64)| filed.get(id).is_some_and(|off| *left <= LEFT_ALONE * off);
            if !are_most(distances(&rounded)?.into_iter().filter(is_nearer).count()) {
                continue;
            }
            let found = Stretch::of_known(steps, graphs, &rounded).explained(Arithmetic::EXACT, &some)?;
            if are_most(found.values().filter(|found| found.is_explained()).count()) {
                return Ok(Some((loaded, rounded)));
            }
        }
    }
    Ok(None)
}

/// How nodes compare whose errors with the file are known, with it and with what a loader makes of it.
fn compared(
    (steps, graphs, gguf): (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    filed: &[Option<f64>],
    loaded: Loaded,
    (nodes, left): (&[Sampled], f64),
) -> Result<Compared> {
    let Some(gguf) = gguf.loaded(loaded)? else { return Ok(Compared::default()) };
    Ok(Compared::of(filed, &errors(steps, graphs, &gguf, nodes)?, left))
}

/// With norms and biases rounded as matrices are, where what was recorded of any node shows it.
fn with_vectors(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    loaded: Loaded,
) -> Result<Loaded> {
    let all = sampled(steps, graphs, MATMULS_MAX, |_, _, op| *op != Op::GetRows);
    let rounded = Loaded { norms: loaded.matrices, biases: loaded.matrices, ..loaded };
    let without = gguf.loaded(loaded)?;
    let without = errors(steps, graphs, without.as_ref().unwrap_or(gguf), &all)?;
    let is_shown = compared((steps, graphs, gguf), &without, rounded, (&all, LEFT))?.is_shown(1);
    Ok(if is_shown { rounded } else { loaded })
}

/// Whether the first row of a weight is of numbers of a type.
fn holds_row(weight: &TensorRef<'_>, storage: Storage) -> bool {
    let mut row = vec![0.0_f32; if weight.info.dtype.is_decodable() { weight.cols() } else { 0 }];
    weight.decode_rows(0..usize::from(!row.is_empty()), &mut row);
    row.into_iter().all(|value| storage.holds(value))
}

/// How nodes compare that are computed with two files.
#[derive(Clone, Copy, Default)]
struct Compared {
    /// Which differ.
    changed: usize,
    /// Which are nearer to the second.
    nearer: usize,
    /// Which are nearer to the first.
    further: usize,
}

impl Compared {
    /// By the errors with each: those are nearer to the second of which it leaves at most this much.
    fn of(first: &[Option<f64>], second: &[Option<f64>], left: f64) -> Compared {
        let pairs = first.iter().zip(second).filter_map(|(a, b)| a.zip(*b)).filter(|(a, b)| a != b);
        pairs.fold(Compared::default(), |known, (first, second)| Compared {
            changed: known.changed + 1,
            nearer: known.nearer + usize::from(second <= left * first),
            further: known.further + usize::from(first <= LEFT * second),
        })
    }

    /// With others.
    fn and(&self, other: &Compared) -> Compared {
        let Compared { changed, nearer, further } = other;
        let (changed, nearer) = (self.changed + changed, self.nearer + nearer);
        Compared { changed, nearer, further: self.further + further }
    }

    /// Whether more speak for the first than for the second.
    fn is_denied(&self) -> bool {
        self.further > self.nearer
    }

    /// Whether what was looked at speaks for neither.
    fn is_open(&self) -> bool {
        self.changed > 0 && 2 * self.further < self.changed
    }

    /// Whether so many speak for the second, and fewer for the first: what is rounded behind the others hides it.
    fn is_said(&self, least: usize) -> bool {
        self.nearer >= least && self.nearer > self.further
    }

    /// Whether most of those that differ are nearer to the second, and these are so many.
    fn is_shown(&self, least: usize) -> bool {
        self.changed >= least && 2 * self.nearer > self.changed
    }
}

/// Some recorded nodes of a kind, each with positions that were recorded of it.
pub(super) fn sampled(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    most: usize,
    is: impl Fn(&Labelled, Id, &Op) -> bool,
) -> Vec<Sampled> {
    let Some(&(step, labelled)) = graphs.first() else { return Vec::new() };
    let nodes = labelled.nodes().filter(|(id, _)| is(labelled, *id, &labelled.program.graph.get(*id).op));
    let recorded = nodes.map(|(_, checkpoint)| checkpoint).filter(|id| steps.rows(step, *id).is_some());
    let all: Vec<Checkpoint> = recorded.collect();
    let every = all.len().div_ceil(most).max(1);
    let with_rows = |checkpoint: Checkpoint| {
        let positions = steps.tensor(step, checkpoint)?.positions;
        let every = positions.len().div_ceil(ROWS_MAX).max(1);
        Some((checkpoint, positions.into_iter().step_by(every).collect()))
    };
    all.into_iter().step_by(every).filter_map(with_rows).collect()
}

/// Of each node the squared error of what was recorded; `None` where that cannot be said.
fn errors(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    nodes: &[Sampled],
) -> Result<Vec<Option<f64>>> {
    let square = |rows: Exact| -> f64 { rows.errors().data.iter().map(|error| error.powi(2)).sum() };
    let error = |(id, positions): &Sampled| -> Result<Option<f64>> {
        Ok(exact(steps, graphs, gguf, *id, positions)?.map(square).filter(|square| square.is_finite()))
    };
    nodes.iter().map(error).collect()
}
