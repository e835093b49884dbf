//! The weights in device memory: matrices as they are stored, vectors in f32.

use std::collections::HashMap;

use super::calls::{Address, Weight, block_bytes, on_device};
use super::device::{Buffer, Device};
use crate::engine::fused::graph::{Graph, Node, Op};
use crate::error::Result;
use crate::gguf::Gguf;

/// Alignment of every tensor; vector loads need 16.
const ALIGNMENT: usize = 256;

/// The weights of one graph.
pub struct Weights {
    _memory: Buffer,
    matrices: HashMap<String, Weight>,
    /// Address and length.
    vectors: HashMap<String, (Address, usize)>,
}

/// What of a node is uploaded, if the GPU can read it: `true` for a matrix.
fn uploaded(node: &Node) -> Option<(&str, bool)> {
    let (weight, is_matrix) = match &node.op {
        Op::Embed { table } => (table, true),
        Op::Linear { weight, .. } => (weight, true),
        Op::Norm(norm) => (&norm.weight, false),
        Op::Bias { bias: Some(bias), .. } => (bias, false),
        _ => return None,
    };
    Some((weight, is_matrix))
}

impl Weights {
    /// Uploads what the nodes of `graph` read.
    pub fn upload(device: &Device, gguf: &Gguf, graph: &Graph) -> Result<Weights> {
        let mut wanted: Vec<(&str, bool)> = graph.nodes.iter().filter_map(uploaded).collect();
        wanted.sort_unstable();
        wanted.dedup();

        let mut bytes = 0;
        for (weight, is_matrix) in &wanted {
            let weight = gguf.weight(weight)?;
            let (stored, dtype) = (weight.bytes.len(), weight.info.dtype);
            let size = if *is_matrix {
                stored / dtype.block_bytes() * block_bytes(dtype)
            } else {
                4 * weight.cols() * weight.rows()
            };
            bytes += size.next_multiple_of(ALIGNMENT);
        }
        let memory = device.alloc("the weights", bytes)?;
        device.clear(&memory)?; // kernels read whole words, beyond the last bytes of a tensor
        let (mut matrices, mut vectors) = (HashMap::new(), HashMap::new());
        let mut address = memory.address;
        for (name, is_matrix) in wanted {
            let weight = gguf.weight(name)?;
            let size = if is_matrix {
                let blocks = on_device(weight.bytes, weight.info.dtype);
                device.upload(&blocks, address)?;
                let (dtype, outputs, columns) = (weight.info.dtype, weight.rows(), weight.cols());
                matrices.insert(name.to_owned(), Weight { address, dtype, outputs, columns });
                blocks.len()
            } else {
                let values: Vec<f32> = weight.decode();
                device.upload(&values, address)?;
                vectors.insert(name.to_owned(), (address, values.len()));
                4 * values.len()
            };
            address += size.next_multiple_of(ALIGNMENT) as Address;
        }
        device.synchronize()?;
        Ok(Weights { _memory: memory, matrices, vectors })
    }

    /// A matrix that kernels can read: as stored, rows of a multiple of 8.
    pub fn matrix(&self, weight: &str) -> Option<Weight> {
        let matrix = *self.matrices.get(weight)?;
        (matrix.columns % 8 == 0).then_some(matrix)
    }

    /// A vector of `len` values.
    pub fn vector(&self, weight: &str, len: usize) -> Option<Address> {
        let (address, found) = *self.vectors.get(weight)?;
        (found == len).then_some(address)
    }
}
