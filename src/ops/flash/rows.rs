//! Keys or values as they lie in memory: each row of them is met once for every query.

use std::sync::OnceLock;

use super::super::source::{Data, Source};
use crate::scalar::Scalar;

/// Rows of a source as a kernel reads them, made once for all that meet them; none where they are read as they are.
pub struct Converted<S> {
    rows: Vec<OnceLock<Vec<S>>>,
    /// (B·H) The row of the first position.
    starts: Vec<usize>,
}

impl<S: Scalar> Converted<S> {
    /// Of a source that so many batches and heads share.
    pub fn of(source: &Source<'_, S>, [batches, heads]: [usize; 2]) -> Self {
        let [own_batches, own_heads, positions, _] = source.shape();
        let start = |b: usize, h: usize| {
            (b / (batches / own_batches) * own_heads + h / (heads / own_heads)) * positions
        };
        let starts = (0..batches).flat_map(|b| (0..heads).map(move |h| start(b, h))).collect();
        let rows = own_batches * own_heads * positions;
        Converted { rows: (0..rows).map(|_| OnceLock::new()).collect(), starts }
    }

    /// Of one that is read as it is.
    pub fn none() -> Self {
        Converted { rows: Vec::new(), starts: Vec::new() }
    }

    pub fn is_none(&self) -> bool {
        self.rows.is_empty()
    }

    /// What a head, counted over all batches, reads of a position.
    #[inline(always)]
    pub fn row(&self, head: usize, position: usize, made: impl FnOnce() -> Vec<S>) -> &[S] {
        self.rows[self.starts[head] + position].get_or_init(made)
    }
}

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
