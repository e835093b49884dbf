//! What a rule reads: tensors through their strides, weights decoded row by row, the words of the op.

use std::borrow::Cow;

use parity_graph::Params;

use crate::arithmetic::Arithmetic;
use crate::error::{Error, Result};
use crate::gguf::{DType, TensorRef};
use crate::scalar::Scalar;

/// Everything that an op is computed from.
pub struct Args<'a, S> {
    /// What errors call the node, e.g. `blk.3.ffn_moe_probs`.
    pub name: &'a str,
    /// The words of `op_params`.
    pub params: &'a Params,
    /// By slot; an empty slot may stand before a used one.
    pub sources: Vec<Option<Source<'a, S>>>,
    /// Extents of the result, slowest axis first.
    pub shape: [usize; 4],
    /// Element type of the result.
    pub dtype: DType,
    /// Which roundings of the producer are followed.
    pub arithmetic: &'a Arithmetic,
    /// Where only some tokens are looked at: which they are, and of how many. What a kernel does depends on a row's place.
    pub tokens: Option<(&'a [usize], usize)>,
}

/// One source.
#[derive(Clone)]
pub struct Source<'a, S> {
    /// The type that the producer holds it in. Values are given as numbers whatever it is: integers too.
    pub dtype: DType,
    /// Its values.
    pub data: Data<'a, S>,
}

/// The values of a source.
#[derive(Clone)]
pub enum Data<'a, S> {
    /// In memory.
    Values(Strided<'a, S>),
    /// A tensor of the model file, contiguous, decoded where it is read.
    Weight(TensorRef<'a>),
}

/// Numbers seen through strides.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, S> {
    /// The storage.
    pub data: &'a [S],
    /// Where element (0, 0, 0, 0) is.
    pub offset: usize,
    /// Extents, slowest axis first.
    pub shape: [usize; 4],
    /// Strides in elements, slowest axis first.
    pub strides: [usize; 4],
}

/// Strides of a tensor without gaps.
pub fn contiguous(shape: [usize; 4]) -> [usize; 4] {
    let [_, b, c, d] = shape;
    [b * c * d, c * d, d, 1]
}

impl<'a, S: Scalar> Strided<'a, S> {
    /// All of `data` in a shape without gaps.
    ///
    /// # Panics
    /// If the length is not that of the shape (a mistake in the caller, not in data).
    pub fn whole(data: &'a [S], shape: [usize; 4]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "values of the shape {shape:?}");
        Strided { data, offset: 0, shape, strides: contiguous(shape) }
    }

    /// Element (a, b, c, d).
    #[inline]
    pub fn at(&self, [a, b, c, d]: [usize; 4]) -> S {
        let [sa, sb, sc, sd] = self.strides;
        self.data[self.offset + a * sa + b * sb + c * sc + d * sd]
    }

    /// Row (a, b, c), borrowed where its elements lie side by side.
    pub fn row(&self, [a, b, c]: [usize; 3]) -> Cow<'a, [S]> {
        let start = self.offset + a * self.strides[0] + b * self.strides[1] + c * self.strides[2];
        let (n, stride) = (self.shape[3], self.strides[3]);
        if n == 0 {
            return Cow::Borrowed(&[]);
        }
        match stride {
            1 => Cow::Borrowed(&self.data[start..start + n]),
            _ => (0..n).map(|i| self.data[start + i * stride]).collect(),
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// All elements in logical order, slowest axis first.
    pub fn to_vec(&self) -> Vec<S> {
        let mut out = Vec::with_capacity(self.elements());
        for row in rows(self.shape) {
            out.extend_from_slice(&self.row(row));
        }
        out
    }
}

/// The rows of a shape in order.
pub fn rows([a, b, c, _]: [usize; 4]) -> impl Iterator<Item = [usize; 3]> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
}

impl<'a, S: Scalar> Source<'a, S> {
    /// Extents, slowest axis first.
    pub fn shape(&self) -> [usize; 4] {
        match &self.data {
            Data::Values(values) => values.shape,
            Data::Weight(weight) => {
                let mut shape = [1; 4];
                let given = &weight.info.shape;
                shape[4 - given.len()..].copy_from_slice(given);
                shape
            }
        }
    }

    /// All values in logical order; a weight is decoded.
    pub fn values(&self) -> Cow<'a, [S]> {
        match &self.data {
            Data::Values(v) if v.strides == contiguous(v.shape) => {
                Cow::Borrowed(&v.data[v.offset..v.offset + v.elements()])
            }
            Data::Values(values) => Cow::Owned(values.to_vec()),
            Data::Weight(weight) => Cow::Owned(weight.decode()),
        }
    }

    /// Element (a, b, c, d).
    pub fn at(&self, index: [usize; 4]) -> S {
        match &self.data {
            Data::Values(values) => values.at(index),
            Data::Weight(_) => self.row([index[0], index[1], index[2]])[index[3]],
        }
    }

    /// Row (a, b, c).
    pub fn row(&self, row: [usize; 3]) -> Cow<'a, [S]> {
        match &self.data {
            Data::Values(values) => values.row(row),
            Data::Weight(weight) => {
                let [_, b, c, d] = self.shape();
                let index = (row[0] * b + row[1]) * c + row[2];
                let mut out = vec![S::ZERO; d];
                weight.decode_rows(index..index + 1, &mut out);
                Cow::Owned(out)
            }
        }
    }
}

impl<'a, S: Scalar> Args<'a, S> {
    /// The source in a slot, if it is set.
    pub fn get(&self, slot: usize) -> Option<&Source<'a, S>> {
        self.sources.get(slot).and_then(Option::as_ref)
    }

    /// The source in a slot that must be set.
    ///
    /// # Errors
    /// Names the node and the slot.
    pub fn source(&self, slot: usize) -> Result<&Source<'a, S>> {
        self.get(slot).ok_or_else(|| {
            Error::new(self.name, format!("its source {slot} is missing"))
                .hint("is this graph text whole, and of a llama.cpp that parity knows?")
        })
    }

    /// The sources, with other values in place of their own in the slots that have any.
    pub fn replaced<'b>(
        &'b self,
        values: impl Fn(usize) -> Option<Strided<'b, S>>,
    ) -> Vec<Option<Source<'b, S>>> {
        let slots = self.sources.iter().enumerate();
        let sources = slots.map(|(slot, source)| {
            let source = source.as_ref()?;
            let data = values(slot).map_or_else(|| source.data.clone(), Data::Values);
            Some(Source { dtype: source.dtype, data })
        });
        sources.collect()
    }

    /// Number of elements of the result.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// An error for sources whose shapes do not fit the result's.
    pub fn misfit(&self, expected: impl Into<String>) -> Error {
        let shapes: Vec<String> =
            self.sources.iter().flatten().map(|source| format!("{:?}", source.shape())).collect();
        Error::new(self.name, "its sources do not have the shapes that the op needs")
            .expected(expected.into())
            .found(format!("{} for a result {:?}", shapes.join(", "), self.shape))
            .hint("is this graph text whole, and of a llama.cpp that parity knows?")
    }
}
