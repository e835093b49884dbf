//! Stands between a client and a server: passes every message on, and lets somebody look at weights and graphs.

use std::collections::HashMap;
use std::rc::Rc;

use super::peer::Peer;
use super::wire::{
    Cursor, GRAPH_BYTES_MAX, Reply, Shape, TENSOR_BYTES, Version, WireGraph, WireTensor, command, shape,
};
use crate::error::Result;

/// Bytes of a request or reply that is neither values nor a graph.
const SHORT_MAX: u64 = 1 << 16;
/// Bytes of HELLO since protocol 4: what each end can do beside TCP. They are zeroed, so that it stays TCP.
const CAPABILITIES: usize = 24;
/// Graphs that a server keeps since protocol 8, before it forgets all of them.
const GRAPHS_KEPT: usize = 1024;

/// A server, as one who has requests of his own speaks with it.
pub struct Server {
    /// The connection.
    pub peer: Peer,
    /// What it said of itself.
    pub version: Version,
}

impl Server {
    fn request(&mut self, number: u8, parts: &[&[u8]]) -> Result<()> {
        let length = parts.iter().map(|part| part.len() as u64).sum::<u64>();
        self.peer.send(&[&[&[number][..], &length.to_le_bytes()], parts].concat())
    }

    fn asked<const N: usize>(&mut self, number: u8, parts: &[&[u8]], what: &str) -> Result<[u64; N]> {
        self.request(number, parts)?;
        let reply = self.peer.reply(8 * N as u64, what)?;
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(reply.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        }
        Ok(words)
    }

    /// Reads bytes of a tensor.
    ///
    /// # Errors
    /// Of the connection, and of a server that refuses: it closes it.
    pub fn get(&mut self, tensor: &WireTensor, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut request = Vec::with_capacity(TENSOR_BYTES + 16);
        tensor.write(&mut request);
        request.extend(offset.to_le_bytes());
        request.extend((out.len() as u64).to_le_bytes());
        self.request(command::GET_TENSOR, &[&request])?;
        let what = format!("the values of `{}`", tensor.name());
        let length = self.peer.length(&what)?;
        self.peer.must_be(length, out.len() as u64, &what)?;
        self.peer.fill(out, &what)
    }

    /// Writes bytes of a tensor.
    ///
    /// # Errors
    /// Of the connection.
    pub fn put(&mut self, tensor: &WireTensor, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut head = Vec::with_capacity(TENSOR_BYTES + 9);
        tensor.write(&mut head);
        head.resize(TENSOR_BYTES + self.version.set_tensor_header() - 8, 0);
        head.extend(offset.to_le_bytes());
        self.request(command::SET_TENSOR, &[&head, bytes])
    }

    /// Has a graph computed.
    ///
    /// # Errors
    /// Of the connection.
    pub fn compute(&mut self, graph: &WireGraph) -> Result<()> {
        let bytes = graph.write(self.version);
        self.request(command::GRAPH_COMPUTE, &[&bytes])
    }

    /// A buffer of a device: the server's name for it, its first address and how its tensors have to be aligned; `None`
    /// where there is no memory for it.
    ///
    /// # Errors
    /// Of the connection.
    pub fn allocate(&mut self, device: u32, bytes: u64) -> Result<Option<(u64, u64, u64)>> {
        let device = device.to_le_bytes();
        let [align] = self.asked(command::GET_ALIGNMENT, &[&device], "an alignment")?;
        let [buffer, _] = self.asked(command::ALLOC_BUFFER, &[&device, &bytes.to_le_bytes()], "a buffer")?;
        if buffer == 0 {
            return Ok(None);
        }
        let [base] = self.asked(command::BUFFER_GET_BASE, &[&buffer.to_le_bytes()], "a buffer's address")?;
        Ok(Some((buffer, base, align.max(1))))
    }
}

/// Who looks at what passes.
pub trait Watch {
    /// A server that the client has shaken hands with.
    ///
    /// # Errors
    /// Where it cannot be looked at.
    fn met(&mut self, version: Version) -> Result<()>;
    /// Bytes `offset` of a tensor and behind are set, piece by piece.
    fn set(&mut self, tensor: &WireTensor, offset: u64, piece: &[u8]);
    /// Bytes `offset` of a tensor and behind are those that the server has kept under a hash.
    fn set_kept(&mut self, tensor: &WireTensor, offset: u64, hash: u64);
    /// A graph is to be computed. Whether that was done: otherwise it is passed on as it came.
    ///
    /// # Errors
    /// What ends the connection.
    fn compute(&mut self, server: &mut Server, graph: &Rc<WireGraph>) -> Result<bool>;
}

/// A client's connection and ours to the server.
pub struct Session<'a> {
    client: Peer,
    server: Server,
    watch: &'a mut dyn Watch,
    /// Graphs that the client may ask for again, by device and id.
    graphs: HashMap<(u32, u64), Rc<WireGraph>>,
    /// Bytes of the largest buffer that was asked for: no tensor has more.
    largest: u64,
    /// Whether quiet commands of protocol 6 are answered: seen at the first of them.
    answers: Option<bool>,
}

impl<'a> Session<'a> {
    /// Shakes hands with both; `None` where the client went without a word.
    ///
    /// # Errors
    /// A peer that speaks another protocol, or another version of it.
    pub fn open(mut client: Peer, mut server: Peer, watch: &'a mut dyn Watch) -> Result<Option<Session<'a>>> {
        let Some(number) = client.command()? else { return Ok(None) };
        if number != command::HELLO {
            let wrong = client.error("does not begin as a client of ggml's RPC does");
            return Err(wrong.expected("HELLO, command 14").found(format!("command {number}")));
        }
        let length = client.length("HELLO")?;
        if length != 0 {
            client.must_be(length, CAPABILITIES as u64, "HELLO")?;
        }
        client.bytes(length, length, "HELLO")?;
        let none = [0; CAPABILITIES];
        server.send(&[&[number], &length.to_le_bytes(), &none[..length as usize]])?;
        let found = server.length("the answer to HELLO")?;
        let expected = if length == 0 { 3 } else { 4 + CAPABILITIES as u64 };
        server.must_be(found, expected, "the answer to HELLO")?;
        let mut answer = server.bytes(found, expected, "the answer to HELLO")?;
        answer.iter_mut().skip(4).for_each(|byte| *byte = 0);
        let version = Version { major: answer[0], minor: answer[1], patch: answer[2] };
        if version.ops().is_none() {
            return Err(server
                .error("speaks a version of ggml's RPC whose ops have no known numbers")
                .expected("a release of protocol 3.6.1 to 8.0.0")
                .found(format!("protocol {version}"))
                .hint("record with a llama.cpp between April 2026 and October 2026, or with LD_PRELOAD"));
        }
        client.send(&[&found.to_le_bytes(), &answer])?;
        watch.met(version)?;
        let server = Server { peer: server, version };
        Ok(Some(Session { client, server, watch, graphs: HashMap::new(), largest: 0, answers: None }))
    }

    /// Passes messages on until the client goes.
    ///
    /// # Errors
    /// A peer that breaks off or does not keep to the protocol.
    pub fn run(&mut self) -> Result<()> {
        while let Some(number) = self.client.command()? {
            let what = format!("command {number}");
            let Some(shape) = shape(number, self.server.version) else {
                let version = self.server.version;
                let wrong = self.client.error("sends a command that its protocol does not have");
                return Err(wrong.expected(format!("a command of protocol {version}")).found(what));
            };
            let length = self.client.length(&what)?;
            if let Some(expected) = shape.request {
                self.client.must_be(length, expected, &what)?;
            }
            match number {
                command::GRAPH_COMPUTE => self.graph(length)?,
                command::GRAPH_RECOMPUTE => self.again(length)?,
                command::SET_TENSOR => self.set(length)?,
                _ => self.plain(number, length, shape)?,
            }
        }
        Ok(())
    }

    /// A message whose content is nobody's business but the peers'.
    fn plain(&mut self, number: u8, length: u64, shape: Shape) -> Result<()> {
        let what = format!("command {number}");
        let header = [&[number][..], &length.to_le_bytes()].concat();
        if shape.request.is_none() {
            self.server.peer.send(&[&header])?;
            return self.client.pass(&mut self.server.peer, length, &what, &mut |_| {});
        }
        let request = self.client.bytes(length, SHORT_MAX, &what)?;
        self.server.peer.send(&[&header, &request])?;
        if let Some(bytes) = request.get(4..12).filter(|_| number == command::ALLOC_BUFFER) {
            self.largest = self.largest.max(Cursor(bytes).u64().unwrap_or(0));
        }
        let what = format!("the answer to command {number}");
        let expected = match shape.reply {
            Reply::None => return Ok(()),
            Reply::Unsure if !self.is_answered()? => return Ok(()),
            Reply::Unsure => 0,
            Reply::Bytes(bytes) => bytes,
            Reply::Asked => asked(&request).ok_or_else(|| self.client.error(format!("{what} has no end")))?,
        };
        let found = self.server.peer.length(&what)?;
        self.server.peer.must_be(found, expected, &what)?;
        if number == command::SET_TENSOR_HASH {
            let reply = self.server.peer.bytes(found, SHORT_MAX, &what)?;
            if reply == [1] {
                let (tensor, words) = self.tensor_of(&request, &what)?;
                let mut words = Cursor(words);
                if let (Ok(offset), Ok(hash)) = (words.u64(), words.u64()) {
                    self.watch.set_kept(&tensor, offset, hash);
                }
            }
            return self.client.send(&[&found.to_le_bytes(), &reply]);
        }
        self.client.send(&[&found.to_le_bytes()])?;
        self.server.peer.pass(&mut self.client, found, &what, &mut |_| {})
    }

    /// Whether a quiet command of protocol 6 is answered: the server does so before the client goes on.
    fn is_answered(&mut self) -> Result<bool> {
        let answers = match self.answers {
            Some(answers) => answers,
            None => self.server.peer.speaks_before(&mut self.client)?,
        };
        Ok(*self.answers.insert(answers))
    }

    fn tensor_of<'b>(&self, request: &'b [u8], what: &str) -> Result<(WireTensor, &'b [u8])> {
        let mut from = Cursor(request);
        let tensor = WireTensor::read(&mut from).map_err(|e| self.client.error(format!("{what}: {e}")))?;
        Ok((tensor, from.0))
    }

    fn set(&mut self, length: u64) -> Result<()> {
        let what = "values of a tensor";
        let begin = TENSOR_BYTES + self.server.version.set_tensor_header();
        let Some(values) = length.checked_sub(begin as u64) else {
            return self.client.must_be(length, begin as u64, what);
        };
        let head = self.client.bytes(begin as u64, begin as u64, what)?;
        let (tensor, _) = self.tensor_of(&head, what)?;
        let mut offset = Cursor(&head[begin - 8..]).u64().map_err(|e| self.client.error(e))?;
        self.server.peer.send(&[&[command::SET_TENSOR], &length.to_le_bytes(), &head])?;
        let watch = &mut *self.watch;
        self.client.pass(&mut self.server.peer, values, what, &mut |piece| {
            watch.set(&tensor, offset, piece);
            offset = offset.saturating_add(piece.len() as u64);
        })
    }

    fn graph(&mut self, length: u64) -> Result<()> {
        let bytes = self.client.bytes(length, GRAPH_BYTES_MAX, "a graph")?;
        let graph = WireGraph::parse(&bytes, self.server.version);
        let graph = Rc::new(graph.map_err(|e| self.client.error("sends a graph that is none").found(e))?);
        // What is read of a tensor takes memory: a server has had as much.
        let too_large =
            |tensor: &&WireTensor| tensor.buffer != 0 && tensor.bytes().is_ok_and(|n| n > self.largest);
        if let Some(tensor) = graph.tensors.iter().find(too_large) {
            let wrong =
                self.client.error(format!("has a tensor `{}` larger than its buffers", tensor.name()));
            return Err(wrong.expected(format!("at most {} bytes", self.largest)));
        }
        // One graph is kept for each device, and since protocol 8 those that have an id.
        let keeps = !self.server.version.has_uid() || graph.uid != 0;
        if keeps {
            let of_device = self.graphs.keys().filter(|(device, _)| *device == graph.device).count();
            if of_device >= GRAPHS_KEPT {
                self.graphs.retain(|(device, _), _| *device != graph.device);
            }
            self.graphs.insert((graph.device, graph.uid), Rc::clone(&graph));
        }
        self.compute(&graph)
    }

    fn again(&mut self, length: u64) -> Result<()> {
        let request = self.client.bytes(length, SHORT_MAX, "a graph that comes again")?;
        let mut from = Cursor(&request);
        let device = from.u32().map_err(|e| self.client.error(e))?;
        let key = (device, from.u64().unwrap_or(0));
        let Some(graph) = self.graphs.get(&key).cloned() else {
            return Err(self
                .client
                .error("asks for a graph again that it did not send")
                .found(format!("device {device}")));
        };
        self.compute(&graph)
    }

    /// Has a graph computed by who looks, or passes it on.
    fn compute(&mut self, graph: &Rc<WireGraph>) -> Result<()> {
        if !self.watch.compute(&mut self.server, graph)? {
            self.server.compute(graph)?;
        }
        Ok(())
    }
}

/// How many bytes a request asks for: behind the tensor and the offset stands their number, and perhaps how often.
fn asked(request: &[u8]) -> Option<u64> {
    let mut from = Cursor(request.get(TENSOR_BYTES + 8..)?);
    let bytes = from.u64().ok()?;
    bytes.checked_mul(from.u64().unwrap_or(1))
}
