//! An error that no known mistake explains, in words: where it is and what it looks like. And mistakes that are seen in
//! the values themselves: rows that belong elsewhere, memory that nothing wrote, NaN among values that are right.

use parity_graph::fault::Evidence;

use super::between::EXPLAINS_MIN;
use crate::audit::Suspect;
use crate::ops::source::Data;

/// A wrong node as rows of tokens.
pub struct Rows<'a> {
    pub suspect: &'a Suspect<'a>,
    pub evidence: &'a Evidence<'a>,
    /// Elements of a row.
    pub row: usize,
    /// Elements of a head, where a row has several.
    pub head: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.evidence.recorded.len() / self.row.max(1)
    }

    fn recorded(&self, t: usize) -> &[f64] {
        &self.evidence.recorded[t * self.row..(t + 1) * self.row]
    }

    fn exact(&self, t: usize) -> &[f64] {
        &self.evidence.exact[t * self.row..(t + 1) * self.row]
    }

    fn position(&self, t: usize) -> i64 {
        i64::from((self.suspect.position)(t * self.row))
    }

    /// Rows with an error beyond rounding.
    fn wrong(&self) -> Vec<usize> {
        let is_wrong = |t: usize| (t * self.row..(t + 1) * self.row).any(|i| self.evidence.is_wrong(i));
        (0..self.count()).filter(|&t| is_wrong(t)).collect()
    }

    /// Positions of rows, in words.
    fn spell(&self, rows: &[usize]) -> String {
        const SHOWN: usize = 6;
        let positions: Vec<String> = rows.iter().take(SHOWN).map(|&t| self.position(t).to_string()).collect();
        format!("{}{}", positions.join(", "), if rows.len() > SHOWN { ", …" } else { "" })
    }

    /// Which places of a row are wrong in some row, where not all are.
    fn places(&self, wrong: &[usize], unit: usize) -> Vec<usize> {
        let is_wrong = |place: usize| {
            let within = |t: &usize| t * self.row + place * unit..t * self.row + (place + 1) * unit;
            wrong.iter().any(|t| within(t).any(|i| self.evidence.is_wrong(i)))
        };
        (0..self.row / unit.max(1)).filter(|&place| is_wrong(place)).collect()
    }
}

/// The mistakes that the values show of themselves, with what they are.
pub fn recognised(rows: &Rows<'_>) -> Vec<(&'static str, String)> {
    if let Some(text) = nan(rows) {
        return vec![("data.nan", text)];
    }
    let wrong = rows.wrong();
    let moved = moved_rows(rows, &wrong).map(|text| ("data.stale_row", text));
    moved.or_else(|| garbage(rows, &wrong).map(|text| ("data.row_garbage", text))).into_iter().collect()
}

/// Every wrong row holds what belongs to another one.
fn moved_rows(rows: &Rows<'_>, wrong: &[usize]) -> Option<String> {
    let evidence = rows.evidence;
    let apart = |t: usize, from: usize| {
        let pairs = rows.recorded(t).iter().zip(rows.exact(from));
        pairs.map(|(recorded, exact)| (recorded - exact).powi(2)).sum::<f64>()
    };
    // Where bounds are wide one row is as good as another: it must be far nearer to that row than to its own.
    let is = |t: usize, from: usize| {
        (0..rows.row).all(|c| evidence.is(t * rows.row + c, from * rows.row + c))
            && apart(t, from) <= (1.0 - EXPLAINS_MIN) * apart(t, t)
    };
    let source = |t: usize| (0..rows.count()).rev().find(|&from| from != t && is(t, from));
    let found: Vec<(usize, usize)> = wrong.iter().filter_map(|&t| Some((t, source(t)?))).collect();
    let &(first, from) = found.first()?;
    // One row alone proves nothing where others are wrong otherwise.
    if found.len() < wrong.len() {
        return None;
    }
    let shift = rows.position(from) - rows.position(first);
    let same_shift = found.iter().all(|&(t, f)| rows.position(f) - rows.position(t) == shift);
    let same_row = found.iter().all(|&(_, f)| f == from);
    let sources: Vec<usize> = found.iter().map(|(_, f)| *f).collect();
    let these = rows.spell(wrong);
    Some(match (same_shift, same_row) {
        (true, _) if shift == -1 => format!("rows {these} hold what belongs to the row before them"),
        (true, false) => format!("rows {these} hold what belongs to rows {shift:+}"),
        (_, true) => format!("rows {these} hold what belongs to row {}", rows.position(from)),
        _ => format!("rows {these} hold what belongs to rows {}", rows.spell(&sources)),
    })
}

/// Standard deviation of log2|x| above which numbers look like bits and not like values: that of a normal distribution
/// is 1.6.
const WILD: f64 = 8.0;

/// The wrong rows hold numbers of any size.
fn garbage(rows: &Rows<'_>, wrong: &[usize]) -> Option<String> {
    let wild = |t: usize| {
        let logs = rows.recorded(t).iter().map(|x| x.abs().log2());
        let finite: Vec<f64> = logs.filter(|log| log.is_finite()).collect();
        let n = finite.len() as f64;
        let mean = finite.iter().sum::<f64>() / n;
        (finite.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / n).sqrt() > WILD
    };
    let all = !wrong.is_empty() && wrong.iter().all(|&t| wild(t));
    all.then(|| {
        format!("rows {} hold numbers of any size, as memory does that nothing wrote", rows.spell(wrong))
    })
}

/// NaN among values that are right.
fn nan(rows: &Rows<'_>) -> Option<String> {
    let evidence = rows.evidence;
    let looked_at = (0..evidence.recorded.len()).filter(|&i| (evidence.looked_at)(i));
    let (nan, rest): (Vec<usize>, Vec<usize>) = looked_at.partition(|&i| evidence.recorded[i].is_nan());
    let &first = nan.first()?;
    if evidence.exact[first].is_nan() || rest.iter().any(|&i| evidence.is_wrong(i)) {
        return None;
    }
    let at = format!("row {}, column {}", (rows.suspect.position)(first), first % rows.row.max(1));
    Some(match (nan.len(), rest.len()) {
        (1, 0) => format!("the only value is NaN ({at})"),
        (count, 0) => format!("all {count} values are NaN"),
        (1, _) => format!("one value is NaN ({at}); all others are right"),
        (count, _) => format!("{count} values are NaN (the first: {at}); all others are right"),
    })
}

/// A few sentences about recorded - exact.
pub fn describe(rows: &Rows<'_>) -> String {
    let mut parts: Vec<String> = twin(rows).into_iter().collect();
    let (mut wrong, all) = (rows.wrong(), rows.count());
    // What is computed across nodes that were not recorded has wide bounds, which hide others.
    let is_across = rows.suspect.node.carried.iter().any(Option::is_some);
    let are = |verb: &str| match is_across {
        true => format!("{verb} further off than rounding explains"),
        false => format!("{verb} wrong"),
    };
    parts.push(match wrong.len() {
        0 => "no value is wrong by itself, what many of them have in common is".to_owned(),
        1 if all == 1 => "the only row is wrong".to_owned(),
        1 => format!("1 of {all} rows {} (position {})", are("is"), rows.spell(&wrong)),
        n if n == all => format!("all {all} rows are wrong"),
        n => format!("{n} of {all} rows {} (positions {})", are("are"), rows.spell(&wrong)),
    });
    if wrong.is_empty() {
        wrong = (0..all).collect();
    }
    let places: Vec<String> = [columns(rows, &wrong), heads(rows, &wrong)].into_iter().flatten().collect();
    let may_be_more = is_across && (wrong.len() < all || !places.is_empty());
    parts.extend(places);
    parts.extend(may_be_more.then(|| "others may be wrong by less".to_owned()));
    let error = Error::new(rows, &wrong);
    if let Some(share) = error.rank_one().filter(|share| *share > RANK_ONE) {
        parts.push(format!("the error has rank 1 ({:.2} % of it)", 100.0 * share));
        parts.extend(input_column(rows, &error, &wrong));
    }
    parts.push(error.signs());
    parts.extend(error.size());
    parts.extend(looks_like(rows, &wrong));
    parts.join("; ")
}

/// Another tensor of the file with the very bytes of the node's weight: the engine may have read the right ones elsewhere.
fn twin(rows: &Rows<'_>) -> Option<String> {
    let gguf = rows.suspect.gguf;
    let Data::Weight(own) = &rows.suspect.args.get(0)?.data else { return None };
    let same = gguf.tensors().find(|other| {
        let alike = other.dtype == own.info.dtype && other.shape == own.info.shape;
        let bytes = || gguf.tensor(&other.name).is_some_and(|other| other.bytes == own.bytes);
        alike && other.name != own.info.name && bytes()
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
fn input_column(rows: &Rows<'_>, error: &Error, wrong: &[usize]) -> Option<String> {
    let graph = &rows.suspect.node.program.graph;
    let source = rows.suspect.args.get(1).filter(|_| rows.suspect.args.sources.len() > 1)?;
    let (x, width) = (source.values(), source.shape()[3]);
    if x.len() != width * rows.count() || wrong.len() <= 2 {
        return None;
    }
    let largest = error.rows.iter().flatten().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?.0;
    let column = largest % rows.row.max(1);
    let along: Vec<f64> = error.rows.iter().map(|row| row[column]).collect();
    let size = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
    let cosine = |c: usize| {
        let own: Vec<f64> = wrong.iter().map(|&t| x[t * width + c]).collect();
        let dot: f64 = own.iter().zip(&along).map(|(a, b)| a * b).sum();
        (dot / (size(&own) * size(&along))).abs()
    };
    let best = (0..width).max_by(|a, b| cosine(*a).total_cmp(&cosine(*b)))?;
    let name = graph.src(rows.suspect.node.id, 1).map(|id| graph.origin(id))?;
    let name = parity_graph::label::labels(graph)[name]
        .map_or_else(|| graph.get(name).name.clone(), |l| l.to_string());
    (cosine(best) > ALONG).then(|| format!("it grows with column {best} of {name}"))
}

/// Which columns are wrong, where not all are.
fn columns(rows: &Rows<'_>, wrong: &[usize]) -> Option<String> {
    let (columns, width) = (rows.places(wrong, 1), rows.row);
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

/// Which heads are wrong, where not all are.
fn heads(rows: &Rows<'_>, wrong: &[usize]) -> Option<String> {
    let count = rows.row / rows.head.max(1);
    let heads = rows.places(wrong, rows.head);
    let some = count > 1 && !heads.is_empty() && heads.len() < count;
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    some.then(|| format!("heads {} of {count}", heads.join(", ")))
}

/// recorded - exact of the wrong rows.
struct Error {
    rows: Vec<Vec<f64>>,
    size: f64,
    exact: f64,
}

impl Error {
    fn new(rows: &Rows<'_>, wrong: &[usize]) -> Error {
        let row = |&t: &usize| -> Vec<f64> {
            let both = rows.recorded(t).iter().zip(rows.exact(t));
            both.map(|(y, p)| y - p).map(|e| if e.is_finite() { e } else { 0.0 }).collect()
        };
        let exact = wrong.iter().flat_map(|&t| rows.exact(t)).map(|p| p * p).sum::<f64>();
        let rows: Vec<Vec<f64>> = wrong.iter().map(row).collect();
        let square = rows.iter().flatten().map(|e| e * e).sum::<f64>();
        Error { size: square.sqrt(), exact: exact.sqrt(), rows }
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
fn looks_like(rows: &Rows<'_>, wrong: &[usize]) -> Option<String> {
    let cosine = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let &t = wrong.first()?;
    let alike = |from: &usize| cosine(rows.recorded(t), rows.exact(*from));
    let best = (0..rows.count()).max_by(|a, b| alike(a).total_cmp(&alike(b)))?;
    let (own, other) = (alike(&t), alike(&best));
    if best != t && other > ALIKE && other > own {
        let [t, best] = [t, best].map(|row| rows.position(row));
        return Some(format!("row {t} looks like row {best} (cosine {other:.4})"));
    }
    Some(format!("cosine to the exact row {own:.4}")).filter(|_| own.is_finite())
}
