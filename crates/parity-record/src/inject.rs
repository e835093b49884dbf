//! A mistake made by a real llama.cpp: one node of its graph is computed differently, while the recorded graph stays
//! the healthy one. A test aid: it shows what parity says of such a mistake in any architecture.
//!
//! Everything happens around the one node, between the question whether its values are wanted and the answer that
//! they are computed: fields are changed before and put back after, since the program may use its graph again.
//! Sources are edited in a copy: weights lie in memory that must not be written. A device reads its own memory alone:
//! there they are edited where they lie, and put back.

use std::fmt;
use std::str::FromStr;

use parity_dump::Checkpoint;
use parity_graph::fault::{self, Fault};
use parity_graph::rewrite::{Change, Edit};
use parity_graph::{Graph, Id, Leaf, MAX_SRC, Op, label, params};

use crate::api::{RawTensor, text};
use crate::describe::{Described, Reader};
use crate::layout::TENSOR_BYTES;
use crate::values::Values;

/// Which mistake is wanted: `rope.base@blk.3.q_rope`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Name in the catalogue.
    pub fault: String,
    /// The checkpoint of the node.
    pub checkpoint: String,
    /// Which of the node's faults of that name, counted from 0: `rope.base#1@…`.
    pub variant: usize,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        let wrong = || format!("`{text}` is no mistake at a checkpoint, such as rope.base@blk.3.q_rope");
        let (fault, checkpoint) = text.split_once('@').ok_or_else(wrong)?;
        let (fault, variant) = match fault.split_once('#') {
            Some((fault, variant)) => (fault, variant.parse().map_err(|_| wrong())?),
            None => (fault, 0),
        };
        if fault.is_empty() || checkpoint.is_empty() {
            return Err(wrong());
        }
        Ok(Wanted { fault: fault.to_owned(), checkpoint: checkpoint.to_owned(), variant })
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wanted { fault, checkpoint, variant } = self;
        match variant {
            0 => write!(f, "{fault}@{checkpoint}"),
            variant => write!(f, "{fault}#{variant}@{checkpoint}"),
        }
    }
}

impl Wanted {
    /// The mistake at node `id`, if the node has a place for it.
    pub fn find(&self, graph: &Graph, id: Id) -> Option<Fault> {
        fault::at(graph, id).into_iter().filter(|fault| fault.name == self.fault).nth(self.variant)
    }
}

/// A mistake in a graph that is about to be computed.
pub struct Injection {
    /// The node that is computed wrongly.
    pub node: RawTensor,
    /// The node before it: what it reads must have been computed when it is asked about.
    before: Option<RawTensor>,
    fault: Fault,
    /// Addresses of the graph's tensors.
    address: Vec<RawTensor>,
    undo: Vec<(usize, Vec<u8>)>,
    copies: Vec<Copied>,
    /// Whether the node is computed in the memory of a device.
    on_device: bool,
    /// Sources that were edited where they lie, with what was there.
    edited: Vec<(RawTensor, Vec<u8>)>,
    passed: Option<Vec<f64>>,
    /// What is read instead of a source, where it is no weight.
    other: Option<Other>,
}

/// A tensor that the node does not read in the healthy graph: by the time when the node is computed its memory may
/// hold another one, so its values are kept as soon as there are any.
struct Other {
    tensor: RawTensor,
    /// Whether a node computes it.
    computed: bool,
    bytes: Option<Vec<u8>>,
}

// SAFETY: the addresses are only used by the thread that computes, between question and answer.
unsafe impl Send for Injection {}

/// Backends that compute in the memory of the host.
const HOSTS: [&str; 2] = ["CPU", "BLAS"];

/// A tensor whose values were edited in a copy.
struct Copied {
    _tensor: Box<[u8; TENSOR_BYTES]>,
    _data: Vec<u8>,
}

impl Injection {
    /// Prepares a mistake in the graph that these tensors make up.
    fn new(graph: &Graph, address: &[RawTensor], fault: Fault) -> Injection {
        let id = fault.rewrite.node;
        let other = match fault.rewrite.change {
            Change::Source { with: Some(id), .. } if graph.leaf(id) != Some(Leaf::Weight) => {
                Some(Other { tensor: address[id], computed: !graph.is_leaf(id), bytes: None })
            }
            _ => None,
        };
        let on_device = graph.get(id).backend.as_deref().is_some_and(|name| !HOSTS.contains(&name));
        Injection {
            other,
            on_device,
            edited: Vec::new(),
            node: address[id],
            before: id.checked_sub(1).map(|before| address[before]),
            address: address.to_vec(),
            fault,
            undo: Vec::new(),
            copies: Vec::new(),
            passed: None,
        }
    }

    /// The mistake that is wanted, prepared in a graph; `None` where no node of it has a place for it.
    pub fn find(wanted: &Wanted, described: &Described) -> Option<Injection> {
        let graph = &described.graph;
        let is_node =
            |label: &Option<Checkpoint>| label.is_some_and(|id| id.to_string() == wanted.checkpoint);
        let id = label::labels(graph).iter().position(is_node)?;
        Some(Injection::new(graph, &described.address, wanted.find(graph, id)?))
    }

    /// Whether a node that is about to be computed has to be computed apart for the mistake; makes it where it is
    /// the node.
    ///
    /// # Errors
    /// As [`Injection::make`].
    ///
    /// # Safety
    /// As for [`Injection::make`].
    pub unsafe fn asked(&mut self, reader: Reader<'_>, tensor: RawTensor) -> Result<bool, String> {
        // What the program fills in is there before anything is computed.
        // SAFETY: by the caller's promise.
        unsafe { self.keep(reader, false)? };
        if self.node == tensor {
            // SAFETY: by the caller's promise; what the node reads has been computed.
            unsafe { self.make(reader)? };
        }
        let other = self.other.as_ref().is_some_and(|other| other.tensor == tensor);
        Ok(self.node == tensor || self.before == Some(tensor) || other)
    }

    /// Takes note of a node that has just been computed.
    ///
    /// # Errors
    /// As [`Injection::finish`].
    ///
    /// # Safety
    /// As for [`Injection::make`].
    pub unsafe fn computed(&mut self, reader: Reader<'_>, tensor: RawTensor) -> Result<(), String> {
        // SAFETY: by the caller's promise.
        unsafe {
            if self.other.as_ref().is_some_and(|other| other.tensor == tensor) {
                self.keep(reader, true)?;
            }
            if self.node == tensor { self.finish(reader) } else { Ok(()) }
        }
    }

    /// Keeps the values of what is read instead of a source; `computed` says whether a node has just computed them.
    unsafe fn keep(&mut self, reader: Reader<'_>, computed: bool) -> Result<(), String> {
        let Some(other) = self.other.as_mut().filter(|other| other.computed == computed) else {
            return Ok(());
        };
        if other.bytes.is_none() {
            // SAFETY: by the caller's promise.
            other.bytes = Some(unsafe { Values::read(reader, other.tensor)? }.bytes);
        }
        Ok(())
    }

    /// What is injected, in a sentence.
    pub fn text(&self) -> &str {
        &self.fault.text
    }

    /// Makes the mistake: the node is about to be computed, and its sources are.
    ///
    /// # Errors
    /// Why this llama.cpp cannot be made to make it.
    ///
    /// # Safety
    /// The tensors are alive, with their data set.
    unsafe fn make(&mut self, reader: Reader<'_>) -> Result<(), String> {
        let layout = reader.layout;
        match self.fault.rewrite.change.clone() {
            // SAFETY: by the caller's promise the tensor is alive; it is itself in memory of the host.
            Change::Words(words) => unsafe { self.words(reader, &words) },
            // SAFETY: as above.
            Change::Op(op, words) => unsafe {
                let number =
                    number_of(reader, &op).ok_or_else(|| format!("this llama.cpp has no op {op}"))?;
                self.put(layout.op, &number.to_ne_bytes());
                self.words(reader, &words);
            },
            // SAFETY: by the caller's promise; the slot is one of the ten that a tensor has.
            Change::Source { slot, .. } if let Some(other) = self.other.take() => unsafe {
                let bytes = other.bytes.ok_or("what it reads instead was not computed before it")?;
                self.lead(reader, slot, other.tensor, bytes)?;
            },
            // SAFETY: as above; the slot is one of the ten that a tensor has.
            Change::Source { slot, with } => unsafe {
                let other = with.map_or(std::ptr::null_mut(), |id| self.address[id]);
                self.put(layout.src + slot * size_of::<RawTensor>(), &(other as usize).to_ne_bytes());
            },
            // SAFETY: as above.
            Change::Exchange(a, b) => unsafe {
                let (first, second) = (reader.source_in(self.node, a), reader.source_in(self.node, b));
                self.put(layout.src + a * size_of::<RawTensor>(), &(second as usize).to_ne_bytes());
                self.put(layout.src + b * size_of::<RawTensor>(), &(first as usize).to_ne_bytes());
            },
            // SAFETY: as above.
            Change::SourceEdit { slot, edit } => unsafe { self.edit_source(reader, slot, edit)? },
            // SAFETY: as above.
            Change::Bypass { slot } => unsafe {
                let values = Values::read(reader, reader.source_in(self.node, slot))?;
                self.passed = Some(values.numbers()?);
            },
            Change::ResultEdit(_) => {}
        }
        Ok(())
    }

    /// Finishes the mistake: the node has just been computed. Puts back what was changed.
    ///
    /// # Errors
    /// Why the values could not be written.
    ///
    /// # Safety
    /// As for [`Injection::make`].
    unsafe fn finish(&mut self, reader: Reader<'_>) -> Result<(), String> {
        for (offset, bytes) in self.undo.drain(..).rev() {
            // SAFETY: bytes that were read from there.
            unsafe {
                self.node.cast::<u8>().add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
            };
        }
        self.copies.clear();
        for (source, bytes) in self.edited.drain(..) {
            // SAFETY: bytes that were read from there.
            unsafe { (reader.api.tensor_set)(source, bytes.as_ptr().cast(), 0, bytes.len()) };
        }
        let edit = match (&self.fault.rewrite.change, self.passed.take()) {
            (_, Some(passed)) => Some(passed),
            (Change::ResultEdit(edit), None) => {
                // SAFETY: by the caller's promise.
                let values = unsafe { Values::read(reader, self.node)? };
                let mut numbers = values.numbers()?;
                edit.apply(values.ne[0], &mut numbers);
                Some(numbers)
            }
            _ => None,
        };
        let Some(numbers) = edit else { return Ok(()) };
        // SAFETY: by the caller's promise.
        unsafe {
            let mut values = Values::read(reader, self.node)?;
            values.set(&numbers)?;
            (reader.api.tensor_set)(self.node, values.bytes.as_ptr().cast(), 0, values.bytes.len());
        }
        Ok(())
    }

    unsafe fn words(&mut self, reader: Reader<'_>, words: &[(usize, u32)]) {
        for &(word, bits) in words.iter().filter(|(word, _)| *word < params::WORDS) {
            // SAFETY: a field of the node.
            unsafe { self.put(reader.layout.op_params + 4 * word, &bits.to_ne_bytes()) };
        }
    }

    /// Writes bytes of the node, and notes what was there.
    unsafe fn put(&mut self, offset: usize, bytes: &[u8]) {
        // SAFETY: a field of a live tensor.
        unsafe {
            let place = self.node.cast::<u8>().add(offset);
            self.undo.push((offset, std::slice::from_raw_parts(place, bytes.len()).to_vec()));
            place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Lets the node read an edited copy of a source.
    unsafe fn edit_source(&mut self, reader: Reader<'_>, slot: usize, edit: Edit) -> Result<(), String> {
        // SAFETY: by the caller's promise.
        unsafe {
            let source = reader.source_in(self.node, slot);
            let mut values = Values::read(reader, source)?;
            let mut numbers = values.numbers()?;
            edit.apply(values.ne[0], &mut numbers);
            values.set(&numbers)?;
            self.lead(reader, slot, source, values.bytes)
        }
    }

    /// Lets the node read a tensor like `like` with other bytes.
    unsafe fn lead(
        &mut self,
        reader: Reader<'_>,
        slot: usize,
        like: RawTensor,
        bytes: Vec<u8>,
    ) -> Result<(), String> {
        if self.on_device {
            // SAFETY: by the caller's promise.
            return unsafe { self.edit_in_place(reader, slot, &bytes) };
        }
        // SAFETY: a live tensor is copied, whose data are replaced by as many bytes, which live as long.
        unsafe {
            let mut copy = Box::new([0u8; TENSOR_BYTES]);
            copy.as_mut_ptr().copy_from_nonoverlapping(like.cast::<u8>(), TENSOR_BYTES);
            let data = bytes.as_ptr() as usize;
            copy[reader.layout.data..reader.layout.data + 8].copy_from_slice(&data.to_ne_bytes());
            let address = copy.as_ptr() as usize;
            self.copies.push(Copied { _tensor: copy, _data: bytes });
            self.put(reader.layout.src + slot * size_of::<RawTensor>(), &address.to_ne_bytes());
        }
        Ok(())
    }

    /// Writes bytes into the memory of a source, and notes what was there.
    unsafe fn edit_in_place(&mut self, reader: Reader<'_>, slot: usize, bytes: &[u8]) -> Result<(), String> {
        // SAFETY: by the caller's promise the node's sources are alive, with their data set.
        unsafe {
            let source = reader.source_in(self.node, slot);
            let values = Values::read(reader, source)?;
            if values.bytes.len() != bytes.len() {
                return Err("what it reads instead is of another size, and lies on a device".to_owned());
            }
            let data = (reader.api.get_data)(source);
            let others =
                (0..MAX_SRC).filter(|&other| other != slot).map(|other| reader.source_in(self.node, other));
            if others.into_iter().any(|other| !other.is_null() && (reader.api.get_data)(other) == data) {
                return Err("it reads one tensor twice, which lies on a device".to_owned());
            }
            (reader.api.tensor_set)(source, bytes.as_ptr().cast(), 0, bytes.len());
            // A node that is computed in place leaves nothing of its source to be put back.
            if (reader.api.get_data)(self.node) != data {
                self.edited.push((source, values.bytes));
            }
        }
        Ok(())
    }
}

/// ggml's number of an op in the loaded library; unary and gated functions are told by a word of theirs.
///
/// # Safety
/// `reader` is of a loaded library.
unsafe fn number_of(reader: Reader<'_>, op: &Op) -> Option<i32> {
    /// The last op of ggml's table, which must not be read beyond its end.
    const LAST: &str = "GLU";
    // Releases that tell their version have that op: since July 2025.
    reader.api.version?;
    let is = |family: &str| params::fields(op).iter().any(|field| field.name == family);
    let name = if is("unary") {
        "UNARY"
    } else if is("glu") {
        "GLU"
    } else {
        op.name()
    };
    for number in 0.. {
        // SAFETY: ggml's names of its ops, not beyond the last.
        let known = unsafe { text((reader.api.op_name)(number)) }?;
        if known == name {
            return Some(number);
        }
        if known == LAST {
            break;
        }
    }
    None
}
