//! Arrays of other people's files: where they lie, seen through offset and strides, without a copy.

use std::sync::Arc;

use memmap2::Mmap;
use parity_dump::Element;

use crate::error::{Error, Result};

/// Element types that arrays of other engines have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// What a dump has as well.
    Float(Element),
    /// IEEE binary64: becomes f32, which parity judges by.
    F64,
    /// Signed, of so many bytes.
    Int(usize),
    /// Unsigned, of so many bytes; truth values have one.
    Uint(usize),
}

impl Type {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Type::Float(element) => element.size(),
            Type::F64 => size_of::<f64>(),
            Type::Int(size) | Type::Uint(size) => size,
        }
    }

    /// Whether it counts.
    pub fn is_integer(self) -> bool {
        matches!(self, Type::Int(_) | Type::Uint(_))
    }

    /// Its type in a dump.
    pub fn element(self) -> Element {
        match self {
            Type::Float(element) => element,
            _ => Element::F32,
        }
    }
}

/// Bytes of a file, or of what was unpacked or computed.
#[derive(Clone)]
pub enum Bytes {
    /// A file, or a part of an archive that was written to one.
    Mapped(Arc<Mmap>),
    /// Computed here.
    Owned(Arc<Vec<u8>>),
}

impl Bytes {
    /// All of them.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// One array.
#[derive(Clone)]
pub struct Array {
    /// What the producer calls it.
    pub name: String,
    /// Of its elements.
    pub dtype: Type,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// In elements, one for each axis.
    pub strides: Vec<usize>,
    /// Byte of element (0, 0, …).
    offset: usize,
    bytes: Bytes,
}

impl Array {
    /// An array of `shape` from byte `offset` of `bytes`, in C order where no strides (in elements) are given.
    ///
    /// # Errors
    /// Elements beyond the bytes.
    pub fn new(
        name: &str,
        dtype: Type,
        shape: Vec<usize>,
        strides: Option<Vec<usize>>,
        offset: usize,
        bytes: Bytes,
    ) -> Result<Array> {
        let wrong = |what: &str| {
            Error::new(name, what)
                .expected(format!(
                    "an array that lies within the {} bytes of its data",
                    bytes.as_slice().len()
                ))
                .found(format!("shape {shape:?} from byte {offset}"))
                .hint("the file is damaged, or was not written to its end: save it again")
        };
        let beyond = || wrong("reaches beyond its data");
        let count = shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent)).ok_or_else(beyond)?;
        let strides = match strides {
            Some(strides) if strides.len() == shape.len() => strides,
            Some(_) => return Err(wrong("has another number of strides than of axes")),
            None => c_order(&shape),
        };
        if count > 0 {
            let reach = |(extent, stride): (&usize, &usize)| (extent - 1).checked_mul(*stride);
            let last = shape.iter().zip(&strides).try_fold(0usize, |at, axis| at.checked_add(reach(axis)?));
            let end =
                last.and_then(|last| last.checked_add(1)?.checked_mul(dtype.size())?.checked_add(offset));
            if !end.is_some_and(|end| end <= bytes.as_slice().len()) {
                return Err(beyond());
            }
            // What is expanded takes no room in its file, and as much as it likes when it is written out.
            if count.saturating_mul(dtype.size()) > bytes.as_slice().len() {
                return Err(wrong("is expanded: it has more elements than data")
                    .hint("save a copy of its own: x.contiguous().clone()"));
            }
        }
        Ok(Array { name: name.to_owned(), dtype, shape, strides, offset, bytes })
    }

    /// Values that were computed here, in C order.
    ///
    /// # Errors
    /// Another number of values than the shape has.
    pub fn of_values(name: &str, shape: Vec<usize>, values: &[f32]) -> Result<Array> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = Bytes::Owned(Arc::new(bytes));
        Array::new(name, Type::Float(Element::F32), shape, None, 0, bytes)
    }

    /// The same under another name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Array {
        Array { name: name.into(), ..self }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The axes in another order: axis i of the result is axis `order[i]`, as numpy's `transpose` has it.
    ///
    /// # Errors
    /// An order that does not name each axis once.
    pub fn permuted(mut self, order: &[usize]) -> Result<Array> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..self.shape.len()) {
            return Err(Error::new(&self.name, "these axes cannot be put into that order")
                .expected(format!("each of the axes 0 to {} once", self.shape.len().saturating_sub(1)))
                .found(format!("{order:?} for shape {:?}", self.shape)));
        }
        self.strides = order.iter().map(|&axis| self.strides[axis]).collect();
        self.shape = order.iter().map(|&axis| self.shape[axis]).collect();
        Ok(self)
    }

    /// Without an axis: what stands at `index` of it.
    #[must_use]
    pub fn at(mut self, axis: usize, index: usize) -> Array {
        self.shape.remove(axis);
        self.offset += index * self.strides.remove(axis) * self.dtype.size();
        self
    }

    /// Part of an axis: `count` elements from `first`, each `step`-th.
    ///
    /// # Errors
    /// Elements that the axis does not have.
    pub fn part(mut self, axis: usize, first: usize, count: usize, step: usize) -> Result<Array> {
        let extent = self.shape.get(axis).copied().unwrap_or(0);
        let last = count.checked_sub(1).and_then(|n| n.checked_mul(step)?.checked_add(first));
        if !last.is_some_and(|last| last < extent) {
            return Err(Error::new(&self.name, "has fewer columns than are taken of it")
                .expected(format!("at least {}", last.map_or(first, |last| last.saturating_add(1))))
                .found(format!("shape {:?}", self.shape)));
        }
        self.offset += first * self.strides[axis] * self.dtype.size();
        self.shape[axis] = count;
        self.strides[axis] *= step;
        Ok(self)
    }

    /// Each element's bytes in C order.
    fn each(&self, mut take: impl FnMut(&[u8])) {
        if self.is_empty() {
            return;
        }
        let (size, bytes) = (self.dtype.size(), self.bytes.as_slice());
        let mut index = vec![0usize; self.shape.len()];
        let inner = self.shape.last().copied().unwrap_or(1);
        let stride = self.strides.last().copied().unwrap_or(1) * size;
        loop {
            let outer = index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum::<usize>();
            let start = self.offset + outer * size;
            if stride == size {
                bytes[start..start + inner * size].chunks_exact(size).for_each(&mut take);
            } else {
                (0..inner).for_each(|i| take(&bytes[start + i * stride..start + i * stride + size]));
            }
            let Some(axis) =
                (0..index.len().saturating_sub(1)).rev().find(|&axis| index[axis] + 1 < self.shape[axis])
            else {
                return;
            };
            index[axis] += 1;
            index[axis + 1..].fill(0);
        }
    }

    /// The values in C order as f32.
    pub fn values(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.len());
        match self.dtype {
            Type::Float(element) => self.each(|bytes| {
                let mut value = [0.0];
                element.decode(bytes, &mut value);
                out.push(value[0]);
            }),
            Type::F64 => self.each(|b| out.push(f64::from_le_bytes(b.try_into().unwrap_or_default()) as f32)),
            Type::Int(_) | Type::Uint(_) => self.each(|bytes| out.push(integer(self.dtype, bytes) as f32)),
        }
        out
    }

    /// The elements in C order as a dump has them, and their type there.
    pub fn to_dump(&self) -> (Element, Vec<u8>) {
        let element = self.dtype.element();
        let mut out = Vec::with_capacity(self.len() * element.size());
        match self.dtype {
            Type::Float(_) => self.each(|bytes| out.extend_from_slice(bytes)),
            _ => out.extend(self.values().into_iter().flat_map(f32::to_le_bytes)),
        }
        (element, out)
    }

    /// The integers in C order; `None` where it has other numbers.
    pub fn integers(&self) -> Option<Vec<i64>> {
        let mut out = Vec::new();
        self.dtype.is_integer().then(|| self.each(|bytes| out.push(integer(self.dtype, bytes))))?;
        Some(out)
    }
}

/// Strides of an array whose last axis is the fastest.
pub fn c_order(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
    }
    strides
}

fn integer(dtype: Type, bytes: &[u8]) -> i64 {
    let negative = matches!(dtype, Type::Int(_)) && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut wide = [if negative { 0xff } else { 0 }; size_of::<i64>()];
    for (to, byte) in wide.iter_mut().zip(bytes) {
        *to = *byte;
    }
    i64::from_le_bytes(wide)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(shape: &[usize]) -> Array {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
        Array::of_values("x", shape.to_vec(), &values).unwrap()
    }

    #[test]
    fn axes_are_moved_and_parts_taken_without_a_copy() {
        let turned = counting(&[2, 3]).permuted(&[1, 0]).unwrap();
        assert_eq!(turned.values(), [0., 3., 1., 4., 2., 5.]);
        let odd = counting(&[2, 4]).part(1, 1, 2, 2).unwrap();
        assert_eq!(odd.values(), [1., 3., 5., 7.]);
        assert_eq!(counting(&[2, 3, 2]).at(1, 2).values(), [4., 5., 10., 11.]);
        assert!(counting(&[2, 4]).part(1, 1, 3, 2).is_err());
        assert!(counting(&[2, 4]).permuted(&[1, 1]).is_err());
    }

    #[test]
    fn what_reaches_beyond_its_data_is_no_array() {
        let bytes = Bytes::Owned(Arc::new(vec![0; 16]));
        let array = |shape: &[usize], strides: &[usize], offset| {
            let strides = Some(strides.to_vec());
            Array::new("x", Type::Float(Element::F32), shape.to_vec(), strides, offset, bytes.clone()).is_ok()
        };
        assert!(array(&[2, 2], &[2, 1], 0) && array(&[2, 2], &[1, 2], 0) && array(&[0, 9], &[1, 1], 99));
        assert!(!array(&[2, 2], &[2, 1], 4) && !array(&[5], &[1], 0) && !array(&[2, 2], &[1], 0));
        assert!(!array(&[usize::MAX, 2], &[1, 1], 0) && !array(&[2], &[usize::MAX], 0));
        assert!(!array(&[9], &[0], 0), "expanded");
    }

    #[test]
    fn integers_keep_their_sign() {
        let bytes = Bytes::Owned(Arc::new(vec![0xff, 0xff, 5, 0]));
        let of = |dtype| Array::new("x", dtype, vec![2], None, 0, bytes.clone()).unwrap().integers().unwrap();
        assert_eq!(of(Type::Int(2)), [-1, 5]);
        assert_eq!(of(Type::Uint(2)), [65535, 5]);
    }
}
