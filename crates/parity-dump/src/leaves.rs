//! What a recording has beside the values of checkpoints: the inputs of each step, and the graphs.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::error::DumpError;
use crate::files::{TEXT_BYTES_MAX, read_text};
use crate::manifest::LEAF_PREFIX;
use crate::reader::Dump;

/// Where an input's bytes are.
#[derive(Clone, Debug)]
pub(crate) struct LeafPart {
    dtype: Dtype,
    shape: Vec<usize>,
    file: usize,
    offset: usize,
    bytes: usize,
}

/// An input of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaf<'d> {
    /// `F32`, `F16`, `BF16`, `I32` or `I64`.
    pub dtype: &'static str,
    /// Slowest axis first.
    pub shape: &'d [usize],
    /// Little-endian, C-contiguous.
    pub bytes: &'d [u8],
}

impl Dump {
    /// Takes a tensor that is an input of a step, in file and at offset `at`; whether it was one.
    pub(crate) fn take_leaf(
        &mut self,
        step: usize,
        name: &str,
        view: &TensorView<'_>,
        at: (usize, usize),
    ) -> bool {
        let Some(leaf) = name.strip_prefix(LEAF_PREFIX) else { return false };
        if leaf_dtype(view.dtype()).is_none() {
            return false;
        }
        let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().len());
        let part = LeafPart { dtype, shape, file: at.0, offset: at.1, bytes };
        self.leaves.insert((step, leaf.to_owned()), part);
        true
    }

    /// The inputs of a step by name, without [`LEAF_PREFIX`].
    pub fn leaves(&self, step: usize) -> impl Iterator<Item = (&str, Leaf<'_>)> {
        let of_step = self.leaves.range((step, String::new())..(step + 1, String::new()));
        of_step.map(|((_, name), part)| (name.as_str(), self.leaf_of(part)))
    }

    /// One input of a step.
    pub fn leaf(&self, step: usize, name: &str) -> Option<Leaf<'_>> {
        self.leaves.get(&(step, name.to_owned())).map(|part| self.leaf_of(part))
    }

    fn leaf_of<'d>(&'d self, part: &'d LeafPart) -> Leaf<'d> {
        let bytes = &self.files[part.file][part.offset..part.offset + part.bytes];
        Leaf { dtype: leaf_dtype(part.dtype).unwrap_or_default(), shape: &part.shape, bytes }
    }

    /// Index among the manifest's graphs of the one that computed a step.
    pub fn graph_of(&self, step: usize) -> Option<usize> {
        self.manifest.graphs.iter().position(|graph| graph.steps.contains(&step))
    }

    /// The text of one of the manifest's graphs.
    ///
    /// # Errors
    /// Where the file is missing, lies elsewhere, or is larger than any graph.
    pub fn graph_text(&self, index: usize) -> Result<String, DumpError> {
        let file = self.manifest.graphs.get(index).map_or("", |graph| &graph.file);
        let path = self.path.join(file);
        if file.is_empty() || file.contains(['/', '\\']) {
            return Err(DumpError::new(&self.path, "a graph lies outside the folder")
                .expected_found("a file name", format!("`{file}`")));
        }
        read_text(&path, TEXT_BYTES_MAX)
    }
}

/// The element types that inputs have.
fn leaf_dtype(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F32 => Some("F32"),
        Dtype::F16 => Some("F16"),
        Dtype::BF16 => Some("BF16"),
        Dtype::I32 => Some("I32"),
        Dtype::I64 => Some("I64"),
        _ => None,
    }
}
