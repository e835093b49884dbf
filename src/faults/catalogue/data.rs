//! Mistakes that can happen to any value.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, number, output};
use crate::checkpoint::Kind;
use crate::faults::spell;
use crate::model::edit::{Change, Limit};
use crate::model::graph::Node;
use crate::numerics::Storage;

/// Where they sit unless a node is named: the output of the attention part.
const HOME: Home = Home::First(&[Kind::AttnOut]);

/// Columns of an output; the attention matrices, whose width grows, are left out.
fn width(site: &Site<'_>, node: &Node) -> Option<usize> {
    let kind = node.checkpoint.kind();
    (!kind.is_optional()).then(|| site.model.config.dims.width(kind, 0))
}

/// Even columns first, then the odd ones: two interleaved halves taken apart.
fn even_then_odd(width: usize) -> Vec<u32> {
    (0..width as u32).step_by(2).chain((1..width as u32).step_by(2)).collect()
}

const fn plain(name: &'static str, summary: &'static str, place: &'static str, fix: &'static str) -> Fault {
    Fault { name, summary, place, fix, home: HOME, ..PLAIN }
}

/// Factors nearer to 1 than this are 1.
const SAME: f64 = 1e-6;

/// Factors that people multiply by, for a reader who sees 22.627417.
fn known_factor(site: &Site<'_>, factor: f64) -> &'static str {
    let dims = site.model.config.dims;
    let (model, head) = (dims.model as f64, dims.head_width as f64);
    let known = [
        (model.sqrt(), " = sqrt(D)"),
        (1.0 / model.sqrt(), " = 1/sqrt(D)"),
        (1.0 / model, " = 1/D"),
        (head.sqrt(), " = sqrt(E)"),
        (1.0 / head.sqrt(), " = 1/sqrt(E)"),
        (std::f64::consts::LOG2_E, " = log2(e)"),
        (std::f64::consts::LN_2, " = ln 2"),
    ];
    known.iter().find(|(value, _)| (factor / value - 1.0).abs() < 1e-6).map_or("", |(_, text)| text)
}

/// Faults of any node.
pub const FAULTS: &[Fault] = &[
    Fault {
        change: |_, node, _| output(node, Change::Fill(0.0)),
        sentence: |_, _, _| "all values are zero: the output was never written".to_owned(),
        ..plain(
            "data.zero",
            "all values are zero",
            "a kernel that was not launched, failed without notice, or wrote elsewhere",
            "check the launch, its error code and the buffer it writes to",
        )
    },
    Fault {
        silent: Some("in steps of one row: it shows in a prefill"),
        change: |_, node, _| output(node, Change::RowsBehind(1)),
        sentence: |_, _, _| "every row holds what belongs to the row before it".to_owned(),
        ..plain(
            "data.stale_row",
            "rows hold what belongs to other rows",
            "a row index that is off by one, or a buffer of the step before",
            "row t of the output belongs to row t of the input",
        )
    },
    Fault {
        parameter: number("factor"),
        change: |_, node, argument| {
            // 0 and -1 have names of their own.
            let factor = argument.number().filter(|f| *f != 0.0 && (f.abs() - 1.0).abs() > SAME)?;
            output(node, Change::Scale(factor))
        },
        default: |_, _| Some(Argument::Number(2.0)),
        guess: Some(diagnose::scale),
        sentence: |site, _, argument| {
            let factor = argument.number().unwrap_or(f64::NAN);
            format!("all values are multiplied by {}{}", spell(factor), known_factor(site, factor))
        },
        ..plain(
            "data.scaled",
            "all values are multiplied by a constant",
            "a scale applied twice or not at all, a sum for a mean, a dequantisation constant",
            "look for that factor in the node's code",
        )
    },
    Fault {
        parameter: number("offset"),
        change: |_, node, argument| {
            output(node, Change::Offset(argument.number().filter(|offset| *offset != 0.0)?))
        },
        default: |_, _| Some(Argument::Number(0.5)),
        guess: Some(diagnose::offset),
        sentence: |_, _, argument| format!("{argument} is added to all values"),
        ..plain(
            "data.offset",
            "a constant is added to all values",
            "a zero point or an epsilon in the wrong place",
            "look for that constant in the node's code",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Scale(-1.0)),
        sentence: |_, _, _| "all values have the wrong sign".to_owned(),
        ..plain("data.sign", "all values have the wrong sign", "a - b for b - a", "reverse the sign")
    },
    Fault {
        change: |site, node, argument| match argument {
            Argument::Order(order) => output(node, Change::Columns(order.clone())),
            _ => {
                let width = width(site, node).filter(|width| *width > 2)?;
                output(node, Change::Columns(even_then_odd(width)))
            }
        },
        guess: Some(diagnose::column_order),
        sentence: |site, node, argument| {
            let same = |order: &[u32]| width(site, node).map(even_then_odd).as_deref() == Some(order);
            match argument {
                Argument::Order(order) if !same(order) => {
                    let moved = order.iter().enumerate().filter(|(i, c)| *i as u32 != **c).count();
                    format!("{moved} of {} columns have changed places", order.len())
                }
                _ => "the columns are reordered: even columns first, then the odd ones".to_owned(),
            }
        },
        ..plain(
            "data.permuted",
            "the columns are in another order",
            "interleaved for halves, (H, E) for (E, H), a vectorised store with lanes exchanged",
            "compare the index arithmetic of the store with the shape that the next node reads",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Garbage),
        sentence: |_, _, _| {
            "some rows hold numbers of any size, as memory does that nothing wrote".to_owned()
        },
        ..plain(
            "data.row_garbage",
            "a row holds what lay in memory",
            "the last row of a tile that is not full, a grid that is one block short",
            "round the number of blocks up and guard the tail",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Nan),
        sentence: |_, _, _| "there are NaN among values that are otherwise right".to_owned(),
        ..plain(
            "data.nan",
            "some values are NaN",
            "0/0 in a softmax over nothing, a square root of a negative number, a race",
            "compute-sanitizer, and guards against empty sums",
        )
    },
    Fault {
        parameter: number("limit"),
        change: |_, node, argument| {
            let limit = argument.number().map_or(Limit::Largest, Limit::Above);
            output(node, Change::Overflow(limit))
        },
        guess: Some(diagnose::overflow),
        sentence: |_, _, argument| match argument.number() {
            Some(limit) => format!("values above {} in magnitude are infinite", spell(limit)),
            None => "the largest values are infinite: they overflowed".to_owned(),
        },
        ..plain(
            "data.f16_overflow",
            "the largest values are infinite",
            "f16 holds up to 65504: a matmul accumulated or stored in it",
            "accumulate in f32, or store in bf16",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Reinterpret { from: Storage::Bf16, to: Storage::F16 }),
        sentence: |_, _, _| "bf16 bits are read as f16".to_owned(),
        ..plain(
            "data.bf16_as_f16",
            "bf16 bits are read as f16",
            "a buffer whose type is taken for the other 16-bit type",
            "read the buffer in the type it was written in",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Reinterpret { from: Storage::F16, to: Storage::Bf16 }),
        sentence: |_, _, _| "f16 bits are read as bf16".to_owned(),
        ..plain(
            "data.f16_as_bf16",
            "f16 bits are read as bf16",
            "a buffer whose type is taken for the other 16-bit type",
            "read the buffer in the type it was written in",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Round(Storage::F16)),
        sentence: |_, _, _| "the output is rounded to f16, which the numerics do not declare".to_owned(),
        ..plain(
            "data.f16_rounded",
            "the output is rounded to f16, which the producer does not declare",
            "an intermediate buffer in f16",
            "declare storage=f16 in the dump's numerics, or keep the buffer in f32",
        )
    },
    Fault {
        change: |_, node, _| output(node, Change::Round(Storage::Bf16)),
        sentence: |_, _, _| "the output is rounded to bf16, which the numerics do not declare".to_owned(),
        ..plain(
            "data.bf16_rounded",
            "the output is rounded to bf16, which the producer does not declare",
            "an intermediate buffer in bf16",
            "declare storage=bf16 in the dump's numerics, or keep the buffer in f32",
        )
    },
];
