//! A mistake made by a real llama.cpp: one node of its graph is computed differently, while the recorded graph stays
//! the healthy one. A test aid: it shows what parity says of such a mistake in any architecture.
//!
//! Everything happens around the one node, between the question whether its values are wanted and the answer that
//! they are computed: fields are changed before and put back after, since the program may use its graph again.
//! Sources are edited in a copy: weights lie in memory that must not be written. A device reads its own memory alone:
//! there they are edited where they lie, and put back.

use std::ops::Range;

use parity_graph::edit::unwritten;
use parity_graph::fault::{Fault, Scene, Wanted};
use parity_graph::rewrite::{Change, Edit};
use parity_graph::{Graph, Id, Leaf, MAX_SRC, Op, label, params};

use crate::api::{RawTensor, text};
use crate::describe::{Described, Reader};
use crate::layout::TENSOR_BYTES;
use crate::values::Values;

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
    /// What the result becomes, and in which columns of rows of so many elements.
    passed: Option<(Vec<f64>, Option<Part>)>,
    /// What is read besides the sources, where it is no weight.
    others: Vec<Other>,
}

/// Elements of a row, and some of its columns.
type Part = (usize, Range<usize>);

/// A tensor that the node does not read in the healthy graph: by the time when the node is computed its memory may
/// hold another one, so its values are kept as soon as there are any.
struct Other {
    id: Id,
    tensor: RawTensor,
    /// Whether a node computes it.
    computed: bool,
    bytes: Option<Vec<u8>>,
}

// SAFETY: the addresses are only used by the thread that computes, between question and answer.
unsafe impl Send for Injection {}

/// Backends that compute in the memory of the host.
const HOSTS: [&str; 2] = ["CPU", "BLAS"];

/// Why a change cannot be made in llama.cpp's own graph, where it cannot.
fn refusal(change: &Change) -> Option<&'static str> {
    match change {
        Change::Misread { .. } => Some("blocks are decoded within its kernels"),
        Change::After { .. } => Some("an op would have to be inserted"),
        Change::Scores(_) => Some("its kernel of attention keeps the scores to itself"),
        Change::Part { change, .. } => match **change {
            Change::Bypass { .. } | Change::Pass(_) => None,
            _ => Some("a node is computed as a whole"),
        },
        Change::All(changes) => changes.iter().find_map(refusal),
        _ => None,
    }
}

/// The edits of the result.
fn result_edits(change: &Change, out: &mut Vec<Edit>) {
    match change {
        Change::ResultEdit(edit) => out.push(edit.clone()),
        Change::All(changes) => changes.iter().for_each(|change| result_edits(change, out)),
        _ => {}
    }
}

/// A tensor whose values were edited in a copy.
struct Copied {
    _tensor: Box<[u8; TENSOR_BYTES]>,
    _data: Vec<u8>,
}

impl Injection {
    /// Prepares a mistake in the graph that these tensors make up.
    fn new(graph: &Graph, address: &[RawTensor], fault: Fault) -> Result<Injection, String> {
        if let Some(why) = refusal(&fault.rewrite.change) {
            return Err(format!("{} is not made in llama.cpp's own graph: {why}", fault.name));
        }
        let id = fault.rewrite.node;
        let others = fault.rewrite.change.others().into_iter();
        let others = others.filter(|&id| graph.leaf(id) != Some(Leaf::Weight)).map(|id| Other {
            id,
            tensor: address[id],
            computed: !graph.is_leaf(id),
            bytes: None,
        });
        let on_device = graph.get(id).backend.as_deref().is_some_and(|name| !HOSTS.contains(&name));
        Ok(Injection {
            others: others.collect(),
            on_device,
            edited: Vec::new(),
            node: address[id],
            before: id.checked_sub(1).map(|before| address[before]),
            address: address.to_vec(),
            fault,
            undo: Vec::new(),
            copies: Vec::new(),
            passed: None,
        })
    }

    /// The mistake that is wanted, prepared in each node of a graph that has a place for it.
    ///
    /// # Errors
    /// Why it cannot be made in llama.cpp's own graph.
    pub fn find(wanted: &Wanted, described: &Described) -> Result<Vec<Injection>, String> {
        let graph = &described.graph;
        let scene = Scene::new(graph);
        let labels = label::labels(graph);
        let nodes = (0..graph.nodes).filter(|&id| labels[id].is_some_and(|label| wanted.is_at(label)));
        let faults = nodes.filter_map(|id| wanted.find(&scene, id));
        faults.map(|fault| Injection::new(graph, &described.address, fault)).collect()
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
        unsafe { self.keep(reader, None)? };
        if self.node == tensor {
            // SAFETY: by the caller's promise; what the node reads has been computed.
            unsafe { self.make(reader)? };
        }
        let other = self.others.iter().any(|other| other.tensor == tensor);
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
            if self.others.iter().any(|other| other.tensor == tensor) {
                self.keep(reader, Some(tensor))?;
            }
            if self.node == tensor { self.finish(reader) } else { Ok(()) }
        }
    }

    /// Keeps the values of what is read besides the sources; `computed` is the node that has just computed them, if
    /// one does.
    unsafe fn keep(&mut self, reader: Reader<'_>, computed: Option<RawTensor>) -> Result<(), String> {
        let missing = |other: &&mut Other| {
            let is_it = computed.map_or(!other.computed, |tensor| other.tensor == tensor);
            is_it && other.bytes.is_none()
        };
        for other in self.others.iter_mut().filter(missing) {
            // SAFETY: by the caller's promise.
            other.bytes = Some(unsafe { Values::read(reader, other.tensor)? }.bytes);
        }
        Ok(())
    }

    /// A tensor that is read besides the sources, with its values where it is no weight.
    fn other(&mut self, id: Id) -> Result<(RawTensor, Option<Vec<u8>>), String> {
        match self.others.iter().find(|other| other.id == id) {
            Some(other) => {
                let bytes = other.bytes.clone().ok_or("what it reads instead was not computed before it")?;
                Ok((other.tensor, Some(bytes)))
            }
            None => Ok((self.address[id], None)),
        }
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
        let change = self.fault.rewrite.change.clone();
        // SAFETY: by the caller's promise.
        unsafe { self.change(reader, &change) }
    }

    unsafe fn change(&mut self, reader: Reader<'_>, change: &Change) -> Result<(), String> {
        let layout = reader.layout;
        match change {
            // SAFETY: by the caller's promise the tensor is alive; it is itself in memory of the host.
            Change::Words(words) => unsafe { self.words(reader, words) },
            // SAFETY: as above.
            Change::Op(op, words) => unsafe {
                let number = number_of(reader, op).ok_or_else(|| format!("this llama.cpp has no op {op}"))?;
                self.put(layout.op, &number.to_ne_bytes());
                self.words(reader, words);
            },
            // SAFETY: by the caller's promise; the slot is one of the ten that a tensor has.
            Change::Source { slot, with: Some(with) } => unsafe {
                match self.other(*with)? {
                    (tensor, Some(bytes)) => self.lead(reader, *slot, tensor, bytes)?,
                    (tensor, None) => self.point(reader, *slot, tensor),
                }
            },
            // SAFETY: as above; the slot is one of the ten that a tensor has.
            Change::Source { slot, with: None } => unsafe { self.point(reader, *slot, std::ptr::null_mut()) },
            // SAFETY: as above.
            Change::Exchange(a, b) => unsafe {
                let (first, second) = (reader.source_in(self.node, *a), reader.source_in(self.node, *b));
                self.point(reader, *a, second);
                self.point(reader, *b, first);
            },
            // SAFETY: as above.
            Change::SourceEdit { slot, edit } => unsafe { self.edit_source(reader, *slot, edit)? },
            // SAFETY: as above.
            Change::Unwritten { slots, mask, held } => unsafe {
                let mask = Values::read(reader, reader.source_in(self.node, *mask))?;
                let seen = mask.numbers()?;
                for &slot in slots {
                    let edit = |ne: &mut [usize; 4], numbers: &mut Vec<f64>| {
                        unwritten(*ne, numbers, (mask.ne[0], &seen), *held);
                    };
                    self.edited_source(reader, slot, &edit)?;
                }
            },
            // SAFETY: as above.
            Change::Bypass { slot } => unsafe {
                let values = Values::read(reader, reader.source_in(self.node, *slot))?;
                self.passed = Some((values.numbers()?, None));
            },
            Change::Pass(with) => {
                let (tensor, bytes) = self.other(*with)?;
                // SAFETY: as above.
                let mut values = unsafe { Values::read(reader, tensor)? };
                values.bytes = bytes.unwrap_or(values.bytes);
                self.passed = Some((values.numbers()?, None));
            }
            Change::Part { row, columns, change } => {
                // SAFETY: as above.
                unsafe { self.change(reader, change)? };
                if let Some((_, part)) = &mut self.passed {
                    *part = Some((*row, columns.clone()));
                }
            }
            Change::All(changes) => {
                for change in changes {
                    // SAFETY: as above.
                    unsafe { self.change(reader, change)? };
                }
            }
            Change::ResultEdit(_) | Change::Misread { .. } | Change::After { .. } | Change::Scores(_) => {}
            Change::Picked { .. } => return Err("it is made in the node that picks the rows".to_owned()),
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
        let mut edits = Vec::new();
        result_edits(&self.fault.rewrite.change, &mut edits);
        if edits.is_empty() && self.passed.is_none() {
            return Ok(());
        }
        // SAFETY: by the caller's promise.
        let mut values = unsafe { Values::read(reader, self.node)? };
        let mut numbers = values.numbers()?;
        match self.passed.take() {
            Some((passed, Some((row, columns)))) => {
                let within = |i: &usize| columns.contains(&(i % row.max(1)));
                (0..numbers.len().min(passed.len())).filter(within).for_each(|i| numbers[i] = passed[i]);
            }
            Some((passed, None)) => numbers = passed,
            None => {}
        }
        let mut ne = values.ne;
        edits.iter().for_each(|edit| edit.apply(&mut ne, &mut numbers));
        values.set(&numbers)?;
        // SAFETY: as many bytes as were read from there.
        unsafe {
            (reader.api.tensor_set)(self.node, values.bytes.as_ptr().cast(), 0, values.bytes.len());
        }
        Ok(())
    }

    /// Another tensor in a slot.
    unsafe fn point(&mut self, reader: Reader<'_>, slot: usize, tensor: RawTensor) {
        // SAFETY: by the caller's promise; the slot is one of the ten that a tensor has.
        unsafe {
            self.put(reader.layout.src + slot * size_of::<RawTensor>(), &(tensor as usize).to_ne_bytes());
        }
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
    unsafe fn edit_source(&mut self, reader: Reader<'_>, slot: usize, edit: &Edit) -> Result<(), String> {
        // SAFETY: by the caller's promise.
        unsafe { self.edited_source(reader, slot, &|ne, numbers| edit.apply(ne, numbers)) }
    }

    unsafe fn edited_source(
        &mut self,
        reader: Reader<'_>,
        slot: usize,
        edit: &dyn Fn(&mut [usize; 4], &mut Vec<f64>),
    ) -> Result<(), String> {
        // SAFETY: by the caller's promise.
        unsafe {
            let source = reader.source_in(self.node, slot);
            let mut values = Values::read(reader, source)?;
            let mut numbers = values.numbers()?;
            let mut ne = values.ne;
            edit(&mut ne, &mut numbers);
            if ne != values.ne {
                return Err("a source of llama.cpp's own graph keeps its number of heads".to_owned());
            }
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
