//! The parts that ranks of a tensor-parallel engine hold, put together.

use parity_dump::{Checkpoint, Element, Kind};

use super::array::Array;
use super::map::Shards;
use crate::error::{Error, Result};

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
/// sum depends on how the engine adds them: of more than two ranks the order, of 16 bits the type.
///
/// # Errors
/// Ranks that differ where they should agree, or whose shapes do not fit.
pub fn whole(id: Checkpoint, parts: &[Array], way: Option<Shards>, place: &str) -> Result<Option<Whole>> {
    let mut values: Vec<(Element, Vec<u8>)> = parts.iter().map(Array::to_dump).collect();
    let shapes: Vec<&[usize]> = parts.iter().map(|part| part.shape.as_slice()).collect();
    let same = shapes.iter().all(|shape| *shape == shapes[0]);
    let equal = same && values.iter().all(|part| *part == values[0]);
    let way = match way {
        Some(way) => way,
        None if equal => Shards::First,
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
            let first = |rank: &usize| !shared || *rank == 0 || values[*rank] != values[*rank - 1];
            let ranks: Vec<usize> = (0..parts.len()).filter(first).collect();
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

fn disagree(id: Checkpoint, place: &str) -> Error {
    Error::new(id, "differs between ranks")
        .expected("the same values on all of them: nothing of it is divided")
        .found(format!("ranks that disagree, {place}"))
        .hint(
            "either a rank is wrong from here on (a sum over ranks that was left out?), or a map says what ranks hold: \
             shards = \"concat\" or \"sum\"",
        )
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
        let whole = whole(id.parse().unwrap(), parts, way, "x")?.expect("one sum");
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
        assert!(whole(id, &parts, None, "x").unwrap().is_none(), "0 or 1e-8 of three in f32");
        assert!(whole(id, &parts[..2], None, "x").unwrap().is_some());
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
