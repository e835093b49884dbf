//! Another model's weights, or weights that were stored in another way: one answer instead of a fault in every node.
//!
//! Where the table of embeddings or the norms differ as well as every product, the weights are another model's: no
//! kernel is common to all of these. Where the products alone differ, each by as much, what is multiplied was rounded
//! otherwise, or an adapter was added.

use std::collections::{BTreeMap, BTreeSet};

use crate::audit::{Graphs, exact};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::report::words::number;
use crate::report::{CheckpointVerdict, Entry, LocalError, Report, Verdict};
use crate::tensor::Matrix;
use parity_dump::Dump;

/// Products with weights that must be wrong for anything to be said of all.
const PRODUCTS_MIN: usize = 8;
/// Share of the products that must be wrong: of a model that was trained on, some layers may be as they were, and of four layers of which
/// modules alone were recorded gate, up and the output matrix tell, which many leave as it is: eight of nine.
const SHARE: f64 = 0.85;
/// ‖error‖ / ‖exact‖ beyond which no rounding of weights, and no adapter, is the likeliest of all that it may be: int4
/// with one scale for each row comes to about 0.1.
const FAINT: f64 = 0.25;
/// How far apart the errors of products may lie that have one cause: widths, and the sizes of outliers, differ.
const SPREAD: f64 = 16.0;
/// Share of the squares of rows that the directions which count hold, where rounding holds the rest.
const HELD: f64 = 0.99;
/// Directions that what is multiplied must have for those of the error to say anything.
const DIRECTIONS_MIN: usize = 6;
/// Products whose error is taken apart.
const TAKEN_APART_MAX: usize = 8;

/// What a node of the report is, for this question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Product,
    Bias,
    Norm,
    Table,
    /// It reads no weight.
    Weightless,
}

fn part(entry: &Entry) -> Option<Part> {
    Some(match entry.id.kind() {
        Kind::QProj
        | Kind::KProj
        | Kind::VProj
        | Kind::AttnOut
        | Kind::FfnGate
        | Kind::FfnUp
        | Kind::FfnOut => Part::Product,
        Kind::Logits => Part::Product,
        // With its product, where that was not recorded.
        Kind::Q | Kind::K | Kind::V => {
            let bridged = entry.local.candidate.as_ref().is_some_and(|local| !local.bridged.is_empty());
            if bridged { Part::Product } else { Part::Bias }
        }
        Kind::AttnNorm | Kind::FfnNorm | Kind::FinalNorm | Kind::QNorm | Kind::KNorm => Part::Norm,
        Kind::Embed => Part::Table,
        Kind::QRope | Kind::KRope | Kind::AttnCtx | Kind::FfnAct | Kind::AttnResidual | Kind::LayerOut => {
            Part::Weightless
        }
        _ => return None,
    })
}

/// What was judged of one part: the nodes at fault with their errors, and what each of the others may hide.
#[derive(Default)]
struct Count {
    wrong: Vec<(Checkpoint, f64)>,
    hides: Vec<f64>,
}

impl Count {
    fn take(&mut self, entry: &Entry, local: &LocalError) {
        match entry.verdict {
            CheckpointVerdict::Origin => self.wrong.push((entry.id, local.rel_l2)),
            CheckpointVerdict::Undecided => {}
            _ => self.hides.push(local.hides().unwrap_or(0.0)),
        }
    }

    /// How many nodes say anything of this: one that would hide the usual error of those at fault says nothing.
    fn all(&self) -> usize {
        let mut errors: Vec<f64> = self.wrong.iter().map(|(_, error)| *error).collect();
        errors.sort_by(f64::total_cmp);
        let usual = errors.get(errors.len() / 2).copied().unwrap_or(f64::INFINITY);
        errors.len() + self.hides.iter().filter(|hides| !(**hides >= usual)).count()
    }

    fn is_wrong(&self) -> bool {
        !self.wrong.is_empty() && self.wrong.len() as f64 >= SHARE * self.all() as f64
    }
}

/// Puts one answer in the place of many where the weights themselves are others. Never of a report in which a mistake
/// has a name, or in which nodes without a weight are at fault too.
///
/// # Errors
/// A weight that cannot be read.
pub fn weigh(report: &mut Report, dump: &Dump, gguf: &Gguf) -> Result<()> {
    if report.verdict != Verdict::Divergence {
        return Ok(());
    }
    let mut counts: BTreeMap<Part, Count> = BTreeMap::new();
    for entry in &report.checkpoints {
        let Some((part, local)) = part(entry).zip(entry.local.candidate.as_ref()) else { continue };
        counts.entry(part).or_default().take(entry, local);
    }
    let named =
        report.checkpoints.iter().any(|entry| entry.verdict.is_fault() && !entry.diagnosis.is_empty());
    let odd = report
        .checkpoints
        .iter()
        .any(|entry| entry.verdict.is_fault() && (part(entry).is_none_or(|part| part == Part::Weightless)));
    let empty = Count::default();
    let of = |part: Part| counts.get(&part).unwrap_or(&empty);
    let (products, norms, table) = (of(Part::Product), of(Part::Norm), of(Part::Table));
    if named || odd {
        return Ok(());
    }
    if products.wrong.len() < PRODUCTS_MIN || !products.is_wrong() {
        let others = [norms, table, of(Part::Bias)].iter().any(|count| !count.wrong.is_empty());
        report.answer.extend(if others { None } else { some(products, dump, gguf)? });
        return Ok(());
    }
    let counted = format!("{} of {} weight matmuls", products.wrong.len(), products.all());
    let as_stored = norms.wrong.is_empty() && table.wrong.iter().all(|(_, error)| *error <= FAINT);
    let too = [("embed", table.is_wrong()), ("the norms", norms.is_wrong())];
    let too: Vec<&str> = too.into_iter().filter_map(|(name, is)| is.then_some(name)).collect();
    let text = if as_stored {
        let Some(how) = faint(products, dump, gguf)? else { return Ok(()) };
        format!("these are not this file's weights as it stores them: {counted} differ, {how}")
    } else if too.is_empty() {
        return Ok(());
    } else {
        format!("these are not this file's weights: {counted} differ, {} too", too.join(" and "))
    };
    report.reason = Some(text);
    report.first_divergence = None;
    report.origins.clear();
    Ok(())
}

/// What the errors of some products have in common, where adapters were added to these.
fn some(products: &Count, dump: &Dump, gguf: &Gguf) -> Result<Option<String>> {
    const PRODUCTS_OF_ADAPTER_MIN: usize = 2;
    let count = products.wrong.len();
    let ranks = ranks(products, dump, gguf)?;
    let is_adapter = count >= PRODUCTS_OF_ADAPTER_MIN && !ranks.is_empty() && ranks.iter().all(is_low);
    let highest = ranks.iter().map(|(rank, ..)| *rank).max().unwrap_or(0);
    Ok(is_adapter.then(|| {
        format!("the difference of {count} matmuls has rank {highest}, as an adapter (LoRA) makes it{HINT}")
    }))
}

/// What to do where an adapter shows.
const HINT: &str = ": --lora FILE[:SCALE] judges with one";

/// An error that any weight makes has the directions of what it is multiplied with, that of a low rank fewer.
fn is_low((rank, of, _): &Ranks) -> bool {
    2 * rank <= *of
}

/// As [`rank`], of some of the products.
fn ranks(products: &Count, dump: &Dump, gguf: &Gguf) -> Result<Vec<Ranks>> {
    let step = products.wrong.len().div_ceil(TAKEN_APART_MAX).max(1);
    let Ok(graphs) = Graphs::of_dump(dump, gguf) else { return Ok(Vec::new()) };
    let some = products.wrong.iter().step_by(step);
    some.filter_map(|(checkpoint, _)| rank(dump, &graphs, gguf, *checkpoint).transpose()).collect()
}

/// What errors of products alone, and of all of them, look like; nothing where they are large or of many sizes.
fn faint(products: &Count, dump: &Dump, gguf: &Gguf) -> Result<Option<String>> {
    let errors = || products.wrong.iter().map(|(_, error)| *error);
    let (least, most) = (errors().fold(f64::INFINITY, f64::min), errors().fold(0.0, f64::max));
    if !(most <= FAINT && most <= SPREAD * least) {
        return Ok(None);
    }
    let size = format!("each by {} to {} of its values", number(least), number(most));
    let ranks = ranks(products, dump, gguf)?;
    // What is a factor of what it should be was not rounded.
    if 2 * ranks.iter().filter(|(.., along)| *along > ALONG).count() > ranks.len() {
        return Ok(None);
    }
    let highest = ranks.iter().map(|(rank, ..)| *rank).max().unwrap_or(0);
    Ok(Some(match ranks.is_empty() {
        false if ranks.iter().all(is_low) => {
            format!(
                "{size}: by matrices of rank {highest} at most, as adapters (LoRA) in the weights are{HINT}"
            )
        }
        false if !ranks.iter().any(is_low) => format!(
            "{size}, in no direction more than in another: the weights, or what they are multiplied with, are rounded \
             otherwise (int8, another quantisation), or were trained on"
        ),
        _ => format!(
            "{size}: the weights, or what they are multiplied with, are rounded otherwise, or adapted"
        ),
    }))
}

/// Rank of the error of a product, and of what is multiplied: directions that hold nearly all of the squares; and what share of the
/// squares of the error is a factor of the product.
type Ranks = (usize, usize, f64);

/// Share of an error that is one factor of all, beyond which it is none of weights.
const ALONG: f64 = 0.5;

/// Those of one product; `None` where they say nothing.
fn rank(dump: &Dump, graphs: &Graphs, gguf: &Gguf, checkpoint: Checkpoint) -> Result<Option<Ranks>> {
    const ROWS_MAX: usize = 64;
    let positions: BTreeSet<u32> =
        Recording::positions(dump, checkpoint).into_iter().take(ROWS_MAX).collect();
    let steps = graphs.judged(dump, dump);
    let Some(rows) = exact(&steps, &graphs.steps(), gguf, checkpoint, &positions)? else { return Ok(None) };
    let Some(input) = &rows.multiplied else { return Ok(None) };
    let error = rows.recorded.data.iter().zip(&rows.exact.data).map(|(a, b)| a - b).collect();
    let error = Matrix::new(rows.exact.rows, rows.exact.cols, error);
    // A few wrong rows have no more directions than there are of them, whatever they are wrong by.
    let all = error.data.iter().map(|x| x * x).sum::<f64>();
    let is_off = |row: &usize| {
        let own = error.row(*row).iter().map(|x| x * x).sum::<f64>();
        own * error.rows as f64 >= (1.0 - HELD) * all
    };
    let off: Vec<usize> = (0..error.rows).filter(is_off).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along = dot(&error.data, &rows.exact.data).powi(2) / (all * dot(&rows.exact.data, &rows.exact.data));
    let ranks = (directions(&some_rows(&error, &off)), directions(&some_rows(input, &off)), along);
    Ok(Some(ranks).filter(|(rank, of, _)| *rank > 0 && *of >= DIRECTIONS_MIN))
}

/// Some rows of a matrix.
fn some_rows(matrix: &Matrix<f64>, rows: &[usize]) -> Matrix<f64> {
    let data = rows.iter().flat_map(|row| matrix.row(*row)).copied().collect();
    Matrix::new(rows.len(), matrix.cols, data)
}

/// Directions that hold nearly all of the squares of rows; none of rows without any.
fn directions(rows: &Matrix<f64>) -> usize {
    let mut values = eigenvalues(gram(rows));
    values.sort_by(|a, b| b.total_cmp(a));
    let all: f64 = values.iter().sum();
    let mut held = 0.0;
    let counted = values.iter().take_while(|value| {
        let open = held < HELD * all;
        held += **value;
        open
    });
    counted.count()
}

/// R·Rᵀ, (T, T)
fn gram(error: &Matrix<f64>) -> Matrix<f64> {
    let mut out = Matrix::zeros(error.rows, error.rows);
    for a in 0..error.rows {
        for b in 0..error.rows {
            out.row_mut(a)[b] = error.row(a).iter().zip(error.row(b)).map(|(x, y)| x * y).sum();
        }
    }
    out
}

/// Sweeps of the method of Jacobi: some six make a matrix of this size diagonal to rounding.
const SWEEPS: usize = 16;

/// Eigenvalues of a symmetric matrix (Jacobi's method: Golub and Van Loan, Matrix Computations, 8.5).
fn eigenvalues(mut a: Matrix<f64>) -> Vec<f64> {
    let n = a.rows;
    for _ in 0..SWEEPS {
        for p in 0..n {
            for q in p + 1..n {
                let off = a.row(p)[q];
                if off == 0.0 {
                    continue;
                }
                let tau = (a.row(q)[q] - a.row(p)[p]) / (2.0 * off);
                let t = tau.signum() / (tau.abs() + (1.0 + tau * tau).sqrt());
                let cos = 1.0 / (1.0 + t * t).sqrt();
                let sin = t * cos;
                for k in 0..n {
                    let (kp, kq) = (a.row(k)[p], a.row(k)[q]);
                    a.row_mut(k)[p] = cos * kp - sin * kq;
                    a.row_mut(k)[q] = sin * kp + cos * kq;
                }
                for k in 0..n {
                    let (pk, qk) = (a.row(p)[k], a.row(q)[k]);
                    a.row_mut(p)[k] = cos * pk - sin * qk;
                    a.row_mut(q)[k] = sin * pk + cos * qk;
                }
            }
        }
    }
    (0..n).map(|i| a.row(i)[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eigenvalues_of_a_gram_matrix_show_its_rank() {
        // Rows of two directions.
        let (a, b) = ([1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 3.0, 1.0]);
        let rows: Vec<f64> = (0..5).flat_map(|i| (0..4).map(move |c| f64::from(i) * a[c] + b[c])).collect();
        let mut values = eigenvalues(gram(&Matrix::new(5, 4, rows)));
        values.sort_by(|x, y| y.total_cmp(x));
        assert!(values[1] > 1e-3 && values[2].abs() < 1e-9 * values[0], "{values:?}");
        let trace: f64 = values.iter().sum();
        let of_rows: f64 =
            (0..5).map(|i| (0..4).map(|c| (f64::from(i) * a[c] + b[c]).powi(2)).sum::<f64>()).sum();
        assert!((trace / of_rows - 1.0).abs() < 1e-12);
    }
}
