//! A graph as text, one tensor in each line: what the mapping sees of it, to be looked at, reported and tested.
//!
//! ```text
//! graph 3 of 5
//! GET_ROWS f32 256,5 < 3 4 : embd
//! RMS_NORM f32 256,5 < 0 : norm-0
//! VIEW f32 64,5 nb=4,1024 +768 < 1 :
//! NONE q4_K 256,4096 : token_embd.weight
//! NONE i32 5 : inp_tokens
//! ```
//!
//! Nodes stand in execution order, leaves behind them; `<` lists sources by their line. Strides are given where
//! they are not those of a tensor without gaps, `+` is a view's offset in bytes, `idle` a node that is never
//! computed. Strides of leaves are left out.

use std::fmt::Write;

use crate::graph::{Graph, Op, Tensor};

/// Writes a graph.
pub fn write(graph: &Graph) -> String {
    let mut text = format!("graph {} of {}\n", graph.nodes, graph.tensors.len());
    for (id, tensor) in graph.tensors.iter().enumerate() {
        let _ = write!(text, "{} {} {}", tensor.op.name(), tensor.dtype, numbers(&tensor.ne, 1));
        let plain = contiguous(&tensor.dtype, tensor.ne);
        if !graph.is_leaf(id) && tensor.nb != plain {
            let _ = write!(text, " nb={}", numbers(&tensor.nb, usize::MAX));
        }
        if tensor.view_offset > 0 {
            let _ = write!(text, " +{}", tensor.view_offset);
        }
        if !tensor.computed && !graph.is_leaf(id) {
            text += " idle";
        }
        if !tensor.srcs.is_empty() {
            text += " <";
        }
        for src in &tensor.srcs {
            let _ = write!(text, " {src}");
        }
        let _ = writeln!(text, " : {}", tensor.name);
    }
    text
}

/// Numbers with commas, without `idle` ones at the end.
fn numbers(values: &[usize; 4], idle: usize) -> String {
    let used = values.iter().rposition(|value| *value != idle).map_or(1, |last| last + 1);
    values[..used].iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Strides of a tensor without gaps; those of quantised types, which only leaves have, are not known.
fn contiguous(dtype: &str, ne: [usize; 4]) -> [usize; 4] {
    let size: usize = match dtype {
        "f16" | "bf16" | "i16" => 2,
        "i64" => 8,
        _ => 4,
    };
    let mut nb = [size; 4];
    for axis in 1..4 {
        nb[axis] = nb[axis - 1].saturating_mul(ne[axis - 1]);
    }
    nb
}

/// Reads the graphs of a text.
///
/// # Errors
/// The line that is none of a graph.
pub fn read(text: &str) -> Result<Vec<Graph>, String> {
    let mut graphs: Vec<Graph> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = || format!("line {}: `{line}` is no tensor of a graph", number + 1);
        if let Some(header) = line.strip_prefix("graph ") {
            let nodes = header.split(' ').next().and_then(|nodes| nodes.parse().ok()).ok_or_else(wrong)?;
            graphs.push(Graph { tensors: Vec::new(), nodes });
        } else {
            let graph = graphs.last_mut().ok_or_else(wrong)?;
            graph.tensors.push(tensor(line).ok_or_else(wrong)?);
        }
    }
    for graph in &graphs {
        let known = |tensor: &Tensor| tensor.srcs.iter().all(|src| *src < graph.tensors.len());
        if graph.nodes > graph.tensors.len() || !graph.tensors.iter().all(known) {
            return Err("a graph with fewer tensors than it speaks of".to_owned());
        }
    }
    Ok(graphs)
}

fn tensor(line: &str) -> Option<Tensor> {
    let (fields, name) = line.split_once(" : ")?;
    let (fields, srcs) = fields.split_once(" < ").unwrap_or((fields, ""));
    let mut words = fields.split(' ');
    let (op, dtype) = (Op::parse(words.next()?), words.next()?.to_owned());
    let ne = four(words.next()?, 1)?;
    let mut tensor = Tensor {
        name: name.to_owned(),
        op,
        nb: contiguous(&dtype, ne),
        dtype,
        ne,
        srcs: srcs
            .split(' ')
            .filter(|src| !src.is_empty())
            .map(|src| src.parse().ok())
            .collect::<Option<_>>()?,
        view_offset: 0,
        computed: true,
    };
    for word in words {
        match (word.strip_prefix("nb="), word.strip_prefix('+')) {
            (Some(strides), _) => tensor.nb = four(strides, usize::MAX)?,
            (_, Some(offset)) => tensor.view_offset = offset.parse().ok()?,
            _ if word == "idle" => tensor.computed = false,
            _ => return None,
        }
    }
    Some(tensor)
}

fn four(text: &str, idle: usize) -> Option<[usize; 4]> {
    let mut values = [idle; 4];
    let mut words = text.split(',');
    for (value, word) in values.iter_mut().zip(words.by_ref()) {
        *value = word.parse().ok()?;
    }
    words.next().is_none().then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_what_was_read_gives_the_same_text() {
        let text = "graph 3 of 5\n\
                    GET_ROWS f32 256,5 < 3 4 : embd\n\
                    SWIGLU f32 256,5 idle < 0 : norm-0 (copy)\n\
                    VIEW f32 64,5 nb=4,1024,5120,5120 +768 < 1 : \n\
                    NONE q4_K 256,4096 : token_embd.weight\n\
                    NONE i32 5 : inp_tokens\n";
        let graphs = read(&text.repeat(2)).unwrap();
        assert_eq!(graphs.len(), 2);
        assert_eq!(write(&graphs[1]), text);
        assert!(!graphs[0].tensors[1].computed && graphs[0].tensors[2].view_offset == 768);
    }

    #[test]
    fn what_is_no_graph_is_an_error() {
        for text in [
            "ADD f32 1 : x",
            "graph 1 of 1\nADD f32 : x",
            "graph 1 of 1\nADD f32 1 < 1 : x",
            "graph 2 of 1\nADD f32 1 : x",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
