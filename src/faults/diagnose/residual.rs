//! Describes an error that no known mistake explains: where it is and what it looks like.

use super::predict::Lab;
use super::recognise::{spell, wrong_rows};
use super::sample::Base;
use crate::checkpoint::Kind;

/// A few sentences about recorded - exact.
pub fn describe(lab: &Lab<'_>, base: &Base) -> String {
    let mut parts: Vec<String> = twin(lab, base).into_iter().collect();
    let wrong = wrong_rows(lab, base);
    let all = base.value.rows;
    parts.push(match wrong.len() {
        n if n == all => format!("all {all} rows are wrong"),
        n => format!("{n} of {all} rows are wrong (positions {})", spell(lab, &wrong)),
    });
    parts.extend(columns(lab, base, &wrong));
    parts.extend(heads(lab, base, &wrong));
    let error = Error::new(lab, base, &wrong);
    if let Some(share) = error.rank_one().filter(|share| *share > RANK_ONE) {
        parts.push(format!("the error has rank 1 ({:.2} % of it)", 100.0 * share));
        parts.extend(input_column(lab, &error, &wrong));
    }
    parts.push(error.signs());
    parts.extend(error.size());
    parts.extend(looks_like(lab, base, &wrong));
    parts.join("; ")
}

/// Another tensor of the file with the very bytes of the node's weight: the engine may have read the right ones elsewhere.
fn twin(lab: &Lab<'_>, base: &Base) -> Option<String> {
    let gguf = lab.context.gguf;
    let own = gguf.tensor(&base.node.op.weight()?.name)?;
    let same = gguf.tensors().find(|other| {
        let alike = other.dtype == own.info.dtype && other.shape == own.info.shape;
        alike
            && other.name != own.info.name
            && gguf.tensor(&other.name).is_some_and(|other| other.bytes == own.bytes)
    })?;
    let values: Vec<f32> = own.decode();
    // Zeros and ones are the same in many tensors.
    let says_something = values.iter().any(|value| *value != values[0]);
    says_something.then(|| {
        format!(
            "the file has the bytes of {} in {} too: one of the two is wrong there",
            same.name, own.info.name
        )
    })
}

/// Share of an error in one direction above which it is called one of rank 1.
const RANK_ONE: f64 = 0.99;
/// Cosine above which an input column runs along with the error.
const ALONG: f64 = 0.9999;

/// The input column in proportion to which the rows are wrong: a column of the weight was lost or changed.
fn input_column(lab: &Lab<'_>, error: &Error, wrong: &[usize]) -> Option<String> {
    let x = &lab.case.inputs.first().filter(|input| input.value.rows == lab.case.recorded.rows)?.value;
    let largest = error.rows.iter().flatten().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?.0;
    let column = largest % error.rows.first()?.len().max(1);
    let along: Vec<f64> = error.rows.iter().map(|row| row[column]).collect();
    let size = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
    let cosine = |c: usize| {
        let own: Vec<f64> = wrong.iter().map(|&t| x.row(t)[c]).collect();
        let dot: f64 = own.iter().zip(&along).map(|(a, b)| a * b).sum();
        (dot / (size(&own) * size(&along))).abs()
    };
    let best = (0..x.cols).max_by(|a, b| cosine(*a).total_cmp(&cosine(*b)))?;
    let enough = wrong.len() > 2 && cosine(best) > ALONG;
    enough.then(|| format!("it grows with column {best} of {}", lab.case.node.inputs[0]))
}

/// Which columns are wrong, where not all are.
fn columns(lab: &Lab<'_>, base: &Base, wrong: &[usize]) -> Option<String> {
    let width = base.value.cols;
    let is_wrong = |c: usize| {
        wrong.iter().any(|&t| {
            let error = (lab.case.recorded.row(t)[c] - base.value.row(t)[c]).abs();
            beyond(error, base.bound.row(t)[c])
        })
    };
    let columns: Vec<usize> = (0..width).filter(|&c| is_wrong(c)).collect();
    let (first, last) = (*columns.first()?, *columns.last()?);
    match columns.len() {
        n if n == width => None,
        1 => Some(format!("only column {first} of {width}")),
        n if last - first + 1 == n => Some(format!("columns {first} to {last} of {width}")),
        n => {
            let step = columns.windows(2).map(|w| w[1] - w[0]).min().unwrap_or(1);
            let regular = step > 1 && columns.windows(2).all(|w| w[1] - w[0] == step);
            let every = if regular { format!(", one in {step}") } else { String::new() };
            Some(format!("{n} of {width} columns, from {first} to {last}{every}"))
        }
    }
}

/// Whether an error is more than its bound; NaN is.
fn beyond(error: f64, bound: f64) -> bool {
    error.is_nan() || error > bound
}

/// Which heads are wrong, where not all are.
fn heads(lab: &Lab<'_>, base: &Base, wrong: &[usize]) -> Option<String> {
    let by_head = matches!(
        base.node.checkpoint.kind(),
        Kind::QProj
            | Kind::KProj
            | Kind::VProj
            | Kind::Q
            | Kind::K
            | Kind::V
            | Kind::QNorm
            | Kind::KNorm
            | Kind::QRope
            | Kind::KRope
            | Kind::AttnCtx
    );
    let width = lab.site.model.config.dims.head_width;
    if !by_head || base.value.cols <= width {
        return None;
    }
    let count = base.value.cols / width;
    let is_wrong = |head: usize| {
        wrong.iter().any(|&t| {
            (head * width..(head + 1) * width).any(|c| {
                let error = (lab.case.recorded.row(t)[c] - base.value.row(t)[c]).abs();
                beyond(error, base.bound.row(t)[c])
            })
        })
    };
    let heads: Vec<String> = (0..count).filter(|&h| is_wrong(h)).map(|h| h.to_string()).collect();
    (heads.len() < count).then(|| format!("heads {} of {count}", heads.join(", ")))
}

/// recorded - exact of the wrong rows.
struct Error {
    rows: Vec<Vec<f64>>,
    size: f64,
    exact: f64,
}

impl Error {
    fn new(lab: &Lab<'_>, base: &Base, wrong: &[usize]) -> Error {
        let row = |&t: &usize| -> Vec<f64> {
            let both = lab.case.recorded.row(t).iter().zip(base.value.row(t));
            both.map(|(y, p)| y - p).map(|e| if e.is_finite() { e } else { 0.0 }).collect()
        };
        let rows: Vec<Vec<f64>> = wrong.iter().map(row).collect();
        let square = |rows: &[Vec<f64>]| rows.iter().flatten().map(|e| e * e).sum::<f64>();
        let exact = wrong.iter().flat_map(|&t| base.value.row(t)).map(|p| p * p).sum::<f64>();
        Error { size: square(&rows).sqrt(), exact: exact.sqrt(), rows }
    }

    /// Share of the error in its largest singular direction, by power iteration.
    fn rank_one(&self) -> Option<f64> {
        if self.rows.len() < 2 || self.size == 0.0 {
            return None;
        }
        let mut direction = self.rows[0].clone();
        let mut largest = 0.0;
        for _ in 0..20 {
            let norm = direction.iter().map(|v| v * v).sum::<f64>().sqrt();
            if norm == 0.0 {
                return None;
            }
            direction.iter_mut().for_each(|v| *v /= norm);
            let along: Vec<f64> =
                self.rows.iter().map(|row| row.iter().zip(&direction).map(|(a, b)| a * b).sum()).collect();
            largest = along.iter().map(|a| a * a).sum();
            direction.fill(0.0);
            for (row, along) in self.rows.iter().zip(&along) {
                direction.iter_mut().zip(row).for_each(|(d, r)| *d += along * r);
            }
        }
        Some(largest / (self.size * self.size))
    }

    fn signs(&self) -> String {
        let values = || self.rows.iter().flatten().filter(|e| **e != 0.0);
        let (all, positive) = (values().count().max(1), values().filter(|e| **e > 0.0).count());
        format!("{:.0} % of the differences are positive", 100.0 * positive as f64 / all as f64)
    }

    fn size(&self) -> Option<String> {
        let relative = self.size / self.exact;
        relative.is_finite().then(|| format!("its size is {relative:.2e} of the exact output"))
    }
}

/// Cosine above which a row looks like another one.
const ALIKE: f64 = 0.98;

/// Rows that look like another row's exact output, or like a multiple of their own.
fn looks_like(lab: &Lab<'_>, base: &Base, wrong: &[usize]) -> Option<String> {
    let cosine = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let &t = wrong.first()?;
    let recorded = lab.case.recorded.row(t);
    let alike = |from: &usize| cosine(recorded, base.value.row(*from));
    let best = (0..base.value.rows).max_by(|a, b| alike(a).total_cmp(&alike(b)))?;
    let (own, other) = (alike(&t), alike(&best));
    let position = |row: usize| lab.case.positions[row];
    if best != t && other > ALIKE && other > own {
        return Some(format!("row {} looks like row {} (cosine {other:.4})", position(t), position(best)));
    }
    Some(format!("cosine to the exact row {own:.4}")).filter(|_| own.is_finite())
}
