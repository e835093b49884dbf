//! Convolutions and recurrent states: stale, shifted, not carried over from the prefill to a decode step; heads.

use super::site::{edit, made};
use super::{Argument, Entry, Made, Site, plain, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::states;

const NOT_CARRIED: &str =
    "the state starts from zero in every step: it is not carried over, or never written";

const SCAN: &[Op] = &[Op::SsmScan, Op::GatedDeltaNet];
const CONVOLUTION: &[Op] = &[Op::SsmConv];
/// The slot in which a scan has the rows of the states that it goes on from.
const SCANNED: usize = 6;

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "state.not_carried",
        &[Op::SsmConv, Op::SsmScan, Op::GatedDeltaNet],
        [
            "every step starts with an empty state",
            "a state that is not written behind the prefill, or cleared before each decode step",
            "keep what is behind the last token for the next step",
        ],
        |site, _| match site.op() {
            Op::SsmConv => {
                let (row, past) = (site.src(0)?.ne[0], past(site)?);
                made(edit(0, Edit::SetColumns { row, columns: 0..past, to: 0.0 }), NOT_CARRIED)
            }
            Op::SsmScan => made(edit(0, Edit::Set(0.0)), NOT_CARRIED),
            _ => made(edit(5, Edit::Set(0.0)), NOT_CARRIED),
        },
    ),
    Entry {
        silent: Some("where no sequence went back"),
        stays: true,
        ..plain(
            "state.no_rollback",
            &[Op::SsmConv, Op::SsmScan, Op::GatedDeltaNet],
            [
                "a state is not rolled back with its sequence",
                "rejected tokens taken out of the cache of attention alone, a state that is read from the newest place",
                "go on from the state behind the last token that is kept",
            ],
            no_rollback,
        )
    },
    plain(
        "state.shifted",
        CONVOLUTION,
        [
            "the convolution reads one position too early",
            "padding with K columns where K - 1 are kept",
            "token t is convolved with itself and the K - 1 before it",
        ],
        |site, _| {
            past(site)?;
            made(edit(0, Edit::Lag(site.src(0)?.ne[0])), "the convolution reads one position too early")
        },
    ),
    plain(
        "state.stale",
        CONVOLUTION,
        [
            "what is kept of the past is one token old",
            "the state written before the last token is taken in",
            "keep the last K - 1 columns, the newest token's among them",
        ],
        |site, _| {
            made(edit(0, Edit::Lag(past(site)?)), "what the convolution keeps of the past is one token old")
        },
    ),
    plain(
        "state.conv_kernel",
        CONVOLUTION,
        [
            "the convolution's weights are one place off",
            "a kernel stored in the other order of its taps",
            "the last weight belongs to the newest token",
        ],
        |site, _| {
            past(site)?;
            made(edit(1, Edit::Rotate(1)), "the convolution's weights are one place off")
        },
    ),
    plain(
        "state.decay_sign",
        &[Op::SsmScan],
        [
            "the decay has the wrong sign",
            "A stored as log(-A) taken for A, or negated twice",
            "A is negative: states fade",
        ],
        |_, _| made(edit(3, Edit::Multiply(-1.0)), "the decay has the wrong sign"),
    ),
    plain(
        "state.no_gate",
        &[Op::GatedDeltaNet],
        [
            "the state does not decay",
            "a plain delta rule where the model has a gated one",
            "multiply the state by exp(gate) for each token",
        ],
        |_, _| made(edit(3, Edit::Set(0.0)), "the state does not decay"),
    ),
    plain(
        "state.exchanged",
        SCAN,
        [
            "what is written into the state and what is read from it are exchanged",
            "B and C of Mamba, or q and k of a delta net, split in the wrong order",
            "split the projection in the order of the model",
        ],
        |site, _| match site.op() {
            Op::SsmScan => made(Change::Exchange(4, 5), "B and C are exchanged"),
            _ => {
                when(site.src(0)?.ne == site.src(1)?.ne)?;
                made(Change::Exchange(0, 1), "queries and keys are exchanged")
            }
        },
    ),
    plain(
        "state.head_mapping",
        SCAN,
        [
            "heads read the other group's: interleaved for tiled, or the reverse",
            "grouped heads written with a modulo where the model divides, or with repeat_interleave for repeat",
            "count the heads of queries and keys, or the groups of B and C, as the model does",
        ],
        head_mapping,
    ),
    plain(
        "state.no_softplus",
        &[Op::Softplus],
        [
            "the softplus is left out",
            "the step width of Mamba taken as it is",
            "log(1 + exp(x)) of the width and its bias",
        ],
        |_, _| made(Change::Bypass { slot: 0 }, "the softplus is left out"),
    ),
];

/// Columns of a convolution's input that are left of the past, before the tokens of the step.
fn past(site: Site<'_>) -> Option<usize> {
    site.src(1)?.ne[0].checked_sub(1).filter(|past| *past > 0)
}

/// The newest states are read, whichever a sequence went back to: by a scan that picks them itself, or by a node before.
fn no_rollback(site: Site<'_>, _: &Argument) -> Made {
    let text = "the state is the newest one, not that which its sequence went back to";
    let newest = |cells: usize| Some(Edit::AddModulo(0, i32::try_from(cells).ok()?));
    if *site.op() == Op::SsmScan {
        let state = site.graph.root(site.graph.src(site.id, 0)?);
        let cells = site.src(SCANNED).and(states::plane(site.graph, state));
        if let Some(cells) = cells {
            return made(edit(SCANNED, newest(cells)?), text);
        }
    }
    let (by, cells) = site.graph.sources(site.id).find_map(|source| states::picked(site.graph, source))?;
    made(Change::Picked { by, edit: newest(cells)? }, text)
}

/// A delta net's head h reads queries and keys h % K, a scan's head h the group h / (H/G).
fn head_mapping(site: Site<'_>, _: &Argument) -> Made {
    let (slots, few, many) = match site.op() {
        Op::GatedDeltaNet => ([0, 1], site.src(0)?.ne[1], site.src(2)?.ne[1]),
        _ => ([4, 5], site.src(4)?.ne[1], site.src(1)?.ne[1]),
    };
    when(few > 1 && many > few && many % few == 0)?;
    let tiled = *site.op() == Op::GatedDeltaNet;
    let order: Vec<u32> =
        (0..many).map(|head| if tiled { head / (many / few) } else { head % few } as u32).collect();
    let gather = |slot: usize| edit(slot, Edit::Gather { axis: 1, order: order.clone() });
    let group = many / few;
    let text = match tiled {
        true => format!("head h reads queries and keys of head h / {group}, the model says h % {few}"),
        false => format!("head h reads B and C of group h % {few}, the model says h / {group}"),
    };
    made(Change::All(slots.map(gather).into()), text)
}
