//! Which heads attention reads, and where it puts what they give.

use super::site::{edit, made};
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, plain, spell_order, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// Attention in one node, or one of the two products of one that is not.
const READERS: &[Op] = &[Op::FlashAttn, Op::MulMat];
const CONTEXT: &[Op] = &[Op::FlashAttn];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    plain(
        "attn.kv_head",
        READERS,
        [
            "query head h reads key/value head h % K for h / (H/K)",
            "grouped-query attention written with a modulo, or with repeat for repeat_interleave",
            "query head h reads key/value head h / (H/K)",
        ],
        |site, _| {
            let (h, k) = grouped(site)?;
            when(k > 1 && k < h)?;
            let text = format!("query head h reads KV head h % {k}, the model says h / {}", h / k);
            made(reads(site, &(0..h).map(|head| (head % k) as u32).collect::<Vec<_>>())?, text)
        },
    ),
    plain(
        "attn.kv_first",
        READERS,
        [
            "all query heads read the first key/value head",
            "grouped-query attention run by code for multi-query attention",
            "query head h reads key/value head h / (H/K)",
        ],
        |site, _| {
            let (_, k) = grouped(site).filter(|(_, k)| *k > 1)?;
            made(reads(site, &vec![0; k])?, "all query heads read KV head 0")
        },
    ),
    Entry {
        name: "ranks.kv_heads",
        summary: "query heads read the key/value heads of another rank",
        place: "the key/value heads of a tensor-parallel engine, divided otherwise than its query heads",
        fix: "rank r of R holds query heads r·H/R and the key/value heads r·K/R on",
        parameter: Some("heads"),
        ops: READERS,
        values: |site| match grouped(site) {
            Some((_, k)) if k > 1 => Argument::numbers([k / 2].into_iter().chain(1..k).map(|by| by as f64)),
            _ => vec![],
        },
        make: |site, argument| {
            let ((h, k), by) = (grouped(site)?, usize::try_from(argument.integer()?).ok()?);
            when(k > 1 && by > 0 && by < k)?;
            let text = format!(
                "query head h reads KV head (h / {0} + {by}) % {k}, the model says h / {0}: ranks hold each other's \
                 key/value heads",
                h / k
            );
            made(reads(site, &(0..k).map(|head| ((head + by) % k) as u32).collect::<Vec<_>>())?, text)
        },
        ..PLAIN
    },
    Entry {
        name: "attn.wrong_kv_head",
        summary: "some query heads read the keys or values of another key/value head",
        place: "an index of a key/value head that is computed apart for some heads: a tail, a block of heads, one of \
                two caches",
        fix: "query head h reads keys and values of key/value head h / (H/K)",
        parameter: Some("heads"),
        ops: READERS,
        values: |site| match grouped(site) {
            // The first group reads what the second one does.
            Some((h, k)) if k > 1 => {
                let one: Vec<u32> = (0..h).map(|head| (head / (h / k)).max(1) as u32).collect();
                vec![Argument::Order([&one[..], &one[..]].concat())]
            }
            _ => vec![],
        },
        make: wrong,
        guess: Some(wrong_reads),
        ..PLAIN
    },
    Entry {
        name: "attn.head_order",
        summary: "the heads of the context are concatenated in another order",
        place: "grouped heads counted (H/K, K) for (K, H/K)",
        fix: "head h takes columns h·E to (h+1)·E of the context",
        parameter: Some("order"),
        ops: CONTEXT,
        values: |site| match grouped(site) {
            // Heads counted with the key/value head fastest, where that is another order; reversed.
            Some((h, k)) if h > 1 => {
                let (group, turned) = (h / k, k > 1 && h > k);
                let order = |from: &dyn Fn(usize) -> usize| {
                    Argument::Order((0..h).map(|head| from(head) as u32).collect())
                };
                let counted = turned.then(|| order(&|head| head % k * group + head / k));
                counted.into_iter().chain([order(&|head| h - 1 - head)]).collect()
            }
            _ => vec![],
        },
        make: |site, argument| {
            let (Argument::Order(order), [width, heads, ..]) = (argument, site.tensor().ne) else {
                return None;
            };
            when(order.len() == heads && order.iter().all(|head| (*head as usize) < heads))?;
            let columns =
                order.iter().flat_map(|head| (0..width).map(move |e| *head * width as u32 + e as u32));
            let text =
                format!("the heads are concatenated in the order {}", spell_order(order).replace(',', ", "));
            made(Change::ResultEdit(Edit::Columns(columns.collect())), text)
        },
        guess: Some(head_order),
        ..PLAIN
    },
    plain(
        "attn.width_first",
        CONTEXT,
        [
            "the context is laid out (E, H) for (H, E)",
            "a reshape where a transposition is needed",
            "head h takes columns h·E to (h+1)·E of the context",
        ],
        |site, _| {
            let [width, heads, ..] = site.tensor().ne;
            when(heads > 1 && width > 1)?;
            let columns = (0..heads * width).map(|c| (c % heads * width + c / heads) as u32).collect();
            made(Change::ResultEdit(Edit::Columns(columns)), "the context is laid out (E, H) for (H, E)")
        },
    ),
    Entry {
        silent: Some("in steps of one row: it shows in a prefill"),
        ..plain(
            "attn.heads_first",
            CONTEXT,
            [
                "the context (H, T, E) is read as (T, H, E)",
                "transpose(1, 2) left out before the reshape to (T, H·E)",
                "transpose (H, T, E) to (T, H, E) before concatenating the heads",
            ],
            |site, _| {
                let [width, heads, ..] = site.tensor().ne;
                when(heads > 1)?;
                let text = "the context (H, T, E) is read as (T, H, E): a transposition is left out";
                made(Change::ResultEdit(Edit::HeadsFirst { width, heads }), text)
            },
        )
    },
];

/// Slots of keys or values.
fn cached(site: Site<'_>) -> &'static [usize] {
    if *site.op() == Op::FlashAttn { &[1, 2] } else { &[0] }
}

/// Query heads and key/value heads of attention, or of one of its products.
fn grouped(site: Site<'_>) -> Option<(usize, usize)> {
    let (query, cache) = match site.op() {
        Op::FlashAttn => (site.src(0)?, site.src(1)?),
        // Scores are products of two things that were computed; probabilities come of a softmax.
        _ => (site.src(1)?, site.src(0)?),
    };
    if *site.op() == Op::MulMat {
        when(site.weight().is_none())?;
        let is_context = site.origin_op(1) == Some(&Op::SoftMax);
        let to_softmax = |reader: Site<'_>| *reader.op() == Op::SoftMax && reader.src(1).is_some();
        when(is_context || site.readers().any(to_softmax))?;
    }
    let (h, k) = (query.ne[2], cache.ne[2]);
    (k > 0 && h % k == 0).then_some((h, k))
}

/// Keys and values of these heads, in place of the node's own.
fn reads(site: Site<'_>, order: &[u32]) -> Option<Change> {
    let of = |slot: &usize| edit(*slot, Edit::Gather { axis: 2, order: order.to_vec() });
    Some(Change::All(cached(site).iter().map(of).collect()))
}

/// Which head's keys each query head reads, then which one's values.
fn wrong(site: Site<'_>, argument: &Argument) -> Made {
    let (Argument::Order(read), (h, k)) = (argument, grouped(site)?) else { return None };
    when(k > 1 && read.len() == 2 * h && read.iter().all(|head| (*head as usize) < k))?;
    let own = |head: usize| (head / (h / k)) as u32;
    when((0..2 * h).any(|i| read[i] != own(i % h)))?;
    let halves = [&read[..h], &read[h..]];
    let change = |slot: usize, of: &[u32]| edit(slot, Edit::Gather { axis: 2, order: of.to_vec() });
    let changes = match site.op() {
        Op::FlashAttn => vec![change(1, halves[0]), change(2, halves[1])],
        _ if site.origin_op(1) == Some(&Op::SoftMax) => vec![change(0, halves[1])],
        _ => vec![change(0, halves[0])],
    };
    let wrong = (0..h).filter_map(|head| {
        let what = match halves.map(|read| Some(read[head]).filter(|other| *other != own(head))) {
            [Some(keys), Some(values)] if keys == values => format!("KV head {keys}"),
            [Some(keys), Some(values)] => format!("keys of KV head {keys} and values of KV head {values}"),
            [Some(keys), None] => format!("the keys of KV head {keys}"),
            [None, Some(values)] => format!("the values of KV head {values}"),
            [None, None] => return None,
        };
        Some(format!("query head {head} reads {what}, the model says {}", own(head)))
    });
    let wrong: Vec<String> = wrong.collect();
    let text = match wrong.len().checked_sub(HEADS_SPELT) {
        Some(more @ 1..) => format!("{}; and {more} more heads", wrong[..HEADS_SPELT].join("; ")),
        _ => wrong.join("; "),
    };
    made(Change::All(changes), text)
}

/// Heads that a sentence spells out.
const HEADS_SPELT: usize = 4;
/// Share of the distance from the own head below which another one is what was read.
const NEARER: f64 = 0.5;

/// Own heads but for those that another one's keys, values or both fit better.
fn wrong_reads(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some((h, k)) = grouped(site).filter(|(_, k)| *k > 1) else { return vec![] };
    let own: Vec<u32> = (0..h).map(|head| (head / (h / k)) as u32).collect();
    let mut read = [own.clone(), own.clone()].concat();
    let distance = |read: &[u32]| {
        let made = wrong(site, &Argument::Order(read.to_vec()));
        made.map_or(f64::INFINITY, |(change, _)| evidence.distance(&change))
    };
    let mut least = evidence.distance(&Change::All(Vec::new()));
    for (head, &right) in own.iter().enumerate() {
        // Heads do not mix: each is found apart from the others.
        for other in (0..k as u32).filter(|other| *other != right) {
            for places in [&[head, h + head][..], &[head], &[h + head]] {
                let mut tried = read.clone();
                places.iter().for_each(|&place| tried[place] = other);
                [head, h + head]
                    .iter()
                    .filter(|place| !places.contains(place))
                    .for_each(|&p| tried[p] = right);
                let distance = distance(&tried);
                if distance < NEARER.max(1.0 - 1.0 / h as f64) * least {
                    (least, read) = (distance, tried);
                }
            }
        }
    }
    // Groups counted the other way round have a name of their own.
    let other_way: Vec<u32> = (0..2 * h).map(|place| (place % h % k) as u32).collect();
    if read == other_way { Vec::new() } else { vec![Argument::Order(read)] }
}

/// Which head of the exact context each head of the recorded one is.
fn head_order(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let [width, heads, ..] = site.tensor().ne;
    let apart = |to: usize, from: usize| -> f64 {
        let rows = (0..evidence.exact.len() / (width * heads)).map(|t| t * width * heads);
        let of = |row: usize| (0..width).map(move |e| (row + to * width + e, row + from * width + e));
        let looked_at = rows.filter(|row| (evidence.looked_at)(*row));
        looked_at.flat_map(of).map(|(to, from)| (evidence.recorded[to] - evidence.exact[from]).powi(2)).sum()
    };
    let nearest = |to: usize| (0..heads).min_by(|a, b| apart(to, *a).total_cmp(&apart(to, *b)));
    let order: Vec<u32> = (0..heads).filter_map(nearest).map(|head| head as u32).collect();
    let moved = order.iter().enumerate().any(|(i, head)| i as u32 != *head);
    if moved { vec![Argument::Order(order)] } else { vec![] }
}
