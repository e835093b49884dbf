//! Where the values of a checkpoint lie within the tensor that computes them.
//!
//! The one place where ggml's reversed extents are turned round: everything that leaves it has the
//! slowest axis first.

use parity_graph::{Graph, Id, Tensor};

/// Strided values within the storage of one computed node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The node whose bytes these are.
    pub storage: Id,
    /// Byte offset of the first element.
    pub offset: usize,
    /// Extents, slowest axis first, without trailing axes of extent 1.
    pub extents: Vec<usize>,
    /// Strides in bytes, one for each extent.
    pub strides: Vec<usize>,
}

/// Values without gaps in somebody's memory: the program's, or a card's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Address of the first one.
    pub address: usize,
    /// How many.
    pub bytes: usize,
}

impl Region {
    /// The whole of tensor `id`, which may be a view into the node that computes it; `None` where the
    /// graph is inconsistent.
    pub fn of(graph: &Graph, id: Id) -> Option<Region> {
        let storage = graph.storage(id);
        let (tensor, base) = (graph.get(id), graph.get(storage));
        let start = |tensor: &Tensor| tensor.view.map_or(0, |view| view.offset);
        let offset = start(tensor).checked_sub(start(base))?;
        let rank = tensor.ne.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1).max(2);
        let extents = tensor.ne[..rank].iter().rev().copied().collect();
        let strides = tensor.nb[..rank].iter().rev().copied().collect();
        Some(Region { storage, offset, extents, strides })
    }

    /// Tensor `id` as token rows: axis `axis` of [`Tensor::shape`] first, then the others in order, without leading
    /// ones. Without an axis all elements in order, as one row.
    pub fn rows(graph: &Graph, id: Id, axis: Option<usize>) -> Option<Region> {
        let mut region = Region::of(graph, id)?;
        let tensor = graph.get(id);
        let (shape, [a, b, c, d]) = (tensor.shape(), tensor.nb);
        let strides = [d, c, b, a];
        let mut inner: Vec<usize> = (0..4).filter(|other| Some(*other) != axis).collect();
        let leading = inner.iter().take_while(|&&axis| shape[axis] == 1).count().min(inner.len() - 1);
        inner.drain(..leading);
        let all = || axis.into_iter().chain(inner.iter().copied());
        region.extents = all().map(|axis| shape[axis]).collect();
        region.strides = all().map(|axis| strides[axis]).collect();
        Some(region)
    }

    /// The same place in another node of the same layout: the product before its bias.
    #[must_use]
    pub fn within(mut self, storage: Id) -> Region {
        self.storage = storage;
        self
    }

    /// Offset and number of its bytes, of `element` bytes each, where it has no gaps.
    pub fn without_gaps(&self, element: usize) -> Option<(usize, usize)> {
        is_contiguous(&self.extents, &self.strides, element).then(|| (self.offset, self.elements() * element))
    }

    /// How many elements there are.
    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    /// Reads all bytes in order, `element` bytes each, in pieces of at most about `limit` bytes.
    ///
    /// `read` fills its buffer from a byte offset in the storage; `write` takes the pieces.
    pub fn copy(
        &self,
        element: usize,
        limit: usize,
        read: &mut dyn FnMut(usize, &mut [u8]),
        write: &mut Sink<'_>,
    ) {
        if self.elements() > 0 {
            let mut scratch = Vec::new();
            copy_axis(&self.extents, &self.strides, self.offset, element, limit, &mut scratch, read, write);
        }
    }
}

/// Takes a piece: what fills a buffer with it, and its bytes.
type Sink<'a> = dyn FnMut(&mut dyn FnMut(&mut [u8]), usize) + 'a;

/// Bytes from the first to behind the last element of strided values.
fn span(extents: &[usize], strides: &[usize], element: usize) -> usize {
    extents.iter().zip(strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>() + element
}

fn is_contiguous(extents: &[usize], strides: &[usize], element: usize) -> bool {
    let mut expected = element;
    extents.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = n == 1 || stride == expected;
        expected *= n;
        fits
    })
}

#[expect(clippy::too_many_arguments, reason = "a recursion over axes with two callbacks")]
fn copy_axis(
    extents: &[usize],
    strides: &[usize],
    offset: usize,
    element: usize,
    limit: usize,
    scratch: &mut Vec<u8>,
    read: &mut dyn FnMut(usize, &mut [u8]),
    write: &mut Sink<'_>,
) {
    let count: usize = extents.iter().product();
    let span_bytes = span(extents, strides, element);
    if span_bytes <= limit || extents.len() == 1 && extents[0] == 1 {
        if is_contiguous(extents, strides, element) {
            write(&mut |out| read(offset, out), count * element);
        } else {
            scratch.resize(span_bytes, 0);
            read(offset, scratch);
            write(&mut |out| gather(extents, strides, element, scratch, out), count * element);
        }
        return;
    }
    // Too much for one piece: as many slices of the slowest axis as fit, or one after another.
    let (inner, inner_strides) = (&extents[1..], &strides[1..]);
    let slice = if inner.is_empty() { element } else { span(inner, inner_strides, element) };
    let together = (limit.saturating_sub(slice) / strides[0].max(1) + 1).min(extents[0]);
    let mut first = 0;
    while first < extents[0] {
        let n = together.min(extents[0] - first);
        let start = offset + first * strides[0];
        if n == 1 && !inner.is_empty() {
            copy_axis(inner, inner_strides, start, element, limit, scratch, read, write);
        } else {
            let mut part = extents.to_vec();
            part[0] = n;
            copy_axis(&part, strides, start, element, limit.max(slice), scratch, read, write);
        }
        first += n;
    }
}

/// Copies strided values of `span` into `out`, slowest axis first.
fn gather(extents: &[usize], strides: &[usize], element: usize, span: &[u8], out: &mut [u8]) {
    // The longest run of fastest axes that lie together is copied at once.
    let mut run = element;
    let mut outer = extents.len();
    while outer > 0 && (strides[outer - 1] == run || extents[outer - 1] == 1) {
        outer -= 1;
        run *= extents[outer];
    }
    let mut index = vec![0usize; outer];
    for piece in out.chunks_exact_mut(run) {
        let start: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        piece.copy_from_slice(&span[start..start + run]);
        for axis in (0..outer).rev() {
            index[axis] += 1;
            if index[axis] < extents[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(region: &Region, storage: &[u8], limit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut longest = 0;
        region.copy(
            1,
            limit,
            &mut |offset, out| {
                longest = longest.max(out.len());
                out.copy_from_slice(&storage[offset..offset + out.len()]);
            },
            &mut |fill, n| {
                let start = bytes.len();
                bytes.resize(start + n, 0);
                fill(&mut bytes[start..]);
            },
        );
        assert!(longest <= limit.max(1), "read {longest} bytes at once, {limit} allowed");
        bytes
    }

    fn naive(region: &Region, storage: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let n = region.elements();
        for flat in 0..n {
            let (mut rest, mut at) = (flat, region.offset);
            for axis in (0..region.extents.len()).rev() {
                at += rest % region.extents[axis] * region.strides[axis];
                rest /= region.extents[axis];
            }
            bytes.push(storage[at]);
        }
        bytes
    }

    #[test]
    fn every_limit_copies_the_same_bytes() {
        let storage: Vec<u8> = (0..=255).collect();
        for (extents, strides) in [
            (vec![3, 4, 5], vec![20, 5, 1]),
            (vec![3, 4, 5], vec![60, 10, 1]),
            (vec![4, 3, 5], vec![5, 20, 1]),
            (vec![5, 3], vec![1, 7]),
            (vec![1, 1], vec![9, 1]),
            (vec![7], vec![3]),
        ] {
            let region = Region { storage: 0, offset: 11, extents, strides };
            for limit in [1, 2, 3, 5, 8, 13, 21, 34, 55, 1000] {
                assert_eq!(copied(&region, &storage, limit), naive(&region, &storage), "{region:?} {limit}");
            }
        }
    }

    #[test]
    fn nothing_is_read_of_an_empty_region() {
        let region = Region { storage: 0, offset: 0, extents: vec![0, 4], strides: vec![4, 1] };
        assert!(copied(&region, &[], 10).is_empty());
    }
}
