//! Products of queries and keys, computed once for all that is tried on an attention without touching either.

use rayon::prelude::*;

use super::super::Args;
use super::row::Attention;
use crate::error::Result;
use crate::scalar::Scalar;

/// Of every query with every cached position, masked or not.
pub struct KeyProducts {
    /// (B·H·N, M)
    values: Vec<f64>,
    positions: usize,
}

impl KeyProducts {
    /// Of an attention; `None` where what is told of its scores goes into queries or keys.
    ///
    /// # Errors
    /// Sources whose shapes do not fit.
    pub fn of<S: Scalar>(args: &Args<'_, S>) -> Result<Option<KeyProducts>> {
        let attention = Attention::new(args)?;
        if attention.scales_before() {
            return Ok(None);
        }
        let ([_, heads, n], positions) = (attention.shape, attention.k.shape()[2]);
        let mut values = vec![0.0; attention.q.rows * positions];
        values.par_chunks_mut(positions.max(1)).enumerate().for_each(|(query, products)| {
            let at = [query / n / heads, query / n % heads, query % n];
            products.iter_mut().enumerate().for_each(|(m, product)| *product = attention.product(at, m));
        });
        Ok(Some(KeyProducts { values, positions }))
    }

    /// (M,) Those of a query.
    pub fn row(&self, query: usize) -> &[f64] {
        &self.values[query * self.positions..][..self.positions]
    }
}
