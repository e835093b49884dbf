//! Messages of ggml's RPC protocol, majors 3.6 to 8, as bytes: which there are, how long they may be, graphs and tensors.
//!
//! A request is its command (1 byte), the length of what follows (u64) and that; a reply is a length and that. All
//! numbers are little endian. What arrives is checked here before anything is made of it.

use std::collections::HashMap;

use crate::gguf::DType;

/// Bytes of a tensor on the wire, in every version.
pub const TENSOR_BYTES: usize = 296;
/// Bytes of the name in it.
const NAME_BYTES: usize = 64;
/// Slots for sources.
pub const SOURCES: usize = 10;
/// Bytes that a graph may have: more than 200 000 tensors.
pub const GRAPH_BYTES_MAX: u64 = 64 << 20;

/// Commands by their numbers.
#[allow(missing_docs, reason = "named as in ggml")]
pub mod command {
    pub const ALLOC_BUFFER: u8 = 0;
    pub const GET_ALIGNMENT: u8 = 1;
    pub const BUFFER_GET_BASE: u8 = 3;
    pub const SET_TENSOR: u8 = 6;
    pub const SET_TENSOR_HASH: u8 = 7;
    pub const GET_TENSOR: u8 = 8;
    pub const GRAPH_COMPUTE: u8 = 10;
    pub const HELLO: u8 = 14;
    pub const GRAPH_RECOMPUTE: u8 = 16;
}

/// What a server says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Commands and layouts.
    pub major: u8,
    /// Additions.
    pub minor: u8,
    /// Moves with the enumeration of ops, whose numbers cross the wire.
    pub patch: u8,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// `7.0.0` of a release.
impl std::str::FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Version, String> {
        let found = RELEASED.iter().map(|(version, _)| *version).find(|version| version.to_string() == text);
        let all = || RELEASED.map(|(version, _)| version.to_string()).join(", ");
        found.ok_or_else(|| format!("`{text}` is none of {}", all()))
    }
}

/// Versions that were released, with how many ops ggml had: the numbers of ops follow from that.
const RELEASED: [(Version, usize); 9] = [
    (Version { major: 3, minor: 6, patch: 1 }, 96),
    (Version { major: 4, minor: 0, patch: 0 }, 96),
    (Version { major: 4, minor: 0, patch: 1 }, 97),
    (Version { major: 4, minor: 0, patch: 2 }, 98),
    (Version { major: 4, minor: 0, patch: 3 }, 101),
    (Version { major: 5, minor: 0, patch: 0 }, 101),
    (Version { major: 6, minor: 0, patch: 0 }, 101),
    (Version { major: 7, minor: 0, patch: 0 }, 101),
    (Version { major: 8, minor: 0, patch: 0 }, 101),
];

impl Version {
    /// The last release.
    pub const LAST: Version = RELEASED[RELEASED.len() - 1].0;

    /// How many ops its ggml has; `None` of a version whose numbers of ops are not known.
    pub fn ops(self) -> Option<usize> {
        RELEASED.iter().find(|(version, _)| *version == self).map(|(_, ops)| *ops)
    }

    /// Whether graphs carry an id of their own.
    pub fn has_uid(self) -> bool {
        self.major >= 8
    }

    /// Bytes between the tensor and the values in SET_TENSOR: the offset, and since 7 whether the server is to keep a copy.
    pub fn set_tensor_header(self) -> usize {
        if self.major >= 7 { 9 } else { 8 }
    }
}

/// What follows a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing.
    None,
    /// So many bytes.
    Bytes(u64),
    /// As many bytes as the request asks for, in its last words: their number, or their number and how often.
    Asked,
    /// An empty reply in some builds and none in others: protocol 6 changed without a number of its own.
    Unsure,
}

/// What a request has to look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of the request; `None` where it has values of any length.
    pub request: Option<u64>,
    /// What the server answers.
    pub reply: Reply,
}

/// The shape of a command behind HELLO; `None` of one that the version does not have.
pub fn shape(number: u8, version: Version) -> Option<Shape> {
    let tensor = TENSOR_BYTES as u64;
    let quiet = match version.major {
        ..=5 => Reply::Bytes(0),
        6 => Reply::Unsure,
        7.. => Reply::None,
    };
    let (request, reply) = match number {
        0 => (Some(12), Reply::Bytes(16)),
        1 | 2 => (Some(4), Reply::Bytes(8)),
        3 => (Some(8), Reply::Bytes(8)),
        4 => (Some(8), quiet),
        5 => (Some(9), quiet),
        6 | 10 => (None, Reply::None),
        7 => (Some(tensor + 16), Reply::Bytes(1)),
        8 => (Some(tensor + 16), Reply::Asked),
        9 => (Some(2 * tensor), Reply::Bytes(1)),
        11 => (Some(4), Reply::Bytes(16)),
        12 => (Some(tensor), quiet),
        13 => (Some(4 + (1 + SOURCES as u64) * tensor), Reply::Bytes(8)),
        15 => (Some(0), Reply::Bytes(4)),
        16 => (Some(if version.has_uid() { 12 } else { 4 }), Reply::None),
        17 if version.major >= 5 => (Some(tensor + 17), quiet),
        18 if version.major >= 8 => (None, Reply::None),
        19 if version.major >= 8 => (Some(tensor + 32), Reply::Asked),
        20 if version.major >= 8 => (Some(80), Reply::Bytes(1)),
        21 if version.major >= 8 => (Some(4 + tensor), Reply::None),
        22 if version.major >= 8 => (Some(4), Reply::None),
        _ => return None,
    };
    Some(Shape { request, reply })
}

/// A place in bytes that were received.
pub struct Cursor<'a>(pub &'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or("it ends before its own end")?;
        self.0 = rest;
        Ok(*head)
    }

    /// # Errors
    /// Where the bytes have ended.
    pub fn u32(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_le_bytes)
    }

    /// # Errors
    /// Where the bytes have ended.
    pub fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }

    fn each<T: Copy + Default, const N: usize>(
        &mut self,
        one: fn(&mut Self) -> Result<T, String>,
    ) -> Result<[T; N], String> {
        let mut all = [T::default(); N];
        for item in &mut all {
            *item = one(self)?;
        }
        Ok(all)
    }
}

/// A tensor as it crosses the wire. Extents and strides are as ggml has them, fastest axis first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireTensor {
    /// The client's name for it, a number above 0.
    pub id: u64,
    /// `enum ggml_type`
    pub dtype: u32,
    /// The server's name for the buffer; 0 for none.
    pub buffer: u64,
    /// Extents.
    pub ne: [u32; 4],
    /// Strides in bytes.
    pub nb: [u32; 4],
    /// `enum ggml_op` of the server's version.
    pub op: u32,
    /// Parameters of the op.
    pub params: [u32; 16],
    /// `GGML_TENSOR_FLAG_*`
    pub flags: u32,
    /// Ids of the sources by slot; 0 for none.
    pub src: [u64; SOURCES],
    /// Id of the tensor in whose memory it lies; 0 for its own.
    pub view_src: u64,
    /// Bytes from the start of that.
    pub view_offs: u64,
    /// Address of the first element on the server.
    pub data: u64,
    /// Zero terminated.
    pub name: [u8; NAME_BYTES],
    /// How many nodes read it, since protocol 6.
    pub use_count: u32,
}

/// `GGML_TENSOR_FLAG_COMPUTE`
pub const COMPUTE: u32 = 16;

/// What was made of a message, or what is wrong with it, as the middle of a sentence.
pub type Told<T> = std::result::Result<T, String>;

/// A name as tensors have it, cut where it is too long.
pub fn named(name: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

impl WireTensor {
    /// A leaf (rows, columns) of no id and no memory; `None` where its rows are no whole blocks, or too many bytes.
    pub fn leaf(name: &str, dtype: DType, [rows, columns]: [usize; 2]) -> Option<WireTensor> {
        let blocks = columns.is_multiple_of(dtype.block_len()).then(|| columns / dtype.block_len())?;
        let row = u32::try_from(blocks.checked_mul(dtype.block_bytes())?).ok()?;
        let (rows, columns) = (u32::try_from(rows).ok()?, u32::try_from(columns).ok()?);
        let all = row.checked_mul(rows)?;
        Some(WireTensor {
            id: 0,
            dtype: dtype.number(),
            buffer: 0,
            ne: [columns, rows, 1, 1],
            nb: [dtype.block_bytes() as u32, row, all, all],
            op: 0,
            params: [0; 16],
            flags: 0,
            src: [0; SOURCES],
            view_src: 0,
            view_offs: 0,
            data: 0,
            name: named(name),
            use_count: 0,
        })
    }

    /// Reads one.
    ///
    /// # Errors
    /// Where the bytes have ended.
    pub fn read(from: &mut Cursor<'_>) -> Result<WireTensor, String> {
        Ok(WireTensor {
            id: from.u64()?,
            dtype: from.u32()?,
            buffer: from.u64()?,
            ne: from.each(Cursor::u32)?,
            nb: from.each(Cursor::u32)?,
            op: from.u32()?,
            params: from.each(Cursor::u32)?,
            flags: from.u32()?,
            src: from.each(Cursor::u64)?,
            view_src: from.u64()?,
            view_offs: from.u64()?,
            data: from.u64()?,
            name: from.take()?,
            use_count: from.u32()?,
        })
    }

    /// Appends its bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        let mut words = |words: &[u32]| words.iter().for_each(|word| to.extend(word.to_le_bytes()));
        let long = |word: u64| [word as u32, (word >> 32) as u32];
        words(&long(self.id));
        words(&[self.dtype]);
        words(&long(self.buffer));
        words(&self.ne);
        words(&self.nb);
        words(&[self.op]);
        words(&self.params);
        words(&[self.flags]);
        self.src.iter().for_each(|&src| words(&long(src)));
        [self.view_src, self.view_offs, self.data].iter().for_each(|&word| words(&long(word)));
        to.extend(self.name);
        to.extend(self.use_count.to_le_bytes());
    }

    /// The name as text.
    pub fn name(&self) -> String {
        let end = self.name.iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }

    /// Bytes from its first to behind its last element, as ggml counts them.
    ///
    /// # Errors
    /// A type that is not known, more bytes than an address has.
    pub fn bytes(&self) -> Result<u64, String> {
        let dtype =
            DType::from_number(self.dtype).ok_or_else(|| format!("it has the type {}", self.dtype))?;
        if self.ne.contains(&0) {
            return Ok(0);
        }
        let (length, block) = (dtype.block_len() as u64, dtype.block_bytes() as u64);
        let extent = |axis: usize| (u64::from(self.ne[axis]) - 1) * u64::from(self.nb[axis]);
        let first = match length {
            1 => extent(0) + block,
            _ => u64::from(self.ne[0]) / length * u64::from(self.nb[0]),
        };
        // Each is below 2⁶⁴/4 but the sum need not be.
        let parts = [first, extent(1), extent(2), extent(3)];
        let sum = parts.iter().try_fold(0u64, |sum, &part| sum.checked_add(part));
        sum.filter(|bytes| *bytes < 1 << 48).ok_or_else(|| "it has more bytes than an address".to_owned())
    }
}

/// The words of GRAPH_COMPUTE.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireGraph {
    /// Which of the server's devices computes it.
    pub device: u32,
    /// Its own id, since protocol 8; 0 for none.
    pub uid: u64,
    /// Indices of the nodes, in their order.
    pub nodes: Vec<usize>,
    /// Nodes and leaves; sources stand before what reads them.
    pub tensors: Vec<WireTensor>,
}

impl WireGraph {
    /// Reads the request of GRAPH_COMPUTE.
    ///
    /// # Errors
    /// Says what of it contradicts itself.
    pub fn parse(bytes: &[u8], version: Version) -> Result<WireGraph, String> {
        let mut from = Cursor(bytes);
        let device = from.u32()?;
        let uid = if version.has_uid() { from.u64()? } else { 0 };
        let count = from.u32()? as usize;
        if from.0.len() / 8 < count {
            return Err(format!("it says that it has {count} nodes, and has no room for them"));
        }
        let ids: Vec<u64> = (0..count).map(|_| from.u64()).collect::<Result<_, _>>()?;
        let count = from.u32()? as usize;
        if from.0.len() != count.saturating_mul(TENSOR_BYTES) {
            return Err(format!(
                "it says that it has {count} tensors, and has {} bytes for them",
                from.0.len()
            ));
        }
        let tensors: Vec<WireTensor> =
            (0..count).map(|_| WireTensor::read(&mut from)).collect::<Result<_, _>>()?;
        let mut known: HashMap<u64, usize> = HashMap::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            let complain = |what: String| format!("tensor {index} (`{}`): {what}", tensor.name());
            tensor.bytes().map_err(complain)?;
            // A tensor that was cast marks itself as a source.
            let read = tensor.src.iter().chain([&tensor.view_src]).filter(|&&id| id != 0 && id != tensor.id);
            if let Some(id) = read.clone().find(|id| !known.contains_key(id)) {
                return Err(complain(format!("it reads tensor {id:#x}, which does not stand before it")));
            }
            if tensor.id == 0 || known.insert(tensor.id, index).is_some() {
                return Err(complain("its id is 0 or another's".to_owned()));
            }
        }
        let node =
            |id: &u64| known.get(id).copied().ok_or_else(|| format!("node {id:#x} is no tensor of it"));
        let nodes = ids.iter().map(node).collect::<Result<_, _>>()?;
        Ok(WireGraph { device, uid, nodes, tensors })
    }

    /// The request of GRAPH_COMPUTE.
    pub fn write(&self, version: Version) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(20 + 8 * self.nodes.len() + TENSOR_BYTES * self.tensors.len());
        bytes.extend(self.device.to_le_bytes());
        if version.has_uid() {
            bytes.extend(self.uid.to_le_bytes());
        }
        bytes.extend((self.nodes.len() as u32).to_le_bytes());
        self.nodes.iter().for_each(|&node| bytes.extend(self.tensors[node].id.to_le_bytes()));
        bytes.extend((self.tensors.len() as u32).to_le_bytes());
        self.tensors.iter().for_each(|tensor| tensor.write(&mut bytes));
        bytes
    }

    /// The index of each tensor by its id.
    pub fn indices(&self) -> HashMap<u64, usize> {
        self.tensors.iter().enumerate().map(|(index, tensor)| (tensor.id, index)).collect()
    }
}
