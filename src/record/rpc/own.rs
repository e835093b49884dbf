//! A ggml-rpc-server of ours: computes with the rules of ops, node by node, in f32 or f64. It checks the graph of a client
//! on any system, and no device.

use std::collections::{BTreeMap, HashMap};
use std::net::{TcpListener, TcpStream};

use parity_graph::{Op, Params};

use super::ops::description;
use super::peer::Peer;
use super::wire::{
    COMPUTE, Cursor, GRAPH_BYTES_MAX, Reply, TENSOR_BYTES, Told, Version, WireGraph, WireTensor, command,
    shape,
};
use crate::arithmetic::Arithmetic;
use crate::engine::op_by_op::{Number, compute};
use crate::error::{Error, Result};
use crate::gguf::{DType, TensorInfo, TensorRef, decode};
use crate::memory;
use crate::numerics::Storage;
use crate::ops::source::{Args, Data, Source, contiguous};
use crate::ops::{Strided, rule};
use half::{bf16, f16};

/// How tensors have to be aligned.
const ALIGN: u64 = 32;
/// Between buffers, so that no tensor reaches into another.
const GAP: u64 = 1 << 20;

/// Serves clients, one thread each, until the listener is closed.
pub fn serve(listener: &TcpListener, version: Version, double: bool) {
    std::thread::scope(|scope| {
        while let Ok((stream, _)) = listener.accept() {
            scope.spawn(move || {
                let served = match double {
                    true => Served::<f64>::run(stream, version),
                    false => Served::<f32>::run(stream, version),
                };
                served.unwrap_or_else(|error| eprintln!("parity: {error}"));
            });
        }
    });
}

/// A client, and its buffers by their first addresses, which are their names too.
struct Served<S> {
    client: Peer,
    version: Version,
    ops: usize,
    buffers: BTreeMap<u64, Vec<u8>>,
    /// Bytes that buffers may still take.
    room: u64,
    next: u64,
    graphs: HashMap<(u32, u64), WireGraph>,
    kind: std::marker::PhantomData<S>,
}

impl<S: Number> Served<S> {
    fn run(stream: TcpStream, version: Version) -> Result<()> {
        let mut served = Served::<S> {
            client: Peer::new("the client", stream)?,
            version,
            ops: version.ops().unwrap_or(0),
            buffers: BTreeMap::new(),
            room: memory::available()?.map_or(u64::MAX, |(_, bytes)| bytes),
            next: GAP,
            graphs: HashMap::new(),
            kind: std::marker::PhantomData,
        };
        while let Some(number) = served.client.command()? {
            let what = format!("command {number}");
            let length = served.client.length(&what)?;
            let limit = served.room.saturating_add(GRAPH_BYTES_MAX);
            let request = served.client.bytes(length, limit, &what)?;
            let answer = served.answer(number, &request);
            let answer = answer
                .map_err(|e| served.client.error(format!("sends what cannot be done: {what}")).found(e))?;
            if let Some(answer) = answer {
                served.client.send(&[&(answer.len() as u64).to_le_bytes(), &answer])?;
            }
        }
        Ok(())
    }

    /// The answer to a request, where there is one.
    fn answer(&mut self, number: u8, request: &[u8]) -> Told<Option<Vec<u8>>> {
        let mut from = Cursor(request);
        if number == command::HELLO {
            let Version { major, minor, patch } = self.version;
            // Nothing beside TCP; before 4 there was no room for it.
            let capable = if request.is_empty() { 3 } else { 28 };
            return Ok(Some([&[major, minor, patch][..], &[0; 25]].concat()[..capable].to_vec()));
        }
        let shape = shape(number, self.version).ok_or_else(|| "it is none of this protocol".to_owned())?;
        if shape.request.is_some_and(|bytes| bytes != request.len() as u64) {
            return Err(format!("{} bytes", request.len()));
        }
        let answer = match number {
            0 => {
                from.u32()?;
                let bytes = from.u64()?;
                let name = self.allocate(bytes);
                [name.to_le_bytes(), bytes.to_le_bytes()].concat()
            }
            1 => ALIGN.to_le_bytes().to_vec(),
            2 => self.room.to_le_bytes().to_vec(),
            3 => request.to_vec(),
            4 => {
                let freed = self.buffers.remove(&from.u64()?).ok_or("a buffer that is not there")?;
                self.room = self.room.saturating_add(freed.len() as u64);
                Vec::new()
            }
            5 => {
                let name = from.u64()?;
                self.buffers.get_mut(&name).ok_or("a buffer that is not there")?.fill(request[8]);
                Vec::new()
            }
            6..=9 | 17 => self.tensors(number, request)?,
            10 => {
                let graph = WireGraph::parse(request, self.version)?;
                self.compute(&graph)?;
                self.graphs.insert((graph.device, graph.uid), graph);
                Vec::new()
            }
            11 => [self.room.to_le_bytes(), self.room.to_le_bytes()].concat(),
            13 => {
                from.u32()?;
                WireTensor::read(&mut from)?.bytes()?.to_le_bytes().to_vec()
            }
            15 => 1u32.to_le_bytes().to_vec(),
            16 => {
                let key = (from.u32()?, from.u64().unwrap_or(0));
                let graph = self.graphs.remove(&key).ok_or("a graph that was not sent")?;
                self.compute(&graph)?;
                self.graphs.insert(key, graph);
                Vec::new()
            }
            12 => Vec::new(),
            _ => return Err("it is for several servers or rows at once".to_owned()),
        };
        Ok((shape.reply != Reply::None).then_some(answer))
    }

    /// The answer to a request for a tensor's bytes, or to one that sets them.
    fn tensors(&mut self, number: u8, request: &[u8]) -> Told<Vec<u8>> {
        let mut from = Cursor(request);
        Ok(match number {
            6 => {
                let tensor = WireTensor::read(&mut from)?;
                let begin = TENSOR_BYTES + self.version.set_tensor_header();
                let values = request.get(begin..).ok_or("no offset")?;
                let offset = Cursor(&request[begin - 8..]).u64()?;
                self.memory(&tensor, offset, values.len() as u64)?.copy_from_slice(values);
                Vec::new()
            }
            // No file is kept under a hash.
            7 => vec![0],
            8 => {
                let tensor = WireTensor::read(&mut from)?;
                let (offset, bytes) = (from.u64()?, from.u64()?);
                self.memory(&tensor, offset, bytes)?.to_vec()
            }
            9 => {
                let [source, target] = [WireTensor::read(&mut from)?, WireTensor::read(&mut from)?];
                let bytes = self.memory(&source, 0, source.bytes()?)?.to_vec();
                self.memory(&target, 0, bytes.len() as u64)?.copy_from_slice(&bytes);
                vec![1]
            }
            _ => {
                let tensor = WireTensor::read(&mut from)?;
                let (offset, bytes) = (from.u64()?, from.u64()?);
                let value = request[request.len() - 1];
                self.memory(&tensor, offset, bytes)?.fill(value);
                Vec::new()
            }
        })
    }

    /// The name of a new buffer; 0 where there is no room.
    fn allocate(&mut self, bytes: u64) -> u64 {
        if bytes > self.room {
            return 0;
        }
        let name = self.next;
        self.room -= bytes;
        self.next = (name + bytes + GAP).next_multiple_of(GAP);
        self.buffers.insert(name, vec![0; bytes as usize]);
        name
    }

    /// Bytes of a tensor, within its buffer.
    fn memory(&mut self, tensor: &WireTensor, offset: u64, bytes: u64) -> Told<&mut [u8]> {
        let at = tensor.data.checked_add(offset).and_then(|at| at.checked_sub(tensor.buffer));
        let begin = at.and_then(|at| usize::try_from(at).ok());
        let range = begin.and_then(|begin| Some(begin..begin.checked_add(usize::try_from(bytes).ok()?)?));
        let buffer = self.buffers.get_mut(&tensor.buffer);
        let own = buffer.zip(range).and_then(|(buffer, range)| buffer.get_mut(range));
        own.ok_or_else(|| format!("`{}` does not lie within its buffer", tensor.name()))
    }

    /// The values of a tensor in logical order.
    fn values(&mut self, tensor: &WireTensor) -> Told<Vec<S>> {
        let dtype = dtype(tensor)?;
        let bytes = self.memory(tensor, 0, tensor.bytes()?)?;
        if dtype.block_len() > 1 {
            let mut values = vec![S::ZERO; bytes.len() / dtype.block_bytes() * dtype.block_len()];
            if !dtype.is_decodable() || values.len() as u64 != elements(tensor) {
                return Err(format!("`{}` cannot be decoded, or has gaps", tensor.name()));
            }
            decode(dtype, bytes, &mut values);
            return Ok(values);
        }
        places(tensor).map(|at| number(dtype, &bytes[at..])).collect()
    }

    /// Writes the values of a tensor.
    fn write(&mut self, tensor: &WireTensor, values: &[S]) -> Told<()> {
        let dtype = dtype(tensor)?;
        let bytes = self.memory(tensor, 0, tensor.bytes()?)?;
        for (at, value) in places(tensor).zip(values) {
            put(dtype, value.to_f64(), &mut bytes[at..])?;
        }
        Ok(())
    }

    fn compute(&mut self, graph: &WireGraph) -> Told<()> {
        let index = graph.indices();
        for &node in &graph.nodes {
            let node = &graph.tensors[node];
            let name = description(node.op, &node.params, self.ops).ok_or("an op that is not known")?;
            let op = Op::parse(&name.to_string_lossy());
            if op.is_view() || op == Op::None || node.flags & COMPUTE == 0 || node.ne.contains(&0) {
                continue;
            }
            let sources: Vec<Option<&WireTensor>> =
                node.src.iter().map(|id| Some(&graph.tensors[*index.get(id)?])).collect();
            let of = |e: String| format!("node `{}`: {e}", node.name());
            self.node(node, &op, &sources).map_err(of)?;
        }
        Ok(())
    }

    fn node(&mut self, node: &WireTensor, op: &Op, sources: &[Option<&WireTensor>]) -> Told<()> {
        let source = |slot: usize| sources[slot].ok_or_else(|| format!("{op} has no source {slot}"));
        match op {
            Op::Cont | Op::Dup | Op::Cpy => {
                let values = self.values(source(0)?)?;
                return self.write(node, &values);
            }
            Op::SetRows => return self.set_rows(node, source(0)?, source(1)?),
            _ => {}
        }
        let rule = rule(op).ok_or_else(|| format!("no rule for {op}"))?;
        let mut held = Vec::new();
        for source in sources {
            // A cast is a source of itself.
            let source = source.filter(|source| source.id != node.id);
            held.push(source.map(|source| Ok::<_, String>((self.held(source)?, source))).transpose()?);
        }
        let last = held.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let each = held[..last]
            .iter()
            .map(|slot| slot.as_ref().map(|(held, source)| held.source(source)).transpose());
        let (name, params) = (node.name(), Params(node.params));
        let args = Args {
            name: &name,
            params: &params,
            sources: each.collect::<Told<_>>()?,
            shape: slowest_first(node),
            dtype: dtype(node)?,
            arithmetic: &Arithmetic::EXACT,
            tokens: None,
        };
        let values = compute(rule, &args).map_err(|unknown| unknown.reason.to_string())?;
        self.write(node, &values)
    }

    /// Rows into the memory that a node is a view of.
    fn set_rows(&mut self, node: &WireTensor, rows: &WireTensor, ids: &WireTensor) -> Told<()> {
        let (values, ids_of) = (self.values(rows)?, self.values(ids)?);
        let [width, n, b, c] = rows.ne.map(|extent| extent as usize);
        let extents = ids.ne.map(|extent| extent as usize);
        for (row, values) in values.chunks_exact(width.max(1)).enumerate() {
            let (i, j, k) = (row % n, row / n % b, row / n / b % c);
            let at = (k % extents[2].max(1) * extents[1] + j % extents[1].max(1)) * extents[0] + i;
            let id = ids_of.get(at).ok_or_else(|| format!("no id for row {row}"))?.to_f64();
            if !(id >= 0.0 && id < f64::from(node.ne[1])) {
                return Err(format!("row {id} of {}", node.ne[1]));
            }
            let offset = id as u64 * u64::from(node.nb[1])
                + j as u64 * u64::from(node.nb[2])
                + k as u64 * u64::from(node.nb[3]);
            let ne = [node.ne[0], 1, 1, 1];
            self.write(&WireTensor { ne, data: node.data.wrapping_add(offset), ..node.clone() }, values)?;
        }
        Ok(())
    }

    /// What a rule reads of a tensor: quantised values are decoded where they are read.
    fn held(&mut self, tensor: &WireTensor) -> Told<Held<S>> {
        let dtype = dtype(tensor)?;
        if dtype.block_len() == 1 {
            return Ok(Held::Values(self.values(tensor)?));
        }
        let bytes = self.memory(tensor, 0, tensor.bytes()?)?.to_vec();
        let expected = elements(tensor) / dtype.block_len() as u64 * dtype.block_bytes() as u64;
        if !dtype.is_decodable() || bytes.len() as u64 != expected {
            return Ok(Held::Values(self.values(tensor)?));
        }
        let shape = slowest_first(tensor);
        let first = shape.iter().take_while(|extent| **extent == 1).count().min(2);
        let info = TensorInfo {
            name: tensor.name(),
            dtype,
            shape: shape[first..].to_vec(),
            offset: 0,
            byte_len: bytes.len(),
            shard: 0,
            loaded: Storage::F32,
        };
        Ok(Held::Weight(info, bytes))
    }
}

/// What is read of a tensor.
enum Held<S> {
    Values(Vec<S>),
    Weight(TensorInfo, Vec<u8>),
}

impl<S> Held<S> {
    fn source<'a>(&'a self, tensor: &WireTensor) -> Told<Source<'a, S>> {
        let shape = slowest_first(tensor);
        let data = match self {
            Held::Values(data) => {
                Data::Values(Strided { data, offset: 0, shape, strides: contiguous(shape) })
            }
            Held::Weight(info, bytes) => Data::Weight(TensorRef { info, bytes }),
        };
        Ok(Source { dtype: dtype(tensor)?, data })
    }
}

fn dtype(tensor: &WireTensor) -> Told<DType> {
    DType::from_number(tensor.dtype)
        .ok_or_else(|| format!("`{}` has the type {}", tensor.name(), tensor.dtype))
}

fn elements(tensor: &WireTensor) -> u64 {
    tensor.ne.iter().fold(1u64, |product, &extent| product.saturating_mul(u64::from(extent)))
}

fn slowest_first(tensor: &WireTensor) -> [usize; 4] {
    let [a, b, c, d] = tensor.ne.map(|extent| extent as usize);
    [d, c, b, a]
}

/// Bytes from the first element to each, in logical order.
fn places(tensor: &WireTensor) -> impl Iterator<Item = usize> {
    let ([a, b, c, d], nb) = (tensor.ne, tensor.nb.map(|bytes| bytes as usize));
    (0..d as usize).flat_map(move |l| {
        (0..c as usize).flat_map(move |k| {
            (0..b as usize).flat_map(move |j| {
                (0..a as usize).map(move |i| i * nb[0] + j * nb[1] + k * nb[2] + l * nb[3])
            })
        })
    })
}

fn number<S: Number>(dtype: DType, bytes: &[u8]) -> Told<S> {
    let value = match (dtype, bytes) {
        (DType::F32, [a, b, c, d, ..]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        (DType::I32, [a, b, c, d, ..]) => f64::from(i32::from_le_bytes([*a, *b, *c, *d])),
        (DType::F16, [a, b, ..]) => f16::from_le_bytes([*a, *b]).to_f64(),
        (DType::BF16, [a, b, ..]) => bf16::from_le_bytes([*a, *b]).to_f64(),
        (DType::I64, [a, b, c, d, e, f, g, h, ..]) => {
            i64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]) as f64
        }
        _ => return Err(format!("values of type {dtype} are not read")),
    };
    Ok(S::from_f64(value))
}

fn put(dtype: DType, value: f64, bytes: &mut [u8]) -> Told<()> {
    let all: &[u8] = match dtype {
        DType::F32 => &(value as f32).to_le_bytes(),
        DType::F16 => &f16::from_f64(value).to_le_bytes(),
        DType::BF16 => &bf16::from_f32(value as f32).to_le_bytes(),
        DType::I32 => &(value as i32).to_le_bytes(),
        DType::I64 => &(value as i64).to_le_bytes(),
        _ => return Err(format!("values of type {dtype} are not written")),
    };
    let room = bytes.get_mut(..all.len()).ok_or("a value does not lie within its buffer")?;
    room.copy_from_slice(all);
    Ok(())
}

/// Listens on an address.
///
/// # Errors
/// The system's.
pub fn listen(address: &str) -> Result<(TcpListener, String)> {
    let failed = |e: std::io::Error| Error::new(address, format!("cannot be listened at: {e}"));
    let listener = TcpListener::bind(address).map_err(failed)?;
    let own = listener.local_addr().map_err(failed)?.to_string();
    Ok((listener, own))
}
