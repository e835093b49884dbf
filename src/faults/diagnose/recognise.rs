//! Mistakes that are recognised in the output itself: rows that belong elsewhere, memory that nothing wrote,
//! NaN and Inf among values that are otherwise right.

use super::predict::Lab;
use super::sample::Base;
use crate::checkpoint::Kind;
use crate::report::Diagnosis;

/// What the output shows of itself.
pub fn recognise(lab: &Lab<'_>, base: &Base, named_already: bool) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    let wrong = wrong_rows(lab, base);
    if let Some(text) = nan(lab, base) {
        found.push(named("data.nan", text));
        return found;
    }
    if let Some(text) = moved_rows(lab, base, &wrong) {
        if base.node.checkpoint.kind() == Kind::Logits {
            found.push(named("logits.wrong_row", format!("logits of other rows: {text}")));
        }
        found.push(named("data.stale_row", text));
    }
    // Bits of another type look wild too.
    if let Some(text) = garbage(lab, &wrong).filter(|_| !named_already) {
        found.push(named("data.row_garbage", text));
    }
    found
}

fn named(fault: &str, text: String) -> Diagnosis {
    let fix = crate::faults::catalogue::find(fault).map(|fault| fault.fix.to_owned());
    Diagnosis { fault: fault.to_owned(), explains: 1.0, text, fix }
}

fn fits(recorded: f64, exact: f64, bound: f64) -> bool {
    (recorded - exact).abs() <= bound
}

/// Rows with an error beyond rounding.
pub fn wrong_rows(lab: &Lab<'_>, base: &Base) -> Vec<usize> {
    let right = |t: usize| {
        let values = lab.case.recorded.row(t).iter().zip(base.value.row(t)).zip(base.bound.row(t));
        values.into_iter().all(|((y, p), b)| fits(*y, *p, *b))
    };
    (0..base.value.rows).filter(|&t| !right(t)).collect()
}

/// Positions of rows, in words.
pub fn spell(lab: &Lab<'_>, rows: &[usize]) -> String {
    const SHOWN: usize = 6;
    let positions: Vec<String> =
        rows.iter().take(SHOWN).map(|&t| lab.case.positions[t].to_string()).collect();
    let more = if rows.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", positions.join(", "))
}

/// Every wrong row holds what belongs to another one.
fn moved_rows(lab: &Lab<'_>, base: &Base, all_wrong: &[usize]) -> Option<String> {
    let wrong = all_wrong;
    let source = |t: usize| {
        let recorded = lab.case.recorded.row(t);
        (0..base.value.rows).rev().find(|&from| {
            let own = base.value.row(from).iter().zip(base.bound.row(from));
            from != t && recorded.iter().zip(own).all(|(y, (p, b))| fits(*y, *p, *b))
        })
    };
    let sources: Vec<Option<usize>> = wrong.iter().map(|&t| source(t)).collect();
    let position = |row: usize| i64::from(lab.case.positions[row]);
    let (wrong, from): (Vec<usize>, Vec<usize>) =
        wrong.iter().zip(&sources).filter_map(|(&t, source)| source.map(|from| (t, from))).unzip();
    if from.is_empty() {
        return None;
    }
    let shifts: Vec<i64> = wrong.iter().zip(&from).map(|(&t, &f)| position(f) - position(t)).collect();
    let same_shift = shifts.iter().all(|shift| *shift == shifts[0]);
    let same_row = from.iter().all(|&f| f == from[0]);
    if from.len() < sources.len() {
        // The rest may hold rows that are not at hand; one row alone proves nothing of them.
        let absent = |t: usize| !lab.case.positions.iter().any(|&p| i64::from(p) == position(t) + shifts[0]);
        let rest = all_wrong.iter().filter(|t| !wrong.contains(t));
        if from.len() < 2 || !same_shift || !rest.into_iter().all(|&t| absent(t)) {
            return None;
        }
    }
    let wrong = &wrong[..];
    Some(match (same_shift, same_row) {
        (true, _) if shifts[0] == -1 => {
            format!("rows {} hold what belongs to the row before them", spell(lab, wrong))
        }
        (true, false) => format!("rows {} hold what belongs to rows {:+}", spell(lab, wrong), shifts[0]),
        (_, true) => format!("rows {} hold what belongs to row {}", spell(lab, wrong), position(from[0])),
        _ => format!("rows {} hold what belongs to rows {}", spell(lab, wrong), spell(lab, &from)),
    })
}

/// Standard deviation of log2|x| above which numbers look like bits and not like values: that of a normal
/// distribution is 1.6.
const WILD: f64 = 8.0;

/// The wrong rows hold numbers of any size.
fn garbage(lab: &Lab<'_>, wrong: &[usize]) -> Option<String> {
    let wild = |t: usize| {
        let logs: Vec<f64> = lab.case.recorded.row(t).iter().map(|x| x.abs().log2()).collect();
        let finite: Vec<f64> = logs.into_iter().filter(|log| log.is_finite()).collect();
        let n = finite.len() as f64;
        let mean = finite.iter().sum::<f64>() / n;
        let spread = (finite.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / n).sqrt();
        spread > WILD
    };
    (!wrong.is_empty() && wrong.iter().all(|&t| wild(t))).then(|| {
        format!("rows {} hold numbers of any size, as memory does that nothing wrote", spell(lab, wrong))
    })
}

/// NaN among values that are right.
fn nan(lab: &Lab<'_>, base: &Base) -> Option<String> {
    let recorded = &lab.case.recorded;
    let mut places: Vec<(usize, usize)> = Vec::new();
    for t in 0..recorded.rows {
        for (c, y) in recorded.row(t).iter().enumerate() {
            if y.is_nan() {
                places.push((t, c));
            } else if !fits(*y, base.value.row(t)[c], base.bound.row(t)[c]) {
                return None;
            }
        }
    }
    let &(row, column) = places.first()?;
    let count = places.len();
    let where_ = format!("row {}, column {column}", lab.case.positions[row]);
    Some(match count {
        1 => format!("one value is NaN ({where_}); all others are right"),
        _ => format!("{count} values are NaN (the first: {where_}); all others are right"),
    })
}
