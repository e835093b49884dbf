//! One tensor of another engine, put into the order that a dump has.

use parity_dump::{Checkpoint, Kind};

use super::expression::Widths;
use super::{Columns, Target};
use crate::error::{Error, Result};
use crate::foreign::array::Array;

/// Kinds whose rows are heads.
const HEADS: [Kind; 7] = [Kind::Q, Kind::K, Kind::V, Kind::QNorm, Kind::KNorm, Kind::QRope, Kind::KRope];

/// Whether a checkpoint's rows are heads.
pub fn has_heads(id: Checkpoint) -> bool {
    HEADS.contains(&id.kind())
}

/// Whether a checkpoint is a node of a graph, whose rows may have any axes: a delta net's heads, a convolution's channels.
pub fn is_named(id: Checkpoint) -> bool {
    !id.kind().is_fixed()
}

/// On which axis tensors with heads have their token rows, where they say no layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadsLayout {
    /// (T, H, E), as a dump has it.
    #[default]
    TokensFirst,
    /// (H, T, E), as PyTorch's attention has it.
    HeadsFirst,
}

/// What a tensor's own shape says of that; `None` where it fits both, or neither.
pub fn heads_layout(array: &Array, count: usize) -> Option<HeadsLayout> {
    let squeezed = squeezed(array.clone(), 3);
    match squeezed.shape[..] {
        [first, second, _] if first == count && second != count => Some(HeadsLayout::TokensFirst),
        [first, second, _] if first != count && second == count => Some(HeadsLayout::HeadsFirst),
        _ => None,
    }
}

/// The tensor with its token rows first, of attention matrices (H, T, S), with the columns and values that a map asks
/// for. `count` is the number of rows it should have, `place` what errors call the line of the map.
///
/// # Errors
/// A shape that the layout does not fit, with the layout that would.
pub fn arranged(
    array: &Array,
    id: Checkpoint,
    target: &Target,
    count: usize,
    heads: HeadsLayout,
    widths: &Widths,
    place: &str,
) -> Result<Array> {
    let about = |error: Error| Error::new(place, error);
    let mut array = array.clone();
    if let Some(order) = &target.transpose {
        if array.shape.len() > order.len() {
            array = squeezed(array, order.len());
        }
        array = array.permuted(order).map_err(about)?;
    }
    array = match &target.layout {
        Some(layout) => by_layout(array, layout, id).map_err(about)?,
        // Axes that were put into order are.
        None if target.transpose.is_some() => array,
        None => by_shape(array, id, count, heads)?,
    };
    if let Some(columns) = &target.columns {
        array = taken(array, columns, widths).map_err(about)?;
    }
    let axis = usize::from(id.kind().is_optional());
    let is_last = id.kind() == Kind::Logits && array.shape.first() == Some(&1);
    if array.shape.get(axis) != Some(&count) && !is_last {
        return Err(misfit(&array, id, count, place));
    }
    if target.scale.is_some() || target.add.is_some() {
        let (scale, add) = (target.scale.unwrap_or(1.0), target.add.unwrap_or(0.0));
        let values: Vec<f32> = array.values().into_iter().map(|x| x * scale + add).collect();
        array = Array::of_values(&array.name, array.shape.clone(), &values)?;
    }
    Ok(array)
}

/// Without leading axes of one entry, as long as more than `depth` are left.
fn squeezed(mut array: Array, depth: usize) -> Array {
    while array.shape.len() > depth && array.shape[0] == 1 {
        array = array.at(0, 0);
    }
    array
}

/// In the order of a dump, where nobody says the layout: leading ones are dropped, and heads may come before tokens.
fn by_shape(array: Array, id: Checkpoint, count: usize, heads: HeadsLayout) -> Result<Array> {
    if is_named(id) {
        return by_extent(array, count, heads);
    }
    let with_heads = has_heads(id) && array.shape.len() >= 3;
    let depth = if id.kind().is_optional() || with_heads { 3 } else { 2 };
    let mut array = squeezed(array, depth);
    // (1, T, H·E): the one entry is a batch.
    if with_heads && array.shape.len() == 3 && array.shape[0] == 1 && count != 1 && array.shape[1] == count {
        array = array.at(0, 0);
    }
    if has_heads(id) && array.shape.len() == 3 {
        let layout = heads_layout(&array, count).unwrap_or(heads);
        if layout == HeadsLayout::HeadsFirst && array.shape[1] == count {
            return array.permuted(&[1, 0, 2]);
        }
    }
    Ok(array)
}

/// A node of a graph: the one axis with as many entries as there are tokens comes first, as in (B, H, T, E) of a delta net and
/// (B, D, T) of its convolution. Of two such axes the first is meant, unless `heads` come first.
fn by_extent(mut array: Array, count: usize, heads: HeadsLayout) -> Result<Array> {
    // Two axes alone say too little: a matrix may as well be turned by mistake.
    let says_little = array.shape.len() < 3;
    // (1, T, …): the one entry is a batch, unless it is the token.
    while array.shape.len() > 2 && array.shape[0] == 1 && (count != 1 || array.shape[1] == 1) {
        array = array.at(0, 0);
    }
    let axes: Vec<usize> = (0..array.shape.len()).filter(|&axis| array.shape[axis] == count).collect();
    let axis = match axes[..] {
        [only] => only,
        [0, 1] if array.shape.len() == 3 && heads == HeadsLayout::HeadsFirst => 1,
        _ => return Ok(array),
    };
    if axis == 0 || says_little {
        return Ok(array);
    }
    let order: Vec<usize> =
        std::iter::once(axis).chain((0..array.shape.len()).filter(|&a| a != axis)).collect();
    array.permuted(&order)
}

/// In the order of a dump, by letters.
fn by_layout(array: Array, layout: &str, id: Checkpoint) -> Result<Array> {
    let mut array = squeezed(array, layout.len());
    let mut letters: Vec<char> = layout.chars().collect();
    if array.shape.len() != letters.len() {
        return Err(Error::new(&array.name, "has another number of axes than its layout")
            .expected(format!("{} axes, {layout}", letters.len()))
            .found(format!("shape {:?}", array.shape)));
    }
    if let Some(axis) = letters.iter().position(|letter| *letter == 'B') {
        if array.shape[axis] != 1 {
            return Err(Error::new(&array.name, "holds several texts")
                .expected(format!("one, on axis {axis}"))
                .found(format!("{}, shape {:?}", array.shape[axis], array.shape))
                .hint("a dump is of one text: save x[0], without its padding"));
        }
        array = array.at(axis, 0);
        letters.remove(axis);
    }
    let place = |letter: char| match (letter, id.kind().is_optional()) {
        ('T', false) => 0,
        ('H' | 'K', _) => 1,
        ('T', true) => 2,
        _ => 3,
    };
    let mut order: Vec<usize> = (0..letters.len()).collect();
    order.sort_by_key(|&axis| place(letters[axis]));
    array.permuted(&order)
}

fn taken(array: Array, columns: &Columns, widths: &Widths) -> Result<Array> {
    let axis = array.shape.len().saturating_sub(1);
    let width = array.shape.last().copied().unwrap_or(0);
    let widths = widths.clone().with_own(width);
    let value = |expression: &super::Expression| {
        expression.value(&widths).map_err(|why| Error::new(&array.name, format!("columns: {why}")))
    };
    let (from, to) = (value(&columns.from)?, value(&columns.to)?);
    let count = to.saturating_sub(from).div_ceil(columns.step);
    if to > width || count == 0 {
        return Err(Error::new(&array.name, "does not have these columns")
            .expected(format!("columns {from} to {to}"))
            .found(format!("shape {:?}", array.shape)));
    }
    array.part(axis, from, count, columns.step)
}

/// How the error begins to say that rows are not where they should be.
const MISFIT: &str = "has no rows for its tokens: ";

/// Whether an error is that rows are not where they should be.
pub fn is_misfit(error: &Error) -> bool {
    error.to_string().contains(MISFIT)
}

/// Rows are not where they should be: which layout has them there.
fn misfit(array: &Array, id: Checkpoint, rows: usize, place: &str) -> Error {
    let axis = usize::from(id.kind().is_optional());
    let error = Error::new(place, format!("{id} {MISFIT}{rows} on axis {axis}"))
        .expected(format!("{rows} on axis {axis}, one for each token of the pass"))
        .found(format!("shape {:?}", array.shape));
    let elsewhere: Vec<usize> =
        (0..array.shape.len()).filter(|&other| other != axis && array.shape[other] == rows).collect();
    match elsewhere[..] {
        [other] => {
            let mut order: Vec<usize> = (0..array.shape.len()).filter(|&a| a != other).collect();
            order.insert(axis.min(order.len()), other);
            error.hint(format!(
                "its rows are on axis {other}: transpose({axis}, {other}) in the engine, or in a map (--names) \
                 \"{}\" = {{ id = \"{id}\", transpose = {order:?} }}",
                array.name
            ))
        }
        _ => error.hint(format!(
            "a tensor of some rows alone says which: \"{}\" = {{ id = \"{id}\", rows = \"last\" }}",
            array.name
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Map;
    use super::*;

    fn array(shape: &[usize]) -> Array {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
        Array::of_values("x", shape.to_vec(), &values).unwrap()
    }

    fn tried(shape: &[usize], line: &str, count: usize) -> Result<Array> {
        let map = Map::parse(&format!("x = {line}"), "m", false).unwrap();
        let target = &map.lines[0].targets[0];
        let id = target.id.text.parse().unwrap();
        arranged(&array(shape), id, target, count, HeadsLayout::default(), &Widths::default(), "m:1: `x`")
    }

    fn shape(shape: &[usize], line: &str, count: usize) -> Vec<usize> {
        tried(shape, line, count).unwrap().shape
    }

    #[test]
    fn layouts_are_understood_by_letters_and_by_shape() {
        assert_eq!(shape(&[1, 8, 3, 4], "\"blk.0.q\"", 3), [3, 8, 4]);
        assert_eq!(shape(&[1, 3, 8, 4], "\"blk.0.q\"", 3), [3, 8, 4]);
        assert_eq!(shape(&[1, 3, 32], "\"blk.0.q\"", 3), [3, 32]);
        assert_eq!(shape(&[1, 8, 1, 4], "\"blk.0.q\"", 1), [1, 8, 4]);
        assert_eq!(shape(&[1, 1, 32], "\"blk.0.ffn_out\"", 1), [1, 32]);
        assert_eq!(shape(&[1, 8, 3, 5], "\"blk.0.attn_probs\"", 3), [8, 3, 5]);
        assert_eq!(shape(&[3, 3, 4], "{ id = \"blk.0.q\", layout = \"HTE\" }", 3), [3, 3, 4]);
        assert_eq!(shape(&[4, 1, 8, 3], "{ id = \"blk.0.q\", layout = \"EBHT\" }", 3), [3, 8, 4]);
        assert_eq!(shape(&[4, 3], "{ id = \"blk.0.ffn_out\", transpose = [1, 0] }", 3), [3, 4]);
        assert_eq!(shape(&[1, 9], "\"logits\"", 3), [1, 9]);
        // Nodes of a graph: heads of a delta net, channels of a convolution, a batch of one, one token.
        assert_eq!(shape(&[1, 8, 3, 4], "\"blk.0.gated_delta_net\"", 3), [3, 8, 4]);
        assert_eq!(shape(&[1, 3, 8, 4], "\"blk.0.gated_delta_net\"", 3), [3, 8, 4]);
        assert_eq!(shape(&[1, 9, 3], "\"blk.0.conv_output_raw\"", 3), [3, 9]);
        assert_eq!(shape(&[1, 3, 9], "\"blk.0.conv_output_raw\"", 3), [3, 9]);
        assert_eq!(shape(&[1, 8, 1, 4], "\"blk.0.gated_delta_net\"", 1), [1, 8, 1, 4]);
        assert_eq!(shape(&[1, 1, 8, 4], "\"blk.0.gated_delta_net\"", 1), [1, 8, 4]);
        let half = tried(&[2, 4], "{ id = \"blk.0.ffn_up\", columns = \"W/2..W\", scale = 2, add = 1 }", 2);
        assert_eq!(half.unwrap().values(), [5., 7., 13., 15.]);
    }

    #[test]
    fn a_wrong_layout_gets_its_fix() {
        let said = |shape: &[usize], line: &str, count| tried(shape, line, count).err().unwrap().to_string();
        let turned = said(&[4, 3], "\"blk.0.ffn_out\"", 3);
        assert!(turned.contains("transpose(0, 1)") && turned.contains("transpose = [1, 0]"), "{turned}");
        assert!(said(&[2, 4], "\"blk.0.ffn_out\"", 3).contains("rows = \"last\""));
        assert!(said(&[9, 3], "\"blk.0.conv_output_raw\"", 3).contains("transpose = [1, 0]"));
        assert!(
            said(&[2, 3, 4], "{ id = \"blk.0.attn_out\", layout = \"BTD\" }", 3).contains("several texts")
        );
        let wide = said(&[3, 4], "{ id = \"blk.0.q\", columns = \"0..5\" }", 3);
        assert!(wide.contains("does not have these columns") && wide.contains("m:1: `x`"), "{wide}");
        assert!(said(&[3, 4], "{ id = \"blk.0.q\", columns = \"0..H*E\" }", 3).contains("-m"));
    }
}
