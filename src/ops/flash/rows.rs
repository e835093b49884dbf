//! Keys or values as they lie in memory: each row of them is met once for every query.

use super::super::source::{Data, Source};
use crate::scalar::Scalar;

/// Rows that heads read, whose elements lie side by side.
pub struct Rows<'a, S> {
    data: &'a [S],
    /// (B·H) Where the row of the first position begins.
    starts: Vec<usize>,
    stride: usize,
    width: usize,
}

impl<'a, S: Scalar> Rows<'a, S> {
    /// Of a source that so many batches and heads share; `None` where it does not lie so.
    pub fn of(source: &Source<'a, S>, [batches, heads]: [usize; 2]) -> Option<Self> {
        let Data::Values(values) = &source.data else { return None };
        let ([own_batches, own_heads, _, width], [batch, head, stride, 1]) = (values.shape, values.strides)
        else {
            return None;
        };
        let start = |b: usize, h: usize| {
            values.offset + b / (batches / own_batches) * batch + h / (heads / own_heads) * head
        };
        let starts = (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h)));
        let starts = starts.map(|(b, h)| start(b, h)).collect();
        Some(Rows { data: values.data, starts, stride, width })
    }

    /// What a head, counted over all batches, reads of a position.
    #[inline(always)]
    pub fn row(&self, head: usize, position: usize) -> &'a [S] {
        &self.data[self.starts[head] + position * self.stride..][..self.width]
    }
}
