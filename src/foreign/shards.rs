//! The parts that ranks of a tensor-parallel engine hold, put together.

use std::collections::{BTreeMap, BTreeSet};

use parity_dump::{Checkpoint, Dump, Element, Kind};

use super::array::Array;
use super::map::Shards;
use super::map::expression::Widths;
use crate::error::{Error, Result};
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_BF16, UNIT_F16, UNIT_F32};

/// What ranks hold a slice of, by rows of the weight: heads, feed-forward columns, vocabulary.
const SLICED: [Kind; 17] = [
    Kind::QProj,
    Kind::Q,
    Kind::KProj,
    Kind::K,
    Kind::VProj,
    Kind::V,
    Kind::QNorm,
    Kind::KNorm,
    Kind::QRope,
    Kind::KRope,
    Kind::AttnScores,
    Kind::AttnProbs,
    Kind::AttnCtx,
    Kind::FfnGate,
    Kind::FfnUp,
    Kind::FfnAct,
    Kind::Logits,
];
/// Of these, where there are fewer heads than ranks, neighbours hold the same one.
const SHARED: [Kind; 6] = [Kind::KProj, Kind::K, Kind::VProj, Kind::V, Kind::KNorm, Kind::KRope];
/// What ranks hold a summand of, by columns of the weight.
const SUMMED: [Kind; 2] = [Kind::AttnOut, Kind::FfnOut];

/// A tensor as a dump has it.
pub struct Whole {
    /// Of its elements.
    pub element: Element,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// In C order.
    pub bytes: Vec<u8>,
}

/// Ranks whose summands have one sum in f32, whichever is added to which.
const ORDERLESS: usize = 2;

/// The whole tensor of what each rank holds, in order of rank. What is equal on all ranks is taken once; of the rest
/// slices are laid side by side and summands added, as `way` says or by the checkpoint's kind. `None` of summands whose
/// sum depends on how the engine adds them: of more than two ranks the order, of 16 bits the type. `widths` are the
/// model's: a slice that is equal on all ranks is still a slice.
///
/// # Errors
/// Ranks that differ where they should agree, or whose shapes do not fit.
pub fn whole(
    id: Checkpoint,
    parts: &[Array],
    way: Option<Shards>,
    widths: &Widths,
    place: &str,
) -> Result<Option<Whole>> {
    let mut values: Vec<(Element, Vec<u8>)> = parts.iter().map(Array::to_dump).collect();
    let shapes: Vec<&[usize]> = parts.iter().map(|part| part.shape.as_slice()).collect();
    let same = shapes.iter().all(|shape| *shape == shapes[0]);
    let equal = same && values.iter().all(|part| *part == values[0]);
    // How many different parts there are, where the model says it.
    let slices = slices(id.kind(), shapes[0], widths).filter(|slices| parts.len().is_multiple_of(*slices));
    let way = match way {
        Some(way) => way,
        None if equal && slices.is_none_or(|slices| slices == 1) => Shards::First,
        None if SUMMED.contains(&id.kind()) => Shards::Sum,
        None if SLICED.contains(&id.kind()) => Shards::Concat(usize::from(!id.kind().is_optional())),
        None => return Err(disagree(id, place)),
    };
    let one = |(element, bytes), shape: &[usize]| Whole { element, shape: shape.to_vec(), bytes };
    match way {
        Shards::First => Ok(Some(one(values.swap_remove(0), shapes[0]))),
        Shards::Sum if same && (parts.len() > ORDERLESS || values[0].0 != Element::F32) => Ok(None),
        Shards::Sum if same => {
            let mut sum = vec![0f64; parts[0].len()];
            for part in parts {
                sum.iter_mut().zip(part.values()).for_each(|(sum, value)| *sum += f64::from(value));
            }
            let bytes = sum.into_iter().flat_map(|value| (value as f32).to_le_bytes()).collect();
            Ok(Some(one((Element::F32, bytes), shapes[0])))
        }
        Shards::Concat(axis) => {
            let shared = SHARED.contains(&id.kind());
            let again = |rank: usize| match slices {
                Some(slices) => !rank.is_multiple_of(parts.len() / slices),
                None => rank > 0 && values[rank] == values[rank - 1],
            };
            let differs = |rank: &usize| shared && again(*rank) && values[*rank] != values[*rank - 1];
            if (0..parts.len()).any(|rank| differs(&rank)) {
                return Err(disagree(id, place));
            }
            let ranks: Vec<usize> = (0..parts.len()).filter(|rank| !shared || !again(*rank)).collect();
            let element = values[0].0;
            let fits = |rank: usize| {
                let alike = |(i, (a, b)): (usize, (&usize, &usize))| i == axis || a == b;
                shapes[rank].len() == shapes[0].len()
                    && axis < shapes[0].len()
                    && shapes[rank].iter().zip(shapes[0]).enumerate().all(alike)
                    && values[rank].0 == element
            };
            if !ranks.iter().all(|&rank| fits(rank)) {
                return Err(unlike(id, place, "laid side by side", &shapes));
            }
            let mut shape = shapes[0].to_vec();
            shape[axis] = ranks.iter().map(|&rank| shapes[rank][axis]).sum();
            let outer: usize = shape[..axis].iter().product();
            let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * element.size());
            for row in 0..outer {
                for &rank in &ranks {
                    let length = values[rank].1.len() / outer;
                    bytes.extend_from_slice(&values[rank].1[row * length..(row + 1) * length]);
                }
            }
            Ok(Some(Whole { element, shape, bytes }))
        }
        Shards::Sum => Err(unlike(id, place, "added", &shapes)),
    }
}

/// How many parts of this shape the whole is, where the model's widths say it and it is several whole ones or one.
fn slices(kind: Kind, shape: &[usize], widths: &Widths) -> Option<usize> {
    let get = |letter| widths.get(letter);
    let heads = |heads: char| Some(get(heads)? * if kind.is_optional() { 1 } else { get('E')? });
    let whole = match kind {
        Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => get('F')?,
        Kind::Logits => get('V')?,
        kind if SHARED.contains(&kind) => heads('K')?,
        kind if SLICED.contains(&kind) => heads('H')?,
        _ => return None,
    };
    let own = match kind.is_optional() {
        true => *shape.first()?,
        false => shape.get(1..)?.iter().product(),
    };
    (own > 0 && whole.is_multiple_of(own)).then(|| whole / own)
}

/// Refuses a dump that holds one rank's part of a model: heads and feed-forward columns, or vocabulary, of which the model
/// has the same number of times as many.
///
/// # Errors
/// What is there, and what is missing.
pub fn refuse_one_rank(dump: &Dump, widths: &Widths) -> Result<()> {
    let mut divided: BTreeMap<&str, BTreeMap<usize, Checkpoint>> = BTreeMap::new();
    for id in dump.checkpoints().filter(|id| SLICED.contains(&id.kind()) && !SHARED.contains(&id.kind())) {
        let Some(shape) = dump.get(id).map(|recorded| recorded.row_shape()) else { continue };
        // As of one row; the attention matrices have their heads first.
        let of_row: Vec<usize> = if id.kind().is_optional() { shape } else { [vec![1], shape].concat() };
        let Some(slices) = slices(id.kind(), &of_row, widths) else { return Ok(()) };
        let part = match id.kind() {
            Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => "feed-forward columns",
            Kind::Logits => "vocabulary",
            _ => "heads",
        };
        divided.entry(part).or_default().entry(slices).or_insert(id);
    }
    // The vocabulary may have been gathered.
    divided.retain(|part, slices| *part != "vocabulary" || !slices.contains_key(&1));
    let counts: BTreeSet<usize> = divided.values().flat_map(|slices| slices.keys().copied()).collect();
    let (Some(&ranks), 1) = (counts.first(), counts.len()) else { return Ok(()) };
    if ranks < 2 || divided.len() < 2 {
        return Ok(());
    }
    let first = |slices: &BTreeMap<usize, Checkpoint>| slices.values().next().map(ToString::to_string);
    let found: Vec<String> = divided
        .iter()
        .filter_map(|(part, slices)| Some(format!("1 in {ranks} of the {part} ({})", first(slices)?)))
        .collect();
    let last = ranks - 1;
    Err(Error::file(dump.path(), format!("is one rank's part of the model: the other {last} of {ranks} are missing"))
        .expected(format!("the dumps of all {ranks} ranks"))
        .found(found.join(", "))
        .hint(format!(
            "dump every rank into a folder of its own, all/rank0 to all/rank{last}, and name the folder around them: \
             parity audit all -m MODEL.gguf"
        )))
}

fn disagree(id: Checkpoint, place: &str) -> Error {
    Error::new(id, "differs between ranks")
        .expected("the same values on all of them: nothing of it is divided")
        .found(format!("ranks that disagree, {place}"))
        .hint(
            "either a rank is wrong from here on (a sum over ranks that was left out?), or a map says what ranks hold: \
             shards = \"concat\" or \"sum\"",
        )
}

/// The sum of summands that a residual adds to what it was.
pub fn summed_by(residual: Checkpoint) -> Option<Checkpoint> {
    match residual.kind() {
        Kind::AttnResidual => Some(residual.sibling(Kind::AttnOut)),
        Kind::LayerOut => Some(residual.sibling(Kind::FfnOut)),
        _ => None,
    }
}

/// Whether ranks differ by their summands: each added its own to what was the same on all of them.
pub fn is_unsummed(residuals: &[Array], summands: &[Array]) -> bool {
    let values = |arrays: &[Array]| -> Vec<Vec<f32>> { arrays.iter().map(Array::values).collect() };
    let (residuals, summands) = (values(residuals), values(summands));
    let ([first, others @ ..], [lead, rest @ ..]) = (&residuals[..], &summands[..]) else { return false };
    let (unit, unit_of_summand) = (unit(&residuals), unit(&summands));
    let fits = |(residual, summand): (&Vec<f32>, &Vec<f32>)| {
        let same = [residual.len(), summand.len(), lead.len()].iter().all(|length| *length == first.len());
        same && (0..first.len()).all(|i| {
            let [a, b, x, y] = [residual[i], first[i], summand[i], lead[i]].map(f64::from);
            let bound = unit * (a.abs() + b.abs()) + unit_of_summand * (x.abs() + y.abs());
            ((a - b) - (x - y)).abs() <= bound
        })
    };
    let differ = summands.iter().any(|summand| summand != lead);
    differ && others.len() == rest.len() && others.iter().zip(rest).all(fits)
}

/// Unit roundoff of the narrowest type that holds all values.
fn unit(arrays: &[Vec<f32>]) -> f64 {
    let holds = |storage: Storage| arrays.iter().flatten().all(|value| storage.holds(*value));
    match [Storage::Bf16, Storage::F16].map(holds) {
        [true, _] => UNIT_BF16,
        [_, true] => UNIT_F16,
        _ => UNIT_F32,
    }
}

/// What ranks say that a sum over them was left out.
pub fn unsummed(id: Checkpoint, summed: Checkpoint, place: &str) -> Error {
    Error::new(
        id,
        format!("lacks a sum over ranks (ranks.lost_sum): each added its own part of {summed} alone"),
    )
    .expected(format!("the same values on all ranks, with the sum of all parts of {summed} in them"))
    .found(format!("ranks that differ by their parts, {place}"))
    .hint("add up the outputs of all ranks (all-reduce) before the residual sum reads them")
}

fn unlike(id: Checkpoint, place: &str, how: &str, shapes: &[&[usize]]) -> Error {
    Error::new(id, format!("ranks hold what cannot be {how}, {place}"))
        .expected("shapes that differ along one axis at most, of one element type")
        .found(format!("{shapes:?}"))
        .hint("a map says how ranks are put together: shards = \"concat 0\", \"sum\" or \"first\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &[usize], values: &[f32]) -> Array {
        Array::of_values("x", shape.to_vec(), values).unwrap()
    }

    fn merged(id: &str, parts: &[Array], way: Option<Shards>) -> Result<(Vec<usize>, Vec<f32>)> {
        let whole = whole(id.parse().unwrap(), parts, way, &Widths::default(), "x")?.expect("one sum");
        let mut values = vec![0.0; whole.shape.iter().product()];
        whole.element.decode(&whole.bytes, &mut values);
        Ok((whole.shape, values))
    }

    #[test]
    fn slices_lie_side_by_side_and_summands_are_added() {
        let parts = [array(&[2, 1, 2], &[0., 1., 4., 5.]), array(&[2, 1, 2], &[2., 3., 6., 7.])];
        let counting: Vec<f32> = (0..8).map(|i| i as f32).collect();
        assert_eq!(merged("blk.0.q_rope", &parts, None).unwrap(), (vec![2, 2, 2], counting));
        assert_eq!(merged("blk.0.ffn_out", &parts, None).unwrap().1, [2., 4., 10., 12.]);
        assert_eq!(merged("blk.0.own", &parts, Some(Shards::Concat(0))).unwrap().0, [4, 1, 2]);
        assert_eq!(merged("blk.0.own", &parts, Some(Shards::First)).unwrap().1, [0., 1., 4., 5.]);
    }

    #[test]
    fn one_head_for_several_ranks_is_taken_once() {
        let (a, b) = (array(&[1, 1, 2], &[0., 1.]), array(&[1, 1, 2], &[2., 3.]));
        let ranks = [a.clone(), a.clone(), b.clone(), b];
        assert_eq!(merged("blk.0.k_rope", &ranks, None).unwrap(), (vec![1, 2, 2], vec![0., 1., 2., 3.]));
        assert_eq!(merged("blk.0.ffn_out", &[a.clone(), a], None).unwrap().1, [0., 1.], "summed already");
    }

    #[test]
    fn summands_whose_sum_depends_on_the_engine_have_none() {
        let parts = [array(&[1, 2], &[0., 1.]), array(&[1, 2], &[1e8, 2.]), array(&[1, 2], &[-1e8, 2.])];
        let id = "blk.0.attn_out".parse().unwrap();
        assert!(
            whole(id, &parts, None, &Widths::default(), "x").unwrap().is_none(),
            "0 or 1e-8 of three in f32"
        );
        assert!(whole(id, &parts[..2], None, &Widths::default(), "x").unwrap().is_some());
    }

    #[test]
    fn ranks_that_differ_by_their_summands_lack_a_sum() {
        let summands = [array(&[1, 2], &[0.1, 1.]), array(&[1, 2], &[0.7, -2.])];
        let residuals = |other: f32| [array(&[1, 2], &[3.1, 6.]), array(&[1, 2], &[other, 3.])];
        assert!(is_unsummed(&residuals(3.7), &summands));
        assert!(!is_unsummed(&residuals(3.701), &summands), "something else");
        assert!(!is_unsummed(&residuals(f32::NAN), &summands));
        assert!(!is_unsummed(&summands[..1], &[]) && !is_unsummed(&residuals(3.7), &summands[..1]));
        let equal = [summands[0].clone(), summands[0].clone()];
        assert!(!is_unsummed(&residuals(3.7), &equal) && !is_unsummed(&equal, &equal), "added up already");
    }

    #[test]
    fn ranks_that_should_agree_and_do_not_are_named() {
        let parts = [array(&[1, 2], &[0., 1.]), array(&[1, 2], &[0., 2.])];
        let said = merged("blk.3.attn_residual", &parts, None).err().unwrap().to_string();
        assert!(said.contains("blk.3.attn_residual: differs between ranks"), "{said}");
        let unlike = [array(&[1, 2], &[0., 1.]), array(&[2, 1], &[0., 2.])];
        assert!(merged("blk.0.ffn_out", &unlike, None).is_err() && merged("blk.0.q", &unlike, None).is_err());
    }
}
