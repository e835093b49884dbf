//! Sources cut to some rows.

use crate::gguf::DType;
use crate::ops::source::Data;
use crate::ops::{Source, Strided};

/// A source cut to what the sample needs of it.
pub struct Part {
    pub dtype: DType,
    pub values: Vec<f64>,
    pub shape: [usize; 4],
    /// The axis along which it was cut to the rows of the sample.
    pub rows_along: Option<usize>,
}

/// As an op reads it.
pub fn source(part: &Part) -> Source<'_, f64> {
    Source { dtype: part.dtype, data: Data::Values(Strided::whole(&part.values, part.shape)) }
}

/// A source at some rows along an axis, or at some rows of a matrix.
pub fn part(source: &Source<'_, f64>, rows: Option<(usize, &[usize])>, columns: Option<&[usize]>) -> Part {
    let (dtype, mut shape) = (source.dtype, source.shape());
    if let Some(columns) = columns {
        let values = columns.iter().flat_map(|&c| source.row([0, 0, c]).into_owned()).collect();
        shape[2] = columns.len();
        return Part { dtype, values, shape, rows_along: None };
    }
    let values = source.values();
    let Some((axis, rows)) = rows else {
        return Part { dtype, values: values.into_owned(), shape, rows_along: None };
    };
    let within: usize = shape[axis + 1..].iter().product();
    let blocks = values.chunks_exact((within * shape[axis]).max(1));
    let picked =
        blocks.flat_map(|block| rows.iter().flat_map(move |&row| &block[row * within..(row + 1) * within]));
    let values = picked.copied().collect();
    shape[axis] = rows.len();
    Part { dtype, values, shape, rows_along: Some(axis) }
}
