//! Mistakes that can happen to any value.

use std::ops::Range;

use super::evidence::numbers;
use super::site::made;
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, count, plain, spell, spell_order, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit, Narrow};

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "data.zero",
        summary: "all values are zero, or those of some columns",
        place: "a kernel that was not launched, failed without notice, or wrote elsewhere",
        fix: "check the launch, its error code and the buffer it writes to",
        parameter: Some("columns"),
        values: |_| vec![Argument::name("all")],
        make: zero,
        guess: Some(wrong_columns),
        ..PLAIN
    },
    plain(
        "data.sign",
        &[],
        ["all values have the wrong sign", "a - b for b - a", "reverse the sign"],
        |site, _| of_values(site, Edit::Multiply(-1.0), "all values have the wrong sign"),
    ),
    Entry {
        name: "data.scaled",
        summary: "all values are multiplied by a constant",
        place: "a scale applied twice or not at all, a sum for a mean, a dequantisation constant",
        fix: "look for that factor in the node's code",
        parameter: Some("factor"),
        values: |_| Argument::numbers([2.0]),
        make: |site, argument| {
            // 0 and -1 have names of their own.
            let factor = argument.number().filter(|f| *f != 0.0 && (f.abs() - 1.0).abs() > SAME)?;
            let text =
                format!("all values are multiplied by {}{}", spell(factor), known_factor(site, factor));
            of_values(site, Edit::Multiply(factor as f32), text)
        },
        guess: Some(|_, evidence| evidence.factor().map_or(vec![], numbers)),
        ..PLAIN
    },
    Entry {
        name: "data.offset",
        summary: "a constant is added to all values",
        place: "a zero point or an epsilon in the wrong place",
        fix: "look for that constant in the node's code",
        parameter: Some("offset"),
        values: |_| Argument::numbers([0.5]),
        make: |site, argument| {
            let offset = argument.number().filter(|offset| *offset != 0.0)?;
            of_values(site, Edit::Add(offset as f32), format!("{} is added to all values", spell(offset)))
        },
        guess: Some(|_, evidence| evidence.offset().map_or(vec![], numbers)),
        ..PLAIN
    },
    Entry {
        name: "data.permuted",
        summary: "the columns are in another order",
        place: "interleaved for halves, (H, E) for (E, H), a vectorised store with lanes exchanged",
        fix: "compare the index arithmetic of the store with the shape that the next node reads",
        parameter: Some("order"),
        values: |site| match site.row().filter(|row| *row > 2) {
            // Two interleaved halves taken apart.
            Some(row) => vec![Argument::Order(even_then_odd(row))],
            None => vec![],
        },
        make: permuted,
        guess: Some(|site, evidence| {
            let order = site.row().and_then(|row| evidence.column_order(row));
            order.map(Argument::Order).into_iter().collect()
        }),
        ..PLAIN
    },
    Entry {
        silent: Some("in steps of one row: it shows in a prefill"),
        ..plain(
            "data.stale_row",
            &[],
            [
                "rows hold what belongs to other rows",
                "a row index that is off by one, or a buffer of the step before",
                "row t of the output belongs to row t of the input",
            ],
            |site, _| {
                let row = site.row()?;
                of_values(site, Edit::RowsBehind { row }, "every row holds what belongs to the row before it")
            },
        )
    },
    plain(
        "data.row_garbage",
        &[],
        [
            "a row holds what lay in memory",
            "the last row of a tile that is not full, a grid that is one block short",
            "round the number of blocks up and guard the tail",
        ],
        |site, _| {
            let row = site.row()?;
            let text = "some rows hold numbers of any size, as memory does that nothing wrote";
            of_values(site, Edit::Garbage { row }, text)
        },
    ),
    plain(
        "data.nan",
        &[],
        [
            "some values are NaN",
            "0/0 in a softmax over nothing, a square root of a negative number, a race",
            "compute-sanitizer, and guards against empty sums",
        ],
        |site, _| {
            let row = site.row().unwrap_or(site.tensor().elements());
            of_values(site, Edit::Nan { row }, "there are NaN among values that are otherwise right")
        },
    ),
    Entry {
        name: "data.f16_overflow",
        summary: "the largest values are infinite",
        place: "f16 holds up to 65504: a matmul accumulated or stored in it",
        fix: "accumulate in f32, or store in bf16",
        parameter: Some("limit"),
        values: |_| vec![Argument::name("largest")],
        make: |site, argument| match argument {
            Argument::Name(name) if name == "largest" => {
                of_values(site, Edit::Overflow(None), "the largest values are infinite: they overflowed")
            }
            _ => {
                let limit = argument.number().filter(|limit| *limit >= 0.0)?;
                let text = format!("values above {} in magnitude are infinite", spell(limit));
                of_values(site, Edit::Overflow(Some(limit as f32)), text)
            }
        },
        guess: Some(overflow),
        ..PLAIN
    },
    plain(
        "data.bf16_as_f16",
        &[],
        [
            "bf16 bits are read as f16",
            "a buffer whose type is taken for the other 16-bit type",
            "read the buffer in the type it was written in",
        ],
        |site, _| of_values(site, Edit::Reinterpret { from: Narrow::Bf16 }, "bf16 bits are read as f16"),
    ),
    plain(
        "data.f16_as_bf16",
        &[],
        [
            "f16 bits are read as bf16",
            "a buffer whose type is taken for the other 16-bit type",
            "read the buffer in the type it was written in",
        ],
        |site, _| of_values(site, Edit::Reinterpret { from: Narrow::F16 }, "f16 bits are read as bf16"),
    ),
    Entry {
        rounds: true,
        silent: Some("where all values are numbers of f16 already, as rows of a table in F16 are"),
        ..plain(
            "data.f16_rounded",
            &[],
            [
                "the output is rounded to f16, which the producer does not declare",
                "an intermediate buffer in f16",
                "declare storage=f16 in the dump's numerics, or keep the buffer in f32",
            ],
            |site, _| {
                let text = "the output is rounded to f16, which the numerics do not declare";
                of_values(site, Edit::Round(Narrow::F16), text)
            },
        )
    },
    Entry {
        rounds: true,
        ..plain(
            "data.bf16_rounded",
            &[],
            [
                "the output is rounded to bf16, which the producer does not declare",
                "an intermediate buffer in bf16",
                "declare storage=bf16 in the dump's numerics, or keep the buffer in f32",
            ],
            |site, _| {
                let text = "the output is rounded to bf16, which the numerics do not declare";
                of_values(site, Edit::Round(Narrow::Bf16), text)
            },
        )
    },
];

/// Factors nearer to 1 than this are 1.
const SAME: f64 = 1e-6;

/// An edit of what a node gives; a choice of indices is none.
fn of_values(site: Site<'_>, edit: Edit, text: impl Into<String>) -> Made {
    when(site.graph.is_arithmetic(site.id) && !matches!(site.op(), Op::Argsort | Op::TopK))?;
    made(Change::ResultEdit(edit), text)
}

/// Factors that people multiply by, for a reader who sees 22.627417.
fn known_factor(site: Site<'_>, factor: f64) -> &'static str {
    let row = site.row().unwrap_or(1) as f64;
    let head = site.tensor().ne[0] as f64;
    let known = [
        (row.sqrt(), " = sqrt(D)"),
        (1.0 / row.sqrt(), " = 1/sqrt(D)"),
        (1.0 / row, " = 1/D"),
        (head.sqrt(), " = sqrt(E)"),
        (1.0 / head.sqrt(), " = 1/sqrt(E)"),
        (std::f64::consts::LOG2_E, " = log2(e)"),
        (std::f64::consts::LN_2, " = ln 2"),
    ];
    known.iter().find(|(value, _)| (factor / value - 1.0).abs() < 1e-6).map_or("", |(_, text)| text)
}

/// `3..5`: columns 3 to 5 of a row.
pub(super) fn columns(argument: &Argument, row: usize) -> Option<Range<usize>> {
    let (first, last) = argument.text()?.split_once("..")?;
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < row).then(|| first..last + 1)
}

/// Columns as heads, where they are whole ones.
pub(super) fn in_words(site: Site<'_>, columns: &Range<usize>) -> String {
    let [width, heads, ..] = site.tensor().ne;
    let whole = heads > 1 && site.row() == Some(width * heads);
    let (what, unit) = match whole && columns.start.is_multiple_of(width) && columns.end.is_multiple_of(width)
    {
        true => ("head", width),
        false => ("column", 1),
    };
    let (first, last) = (columns.start / unit, columns.end / unit - 1);
    if first == last { format!("{what} {first}") } else { format!("{what}s {first} to {last}") }
}

/// The columns from the first wrong one to the last, where some are right.
pub(super) fn wrong_columns(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some(row) = site.row() else { return vec![] };
    let is_wrong = |c: &usize| (*c..evidence.exact.len()).step_by(row).any(|i| evidence.is_wrong(i));
    let (Some(mut first), Some(mut last)) = ((0..row).find(is_wrong), (0..row).rev().find(is_wrong)) else {
        return vec![];
    };
    // What is nearly right by chance is of the same head.
    let width = site.tensor().ne[0];
    if width < row {
        (first, last) = (first / width * width, last / width * width + width - 1);
    }
    match last - first + 1 < row {
        true => vec![Argument::Name(format!("{first}..{last}"))],
        false => vec![],
    }
}

fn zero(site: Site<'_>, argument: &Argument) -> Made {
    if argument.text()? == "all" {
        return of_values(site, Edit::Set(0.0), "all values are zero: the output was never written");
    }
    let row = site.row()?;
    let columns = columns(argument, row)?;
    let which = in_words(site, &columns);
    let are = if which.contains(" to ") { "are" } else { "is" };
    let text = format!("{which} {are} zero: a part of the output was not written");
    of_values(site, Edit::SetColumns { row, columns, to: 0.0 }, text)
}

fn even_then_odd(row: usize) -> Vec<u32> {
    (0..row as u32).step_by(2).chain((1..row as u32).step_by(2)).collect()
}

/// Columns whose order is spelt out.
const SPELT: usize = 8;

fn permuted(site: Site<'_>, argument: &Argument) -> Made {
    let (Argument::Order(order), row) = (argument, site.row()?) else { return None };
    when(order.len() == row && order.iter().all(|column| (*column as usize) < row))?;
    let moved = order.iter().enumerate().filter(|(i, column)| *i as u32 != **column).count();
    when(moved > 0)?;
    let text = match row {
        _ if *order == even_then_odd(row) => {
            "the columns are reordered: even columns first, then the odd ones".to_owned()
        }
        ..=SPELT => format!("the columns stand in the order {}", spell_order(order)),
        _ => format!("{moved} of {} have changed places", count(row, "column")),
    };
    of_values(site, Edit::Columns(order.clone()), text)
}

/// The limit beyond which values are infinite: between the largest finite and the smallest infinite one.
fn overflow(_: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    const F16_MAX: f64 = 65504.0;
    let (mut below, mut above) = (0.0f64, f64::INFINITY);
    for (i, (recorded, exact)) in evidence.recorded.iter().zip(evidence.exact).enumerate() {
        match recorded.is_infinite() {
            _ if !(evidence.looked_at)(i) => {}
            true => above = above.min(exact.abs()),
            false => below = below.max(exact.abs()),
        }
    }
    if !above.is_finite() {
        return vec![];
    }
    Argument::numbers([if (below..above).contains(&F16_MAX) { F16_MAX } else { below }])
}
