//! A small ggml-rpc-server and a client of it, which norm token rows: what stands at both ends of a proxy where there is no
//! llama.cpp.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use parity::gguf::{DType, Gguf};
use parity::record::rpc::wire::{Reply, Version, WireGraph, WireTensor, command, shape};

/// How a server fails, and when: a number counts its answers to GET_TENSOR.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Flaw {
    None,
    /// Doubles every value that it multiplies.
    Doubled,
    /// Closes in the middle of an answer.
    Closes(usize),
    /// Says that an answer is of 2⁶² bytes.
    Absurd(usize),
}

/// The server's memory and what it was told.
struct Served {
    version: Version,
    flaw: Flaw,
    answers: usize,
    /// Bytes by the server's name for a buffer, which is its address too.
    buffers: HashMap<u64, Vec<u8>>,
    graphs: HashMap<(u32, u64), WireGraph>,
}

/// Serves every client of a port of this machine's, each in a thread of its own.
pub fn server(version: Version, flaw: Flaw) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut served =
                    Served { version, flaw, answers: 0, buffers: HashMap::new(), graphs: HashMap::new() };
                // A client that goes is the end of it.
                let _ = served.serve(stream);
            });
        }
    });
    address
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

fn received(stream: &mut TcpStream, n: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

impl Served {
    fn serve(&mut self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let head = received(&mut stream, 9)?;
            let request = received(&mut stream, number(&head[1..]) as usize)?;
            let reply = self.answer(head[0], &request);
            let quiet = head[0] != command::HELLO
                && !matches!(
                    shape(head[0], self.version).unwrap().reply,
                    Reply::Bytes(_) | Reply::Asked | Reply::Unsure
                );
            if quiet {
                continue;
            }
            self.answers += usize::from(head[0] == command::GET_TENSOR);
            let length = match self.flaw {
                Flaw::Absurd(n) if self.answers == n => 1 << 62,
                _ => reply.len() as u64,
            };
            let end = if self.flaw == Flaw::Closes(self.answers) { reply.len() / 2 } else { reply.len() };
            stream.write_all(&[&length.to_le_bytes(), &reply[..end]].concat())?;
            if end < reply.len() {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, number_of: u8, request: &[u8]) -> Vec<u8> {
        let tensor =
            |at: usize| WireTensor::read(&mut parity::record::rpc::wire::Cursor(&request[at..])).unwrap();
        match number_of {
            command::HELLO => {
                let Version { major, minor, patch } = self.version;
                let capable = [7; 25];
                [&[major, minor, patch][..], &capable[..if major > 3 { 25 } else { 0 }]].concat()
            }
            command::ALLOC_BUFFER => {
                let (bytes, name) = (number(&request[4..12]), (self.buffers.len() as u64 + 1) << 32);
                self.buffers.insert(name, vec![0; bytes as usize]);
                [name.to_le_bytes(), bytes.to_le_bytes()].concat()
            }
            command::GET_ALIGNMENT => 32u64.to_le_bytes().to_vec(),
            command::BUFFER_GET_BASE => request[..8].to_vec(),
            command::SET_TENSOR => {
                let begin = 296 + self.version.set_tensor_header();
                let offset = number(&request[begin - 8..begin]);
                self.memory(&tensor(0), offset, request.len() - begin).copy_from_slice(&request[begin..]);
                Vec::new()
            }
            command::GET_TENSOR => {
                let (offset, n) = (number(&request[296..304]), number(&request[304..312]));
                self.memory(&tensor(0), offset, n as usize).to_vec()
            }
            command::GRAPH_COMPUTE => {
                let graph = WireGraph::parse(request, self.version).unwrap();
                self.compute(&graph);
                if !self.version.has_uid() || graph.uid != 0 {
                    self.graphs.insert((graph.device, graph.uid), graph);
                }
                Vec::new()
            }
            command::GRAPH_RECOMPUTE => {
                let uid = if self.version.has_uid() { number(&request[4..12]) } else { 0 };
                let graph = self.graphs[&(number(&request[..4]) as u32, uid)].clone();
                self.compute(&graph);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn memory(&mut self, tensor: &WireTensor, offset: u64, n: usize) -> &mut [u8] {
        let begin = (tensor.data + offset - tensor.buffer) as usize;
        &mut self.buffers.get_mut(&tensor.buffer).unwrap()[begin..begin + n]
    }

    fn values(&mut self, tensor: &WireTensor) -> Vec<f32> {
        let n = tensor.bytes().unwrap() as usize;
        self.memory(tensor, 0, n).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// RMS norms and products by a row, in order.
    fn compute(&mut self, graph: &WireGraph) {
        let index = graph.indices();
        for &node in &graph.nodes {
            let node = &graph.tensors[node];
            let width = node.ne[0] as usize;
            let sources: Vec<&WireTensor> =
                node.src.iter().filter_map(|id| index.get(id)).map(|&at| &graph.tensors[at]).collect();
            let mut values = self.values(sources[0]);
            match node.op {
                25 => values.chunks_exact_mut(width).for_each(|row| {
                    let mean = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / width as f64;
                    let scale = 1.0 / (mean as f32 + f32::from_bits(node.params[0])).sqrt();
                    row.iter_mut().for_each(|x| *x *= scale);
                }),
                7 => {
                    let factor = self.values(sources[1]);
                    let by = if self.flaw == Flaw::Doubled { 2.0 } else { 1.0 };
                    values.iter_mut().zip(factor.iter().cycle()).for_each(|(x, f)| *x *= f * by);
                }
                op => panic!("op {op}"),
            }
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.memory(node, 0, bytes.len()).copy_from_slice(&bytes);
        }
    }
}

/// What a client sends.
pub struct Client {
    stream: TcpStream,
    version: Version,
    buffer: u64,
    epsilon: u32,
    gguf: Gguf,
    /// What the server answered to HELLO.
    pub hello: Vec<u8>,
}

impl Client {
    /// Shakes hands, and sends the weight of a norm.
    pub fn connect(address: &str, version: Version, model: &str) -> std::io::Result<Client> {
        let gguf = Gguf::open(model.as_ref()).unwrap();
        let epsilon: f32 = gguf.require("qwen2.attention.layer_norm_rms_epsilon").unwrap();
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(crate::rpc::PATIENCE))?;
        let mut client =
            Client { stream, version, buffer: 0, epsilon: epsilon.to_bits(), gguf, hello: Vec::new() };
        let capable = vec![9; if version.major > 3 { 24 } else { 0 }];
        let hello = client.ask(command::HELLO, &capable)?;
        assert_eq!(hello[..3], [version.major, version.minor, version.patch]);
        client.hello = hello;
        let reply = client
            .ask(command::ALLOC_BUFFER, &[&0u32.to_le_bytes()[..], &(1u64 << 20).to_le_bytes()].concat())?;
        client.buffer = number(&reply[..8]);
        let weight = client.gguf.tensor(NORM).unwrap().bytes.to_vec();
        client.set(&client.tensor(1, NORM, 0, [client.width(), 1]), &weight)?;
        Ok(client)
    }

    fn width(&self) -> u32 {
        self.gguf.tensor("token_embd.weight").unwrap().cols() as u32
    }

    pub fn send(&mut self, number: u8, request: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(&[&[number][..], &(request.len() as u64).to_le_bytes(), request].concat())
    }

    /// Begins a request of more bytes than come, and ends the connection.
    pub fn break_off(&mut self, number: u8, announced: u64, some: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(&[&[number][..], &announced.to_le_bytes(), some].concat())?;
        self.stream.shutdown(std::net::Shutdown::Write)
    }

    fn ask(&mut self, number_of: u8, request: &[u8]) -> std::io::Result<Vec<u8>> {
        self.send(number_of, request)?;
        let length = received(&mut self.stream, 8)?;
        received(&mut self.stream, number(&length) as usize)
    }

    fn tensor(&self, id: u64, name: &str, at: u64, ne: [u32; 2]) -> WireTensor {
        let leaf = WireTensor::leaf(name, DType::F32, [ne[1] as usize, ne[0] as usize]).unwrap();
        WireTensor { id, buffer: self.buffer, data: self.buffer + at, ..leaf }
    }

    fn set(&mut self, tensor: &WireTensor, values: &[u8]) -> std::io::Result<()> {
        let mut request = Vec::new();
        tensor.write(&mut request);
        request.resize(296 + self.version.set_tensor_header(), 0);
        request.extend(values);
        self.send(command::SET_TENSOR, &request)
    }

    /// Sends a weight that is not the file's.
    pub fn other_weight(&mut self) -> std::io::Result<()> {
        let mut weight = self.gguf.tensor(NORM).unwrap().bytes.to_vec();
        weight[5] ^= 1;
        self.set(&self.tensor(1, NORM, 0, [self.width(), 1]), &weight)
    }

    /// The graph of `rows` token rows: their norm, and its product with the weight in the norm's own memory.
    pub fn graph(&self, rows: u32, uid: u64) -> WireGraph {
        let ne = [self.width(), rows];
        let op = |id, name: &str, op, src: &[u64]| {
            let mut node = WireTensor { op, flags: 16, ..self.tensor(id, name, 1 << 19, ne) };
            node.src[..src.len()].copy_from_slice(src);
            node.params[0] = if op == 25 { self.epsilon } else { 0 };
            node
        };
        let tensors = vec![
            self.tensor(1, NORM, 0, [self.width(), 1]),
            self.tensor(2, "RPC0[127.0.0.1:1]#embd#0", 1 << 18, ne),
            op(3, "norm-0", 25, &[2]),
            op(4, "attn_norm-0", 7, &[3, 1]),
        ];
        WireGraph { device: 0, uid: if self.version.has_uid() { uid } else { 0 }, nodes: vec![2, 3], tensors }
    }

    /// Evaluates tokens; their normed rows. A graph that was sent is asked for `again`.
    pub fn evaluate(&mut self, tokens: &[u32], again: bool) -> std::io::Result<Vec<u8>> {
        let table = self.gguf.tensor("token_embd.weight").unwrap();
        let mut rows = vec![0f32; tokens.len() * table.cols()];
        for (row, &token) in rows.chunks_exact_mut(table.cols()).zip(tokens) {
            table.decode_rows(token as usize..token as usize + 1, row);
        }
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        let graph = self.graph(tokens.len() as u32, tokens.len() as u64);
        self.set(&graph.tensors[1], &bytes)?;
        if again {
            let uid = if self.version.has_uid() { graph.uid.to_le_bytes().to_vec() } else { Vec::new() };
            self.send(command::GRAPH_RECOMPUTE, &[&0u32.to_le_bytes()[..], &uid].concat())?;
        } else {
            self.send(command::GRAPH_COMPUTE, &graph.write(self.version))?;
        }
        let mut request = Vec::new();
        graph.tensors[3].write(&mut request);
        request.extend(0u64.to_le_bytes());
        request.extend((bytes.len() as u64).to_le_bytes());
        self.ask(command::GET_TENSOR, &request)
    }
}

const NORM: &str = "blk.0.attn_norm.weight";
