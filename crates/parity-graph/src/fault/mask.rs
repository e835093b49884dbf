//! What attention sees: the mask, a window, the cache.

use super::attention::{ATTENTION, of};
use super::site::{edit, made};
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, count, plain, when};
use crate::graph::{Id, Tensor};
use crate::label::leaf_names;
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// Why a mistake in reading the cache may not show.
const IN_DECODE: Option<&str> = Some("in the first step: it shows in decode");

/// Windows that are tried: three positions, which shows in the shortest text, and powers of two.
const WINDOWS: [f64; 13] =
    [3.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "attn.no_mask",
        summary: "rows see the positions after them",
        place: "a prefill without the causal mask",
        fix: "the row at position p sees positions 0 to p",
        parameter: Some("what"),
        silent: Some("in steps of one row: it shows in a prefill"),
        ops: ATTENTION,
        values: |_| vec![Argument::name("step"), Argument::name("cache")],
        make: |site, argument| {
            let mask = masked(site)?;
            match argument.text()? {
                "step" => made(
                    edit(mask, Edit::WholeStep),
                    "there is no causal mask: rows see the positions after them",
                ),
                "cache" => made(
                    Change::Source { slot: mask, with: None },
                    "the mask is left out: rows see all of the cache",
                ),
                _ => None,
            }
        },
        ..PLAIN
    },
    Entry {
        name: "attn.mask_shift",
        summary: "the mask is off by one or more positions",
        place: "< for <= in the mask, or the number of cached tokens off by one",
        fix: "the row at position p sees positions 0 to p",
        parameter: Some("positions"),
        silent: Some("for numbers above 0, in steps of one row: it shows in a prefill"),
        ops: ATTENTION,
        values: |_| {
            let turned = ["turned", "unwritten"].map(Argument::name).to_vec();
            [Argument::numbers([-1.0, 1.0, -2.0, 2.0, -3.0, 3.0]), turned].concat()
        },
        make: |site, argument| {
            let mask = masked(site)?;
            if argument.text() == Some("turned") {
                return made(edit(mask, Edit::Rotate(1)), "the mask is one position off");
            }
            if argument.text() == Some("unwritten") {
                let text = "rows see 1 position after their own, the last one a slot of the cache that nothing was written to";
                return made(edit(mask, Edit::Next(1)), text);
            }
            let by = argument.integer().filter(|by| *by != 0)?;
            let text = match by {
                ..=-1 => format!("rows do not see the last {} positions up to their own", -by),
                by => format!("rows see {} after their own", count(by.unsigned_abs() as usize, "position")),
            };
            made(edit(mask, Edit::MaskShift(i64::from(by))), text)
        },
        ..PLAIN
    },
    Entry {
        silent: IN_DECODE,
        later: true,
        ..plain(
            "attn.self_only",
            ATTENTION,
            [
                "the cache is not read: rows see their own step only",
                "decode that attends over the new keys and not over the cache",
                "attend over all cached positions and the new ones",
            ],
            |site, _| {
                let text = "the cache is not read: after the first step, rows see their own step only";
                made(edit(masked(site)?, Edit::OwnStep), text)
            },
        )
    },
    Entry {
        name: "attn.stale_cache",
        summary: "the cache is read before the step's keys and values are written",
        place: "a cache update that runs after attention, on another stream, or into a copy",
        fix: "write the step's keys and values before attention reads the cache",
        parameter: Some("slots"),
        silent: IN_DECODE,
        later: true,
        ops: ATTENTION,
        values: |_| ["zero", "held", "unread"].map(Argument::name).into(),
        make: stale,
        ..PLAIN
    },
    Entry {
        name: "attn.window",
        summary: "the sliding window is lost, another layer's, or applied where there is none",
        place: "the pattern of windowed and full layers counted from the other end, sliding_window of a configuration \
                that use_sliding_window switches off, a ring buffer for a cache",
        fix: "apply a window only in layers that have one ({arch}.attention.sliding_window_pattern)",
        parameter: Some("positions"),
        silent: Some("in rows that the window holds all of"),
        ops: ATTENTION,
        values: |site| {
            let own = masked(site).and_then(|mask| site.graph.src(site.id, mask));
            let others = own.into_iter().flat_map(|own| other_masks(site, own));
            let others: Vec<Argument> = others.map(|id| Argument::Name(mask_name(site, id))).collect();
            if others.is_empty() { Argument::numbers(WINDOWS) } else { others }
        },
        make: window,
        guess: Some(windows),
        ..PLAIN
    },
    Entry {
        name: "attn.window_size",
        summary: "the sliding window is one position too wide or too narrow",
        place: "i - j < window written as i - j <= window, or the reverse",
        fix: "a window of W sees W positions, the token's own among them",
        parameter: Some("by"),
        silent: Some("in rows that the window holds all of"),
        ops: ATTENTION,
        values: |_| Argument::numbers([1.0, -1.0]),
        make: |site, argument| {
            let (mask, wider) = (masked(site)?, argument.integer()? > 0);
            // Distances stand in a mask with ALiBi.
            when(site.float("max_bias") == 0.0)?;
            let text = if wider { "one position too wide" } else { "one position too narrow" };
            made(edit(mask, Edit::Window { wider }), format!("the sliding window is {text}"))
        },
        ..PLAIN
    },
    Entry {
        name: "attn.unseen",
        summary: "some positions of the cache are not seen",
        place: "a page of a paged cache that is not in the table, a tile of keys that is skipped, a split that is lost",
        fix: "every position from 0 to the row's own is seen, unless a window says otherwise",
        parameter: Some("positions"),
        silent: Some("in rows before those positions"),
        ops: ATTENTION,
        values: |_| vec![Argument::name("1..1")],
        make: |site, argument| {
            let mask = masked(site)?;
            let columns = super::data::columns(argument, site.src(mask)?.ne[0])?;
            let last = columns.end - 1;
            let text = match columns.len() {
                1 => format!("position {last} of the cache is not seen"),
                _ => format!("positions {} to {last} of the cache are not seen", columns.start),
            };
            made(edit(mask, Edit::Hidden(columns)), text)
        },
        guess: Some(unseen),
        ..PLAIN
    },
];

/// The slot of the mask of an attention that has one.
pub(super) fn masked(site: Site<'_>) -> Option<usize> {
    let mask = of(site)?.mask;
    site.src(mask).map(|_| mask)
}

fn stale(site: Site<'_>, argument: &Argument) -> Made {
    let mask = masked(site)?;
    let after = "after the first step, the cache is read before the step's keys and values are written";
    let held = match argument.text()? {
        "unread" => {
            return made(edit(mask, Edit::BeforeStep), format!("{after}: rows do not see their own step"));
        }
        "held" => true,
        "zero" => false,
        _ => return None,
    };
    when(*site.op() == Op::FlashAttn)?;
    let slots = if held { "their slots hold the row before them" } else { "their slots hold zeros" };
    made(Change::Unwritten { slots: vec![1, 2], mask, held }, format!("{after}: {slots}"))
}

fn window(site: Site<'_>, argument: &Argument) -> Made {
    let mask = masked(site)?;
    if let Some(width) = argument.integer() {
        let width = usize::try_from(width).ok().filter(|width| *width > 0)?;
        let text = format!(
            "rows see the last {width} positions only: a sliding window that the model does not have"
        );
        return made(edit(mask, Edit::Last(width)), text);
    }
    let own = site.graph.src(site.id, mask)?;
    let other = other_masks(site, own).find(|&other| Some(&*mask_name(site, other)) == argument.text())?;
    let text = format!(
        "the mask {} is used for {}: the sliding window is lost, or applied where there is none",
        mask_name(site, other),
        mask_name(site, own)
    );
    made(Change::Source { slot: mask, with: Some(other) }, text)
}

/// What a mask is called; several may have one name in llama.cpp.
fn mask_name(site: Site<'_>, mask: Id) -> String {
    let leaf = leaf_names(site.graph)[mask].clone();
    leaf.unwrap_or_else(|| site.name_of(mask))
}

/// Other masks of the same shape in the same graph.
fn other_masks(site: Site<'_>, own: Id) -> impl Iterator<Item = Id> {
    let (graph, mask) = (site.graph, site.graph.get(own));
    let same = move |other: &Tensor| other.ne == mask.ne && other.dtype == mask.dtype && other.nb == mask.nb;
    (0..graph.tensors.len())
        .filter(move |&id| id != own && same(graph.get(id)))
        // What a node reads must have been computed before it.
        .filter(move |&id| (graph.is_leaf(id) || id < site.id) && graph.get(id).name.contains("mask"))
}

/// Windows up to this one are all tried; of wider ones powers of two, and one and a half times those.
const WINDOW: usize = 64;

/// The sliding window that gives the recorded rows best.
fn windows(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some(mask) = masked(site) else { return vec![] };
    let all = site.src(mask).map_or(0, |mask| mask.ne[0]);
    let wide = (6..32).flat_map(|octave| [1usize << octave, 3 << (octave - 1)]);
    // A window that holds all is none.
    let widths = (1..=WINDOW).chain(wide.filter(|width| *width > WINDOW)).filter(|width| *width < all);
    let best = evidence.nearest(widths, |width| Some(edit(mask, Edit::Last(*width))));
    Argument::numbers(best.map(|width| width as f64))
}

/// Positions that are tried one by one.
const COLUMNS: usize = 512;

/// The positions without which the recorded rows are nearer.
fn unseen(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some(mask) = masked(site) else { return vec![] };
    let all = site.src(mask).map_or(0, |mask| mask.ne[0]);
    if all > COLUMNS {
        return vec![];
    }
    let without = |columns: std::ops::Range<usize>| evidence.distance(&edit(mask, Edit::Hidden(columns)));
    let own = without(0..0);
    let nearer: Vec<usize> = (0..all).filter(|&c| without(c..c + 1) < own).collect();
    let (Some(&first), Some(&last)) = (nearer.first(), nearer.last()) else { return vec![] };
    // From there on the ends move as long as that brings it nearer.
    let (mut start, mut end) = (first, last + 1);
    loop {
        let here = without(start..end);
        let moved =
            [(start + 1, end), (start, end - 1), (start.saturating_sub(1), end), (start, (end + 1).min(all))];
        let better = moved.into_iter().filter(|(start, end)| start < end).map(|(s, e)| (without(s..e), s, e));
        match better.min_by(|a, b| a.0.total_cmp(&b.0)).filter(|(distance, ..)| *distance < here) {
            Some((_, s, e)) => (start, end) = (s, e),
            None => break,
        }
    }
    vec![Argument::Name(format!("{start}..{}", end - 1))]
}
