//! A graph as text, one tensor in each line: what is written beside recorded values, looked at, reported and tested.
//!
//! ```text
//! graph 4 of 7 on=CPU
//! GET_ROWS f32 256,5 < 4 5 : embd
//! RMS_NORM f32 256,5 eps=1e-06 < 0 : norm-0
//! VIEW f32 64,5 nb=4,1024,5120,5120 bytes=768 view=1+768 < 1 :
//! SOFT_MAX f32 64,5 scale=0.125 on=CUDA0 < 2 - 6 : probs
//! NONE q4_K 256,4096 : token_embd.weight
//! NONE i32 5 : inp_tokens
//! NONE f32 8 : sinks
//! ```
//!
//! Nodes stand in execution order, leaves behind them. After op, element type and extents (fastest axis first,
//! without ones at the end) come, each where it is needed: `nb` strides in bytes of what has gaps, the parameters
//! that are not zero by the names of [`crate::params`] and others as `w9=0x…`, `view` the tensor whose memory it lies
//! in and the offset in bytes, `idle` of a node that is never computed, `on` the backend where it is not the header's
//! (`-` for none). `<` lists sources by their line, `-` an empty slot; the name comes last.
//!
//! Texts from before parameters were recorded are read too: they have a bare `+OFFSET` of views, whose memory is
//! that of their first source, and `ggml_cast`'s mark, a source that is the tensor itself, which is an empty slot.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::graph::{Graph, MAX_SRC, Tensor, View, contiguous, element_size};
use crate::op::Op;
use crate::params::{Kind, Params, WORDS, field, fields};

/// Tensors of the largest graph that is read: ten times what the largest models known have.
const TENSORS_MAX: usize = 1 << 20;
/// Bytes of the largest tensor that is read.
const BYTES_MAX: usize = 1 << 48;

/// Writes a graph.
pub fn write(graph: &Graph) -> String {
    let home = home(graph);
    let mut text = format!("graph {} of {}", graph.nodes, graph.tensors.len());
    if let Some(home) = home {
        let _ = write!(text, " on={}", word(home));
    }
    text.push('\n');
    for (id, tensor) in graph.tensors.iter().enumerate() {
        write_tensor(&mut text, tensor, graph.is_leaf(id), home);
    }
    text
}

/// The backend of most nodes.
fn home(graph: &Graph) -> Option<&str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for backend in graph.tensors[..graph.nodes].iter().filter_map(|tensor| tensor.backend.as_deref()) {
        *counts.entry(backend).or_insert(0) += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(backend, _)| backend)
}

fn write_tensor(text: &mut String, tensor: &Tensor, leaf: bool, home: Option<&str>) {
    let dtype = if tensor.dtype.is_empty() { "?".to_owned() } else { word(&tensor.dtype) };
    let _ = write!(text, "{} {dtype} {}", word(tensor.op.name()), extents(&tensor.ne));
    if !tensor.is_contiguous() {
        let _ = write!(text, " nb={}", join(&tensor.nb));
    }
    *text += &params(&tensor.op, &tensor.params);
    if let Some(view) = tensor.view {
        let _ = write!(text, " view={}", view.root);
        if view.offset > 0 {
            let _ = write!(text, "+{}", view.offset);
        }
    }
    if !tensor.computed && !leaf {
        *text += " idle";
    }
    let usual = if leaf { None } else { home };
    if tensor.backend.as_deref() != usual {
        let _ = write!(text, " on={}", tensor.backend.as_deref().map_or("-".to_owned(), word));
    }
    if !tensor.srcs.is_empty() {
        *text += " <";
        for src in &tensor.srcs {
            let _ = match src {
                Some(src) => write!(text, " {src}"),
                None => write!(text, " -"),
            };
        }
    }
    // A name is the rest of its line.
    let name: String = tensor.name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let _ = writeln!(text, " : {name}");
}

/// Parameters of an op in words, each with a space in front: ` eps=1e-06`. Words that are zero are left out.
pub fn params(op: &Op, params: &Params) -> String {
    let mut text = String::new();
    for (index, &bits) in params.0.iter().enumerate().filter(|(_, bits)| **bits != 0) {
        let named = fields(op).iter().find(|field| field.word == index);
        let _ = match named {
            Some(field) if field.kind == Kind::Int => write!(text, " {}={}", field.name, bits as i32),
            Some(field) if !f32::from_bits(bits).is_nan() => {
                write!(text, " {}={}", field.name, float(f32::from_bits(bits)))
            }
            _ => write!(text, " w{index}={bits:#x}"),
        };
    }
    text
}

/// The shortest decimal that is read back as the same f32, with an exponent where it would be long: `1e-06`.
pub fn float(value: f32) -> String {
    let size = value.abs();
    if !value.is_finite() || value == 0.0 || (1e-4..1e16).contains(&size) {
        return value.to_string();
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// A word of foreign text, which may have no space within.
fn word(text: &str) -> String {
    text.chars().map(|c| if c.is_whitespace() || c.is_control() { '_' } else { c }).collect()
}

fn extents(ne: &[usize; 4]) -> String {
    let used = ne.iter().rposition(|value| *value != 1).map_or(1, |last| last + 1);
    join(&ne[..used])
}

fn join(values: &[usize]) -> String {
    values.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Reads the graphs of a text.
///
/// # Errors
/// The line that is none of a graph, or what of a graph contradicts itself.
pub fn read(text: &str) -> Result<Vec<Graph>, String> {
    let mut graphs: Vec<Read> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = || format!("line {}: `{}` is no tensor of a graph", number + 1, clipped(line));
        if let Some(header) = line.strip_prefix("graph ") {
            graphs.push(read_header(header).ok_or_else(wrong)?);
        } else {
            let open = graphs.last_mut().ok_or_else(wrong)?;
            let leaf = open.graph.tensors.len() >= open.graph.nodes;
            let (mut tensor, bare) = read_tensor(line, leaf, open.home.as_deref()).ok_or_else(wrong)?;
            // ggml_cast marks its result as a source of itself, as older texts show.
            let own = open.graph.tensors.len();
            tensor.srcs.iter_mut().for_each(|src| *src = src.filter(|src| *src != own));
            while tensor.srcs.last() == Some(&None) {
                tensor.srcs.pop();
            }
            open.bare.push(bare);
            open.graph.tensors.push(tensor);
            if open.graph.tensors.len() > open.announced {
                return Err(format!("line {}: more than {} tensors", number + 1, open.announced));
            }
        }
    }
    graphs
        .into_iter()
        .enumerate()
        .map(|(n, read)| read.finish().map_err(|e| format!("graph {n}: {e}")))
        .collect()
}

fn clipped(line: &str) -> String {
    let mut short: String = line.chars().take(120).collect();
    if short.len() < line.len() {
        short.push('…');
    }
    short
}

/// A graph while it is read.
struct Read {
    graph: Graph,
    announced: usize,
    home: Option<String>,
    /// Offset of each view that did not say in what.
    bare: Vec<Option<usize>>,
}

fn read_header(header: &str) -> Option<Read> {
    let mut words = header.split(' ');
    let nodes = words.next()?.parse().ok()?;
    let announced = match (words.next(), words.next()) {
        (Some("of"), Some(count)) => count.parse().ok()?,
        _ => return None,
    };
    let home = match words.next() {
        Some(word) => Some(word.strip_prefix("on=")?.to_owned()),
        None => None,
    };
    let sound = announced <= TENSORS_MAX && nodes <= announced && words.next().is_none();
    sound.then(|| Read { graph: Graph { tensors: Vec::new(), nodes }, announced, home, bare: Vec::new() })
}

impl Read {
    fn finish(mut self) -> Result<Graph, String> {
        if self.graph.tensors.len() != self.announced {
            return Err(format!("{} tensors, {} were announced", self.graph.tensors.len(), self.announced));
        }
        check_sources(&self.graph)?;
        for (id, bare) in self.bare.iter().enumerate() {
            let tensor = &self.graph.tensors[id];
            if tensor.view.is_none() && (tensor.op.is_view() || bare.is_some()) && !tensor.srcs.is_empty() {
                let base = self.graph.storage(id);
                let root = self.graph.root(base);
                if root != id {
                    self.graph.tensors[id].view = Some(View { root, offset: bare.unwrap_or(0) });
                }
            }
        }
        check_views(&self.graph)?;
        Ok(self.graph)
    }
}

fn check_sources(graph: &Graph) -> Result<(), String> {
    for (id, tensor) in graph.tensors.iter().enumerate() {
        for src in tensor.srcs.iter().flatten().copied() {
            // A node reads what was computed before it, or a leaf.
            let before = src < id || graph.is_leaf(src);
            if src >= graph.tensors.len() || !before {
                return Err(format!("tensor {id} reads tensor {src}, which does not stand before it"));
            }
        }
    }
    Ok(())
}

fn check_views(graph: &Graph) -> Result<(), String> {
    for (id, tensor) in graph.tensors.iter().enumerate() {
        let Some(view) = tensor.view else { continue };
        let root = graph.tensors.get(view.root).filter(|root| root.view.is_none() && view.root != id);
        let Some(root) = root else {
            return Err(format!("tensor {id} is a view of {}, which has no memory of its own", view.root));
        };
        let (Some(size), Some(root_size)) = (element_size(&tensor.dtype), element_size(&root.dtype)) else {
            continue;
        };
        let last: usize = tensor.ne.iter().zip(tensor.nb).map(|(n, nb)| n.saturating_sub(1) * nb).sum();
        if tensor.elements() > 0 && view.offset.saturating_add(last + size) > root.elements() * root_size {
            return Err(format!("tensor {id} reaches beyond the end of tensor {}", view.root));
        }
    }
    Ok(())
}

/// A tensor, and the offset of a view that does not say in what.
fn read_tensor(line: &str, leaf: bool, home: Option<&str>) -> Option<(Tensor, Option<usize>)> {
    let (fields, name) = line.split_once(" : ")?;
    let (fields, srcs) = fields.split_once(" < ").unwrap_or((fields, ""));
    let mut words = fields.split(' ');
    let (op, dtype) = (Op::parse(words.next()?), words.next().filter(|dtype| !dtype.is_empty())?);
    let dtype = if dtype == "?" { "" } else { dtype };
    let ne = read_extents(words.next()?)?;
    let mut tensor = Tensor {
        name: name.to_owned(),
        op,
        params: Params::default(),
        dtype: dtype.to_owned(),
        ne,
        nb: contiguous(dtype, ne),
        srcs: read_sources(srcs)?,
        view: None,
        computed: true,
        backend: home.filter(|_| !leaf).map(str::to_owned),
    };
    let mut bare = None;
    for word in words {
        if let Some(offset) = word.strip_prefix('+') {
            bare = Some(bounded(offset)?);
        } else {
            read_word(&mut tensor, word, leaf)?;
        }
    }
    let spans =
        tensor.ne.iter().zip(tensor.nb).try_fold(0usize, |sum, (n, nb)| sum.checked_add(n.checked_mul(nb)?));
    spans.filter(|bytes| *bytes <= BYTES_MAX)?;
    Some((tensor, bare))
}

fn read_word(tensor: &mut Tensor, word: &str, leaf: bool) -> Option<()> {
    if word == "idle" && !leaf {
        tensor.computed = false;
        return Some(());
    }
    let (key, value) = word.split_once('=')?;
    match key {
        "nb" => {
            let mut strides = value.split(',');
            for nb in &mut tensor.nb {
                // Texts from before give fewer where the last ones repeat.
                let Some(word) = strides.next() else { break };
                *nb = bounded(word)?;
            }
            strides.next().is_none().then_some(())
        }
        "view" => {
            let (root, offset) = value.split_once('+').unwrap_or((value, "0"));
            tensor.view = Some(View { root: bounded(root)?, offset: bounded(offset)? });
            Some(())
        }
        "on" => {
            tensor.backend = (value != "-").then(|| value.to_owned());
            Some(())
        }
        _ => read_param(tensor, key, value),
    }
}

fn read_param(tensor: &mut Tensor, key: &str, value: &str) -> Option<()> {
    let (word, bits) = match field(&tensor.op, key) {
        Some(field) if field.kind == Kind::Int => (field.word, value.parse::<i32>().ok()? as u32),
        Some(field) => (field.word, value.parse::<f32>().ok()?.to_bits()),
        None => {
            let word = key.strip_prefix('w')?.parse::<usize>().ok().filter(|word| *word < WORDS)?;
            (word, u32::from_str_radix(value.strip_prefix("0x")?, 16).ok()?)
        }
    };
    tensor.params.0[word] = bits;
    Some(())
}

fn read_sources(text: &str) -> Option<Vec<Option<usize>>> {
    let words = text.split(' ').filter(|src| !src.is_empty());
    let srcs: Vec<Option<usize>> = words
        .map(|src| if src == "-" { Some(None) } else { bounded(src).map(Some) })
        .collect::<Option<_>>()?;
    (srcs.len() <= MAX_SRC && srcs.last() != Some(&None)).then_some(srcs)
}

fn read_extents(text: &str) -> Option<[usize; 4]> {
    let mut ne = [1; 4];
    let mut words = text.split(',');
    for (value, word) in ne.iter_mut().zip(words.by_ref()) {
        *value = bounded(word)?;
    }
    let elements = ne.iter().try_fold(1usize, |product, n| product.checked_mul(*n))?;
    (words.next().is_none() && elements <= BYTES_MAX).then_some(ne)
}

fn bounded(text: &str) -> Option<usize> {
    text.parse().ok().filter(|value| *value <= BYTES_MAX)
}
