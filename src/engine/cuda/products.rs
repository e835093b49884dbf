//! The launches of matrix products, with what comes before and after them.

use super::calls::{self, Address, Call, Follow, LinearData, LinearKernel, LinearPart, NormFirst, Pairs};
use super::layout::{ALIGNMENT, bytes_of};
use super::plan::Builder;
use super::schedule::{LinearNodes, LinearTask, Task};
use super::weights::Weights;
use crate::checkpoint::Kind;
use crate::engine::fused::graph::{Glu, Node, Op};
use crate::gguf::DType;

/// Which of the launches of matrix products that follow one has its weights brought nearer by it.
const LAUNCHES_AHEAD: usize = 2;
/// Bytes of weights that are brought nearer at most: half of what the second cache of a large GPU holds.
const PREFETCH_MAX: usize = 24 << 20;

/// Bytes of decoded weights that are kept at once where they can be: they are read from the second cache.
const UNPACKED_MAX: usize = 32 << 20;

/// Bytes that the weights of one launch take at most when they are decoded before it.
pub fn scratch_bytes(nodes: &[Node], tasks: &[Task], weights: &Weights) -> usize {
    let of = |task: &Task| match task {
        Task::Linear(task) => {
            task.parts.iter().map(|part| unpacked_bytes(&nodes[part.product], weights)).sum()
        }
        _ => 0,
    };
    tasks.iter().map(of).max().unwrap_or(0)
}

fn unpacked_bytes(node: &Node, weights: &Weights) -> usize {
    match &node.op {
        Op::Linear { weight, .. } if node.checkpoint.kind() != Kind::Logits => weights
            .matrix(weight)
            .filter(|weight| weight.dtype != DType::F16)
            .map_or(0, |weight| (2 * weight.outputs * weight.columns).next_multiple_of(ALIGNMENT)),
        _ => 0,
    }
}

impl Builder<'_> {
    /// What a launch of products before `later` brings nearer.
    pub(super) fn next_weights(&self, later: &[Task]) -> (Address, usize) {
        let products = later.iter().filter_map(|task| match task {
            Task::Linear(task) => Some(task),
            _ => None,
        });
        products.skip(LAUNCHES_AHEAD - 1).map(|task| self.weights_of(task)).next().unwrap_or_default()
    }

    /// The bytes of the weights that a task reads, as one range, or as much of it as is worth bringing nearer.
    fn weights_of(&self, task: &LinearTask) -> (Address, usize) {
        let weights = task.parts.iter().filter_map(|part| match &self.nodes[part.product].op {
            Op::Linear { weight, .. } => self.memory.weights.matrix(weight),
            _ => None,
        });
        let ranges: Vec<(Address, Address)> =
            weights.map(|weight| (weight.address, weight.address + weight.bytes() as Address)).collect();
        let start = ranges.iter().map(|range| range.0).min().unwrap_or(0);
        let end = ranges.iter().map(|range| range.1).max().unwrap_or(0);
        (start, ((end - start) as usize / 16 * 16).min(PREFETCH_MAX))
    }

    /// The products of one launch, and what comes right before it.
    pub(super) fn linear(&self, task: &LinearTask, next: (Address, usize)) -> Option<Vec<Call>> {
        let storage = self.numerics.storage;
        let node = &self.nodes[task.parts.first()?.product];
        let mut list: Vec<LinearPart> =
            task.parts.iter().map(|part| self.linear_part(part)).collect::<Option<_>>()?;
        if let Some(act) = task.act {
            list[0].pairs = Pairs::GateUp { out: self.address(self.nodes[act].checkpoint)? };
        }
        let norm = task.norm.map(|index| &self.nodes[index]);
        let x = match norm {
            Some(norm) => self.input(norm, 0)?,
            None => self.input(node, 0)?,
        };
        let norm = match norm {
            Some(node) => Some(self.norm_first(node)?),
            None => None,
        };
        let weight = list.first()?.weight;
        // The logits of the last row alone, unless all are wanted: same kernel, same bits.
        let rows = self.layout.places.get(&node.checkpoint)?.len / weight.outputs;
        let skipped = (self.rows - rows) * weight.columns * bytes_of(storage);
        let logits = node.checkpoint.kind() == Kind::Logits;
        let data = LinearData {
            kernel: LinearKernel::for_step(self.rows, storage, logits, self.memory.cores),
            x: x + skipped as Address,
            first: self.memory.first,
            rows,
            storage,
            kv: self.numerics.kv,
            out_f32: logits,
            norm,
            next,
            shared_max: self.memory.shared_max,
            constant: true,
        };
        Some(if data.kernel.takes_halves() {
            self.unpacked(task, list, data)
        } else {
            vec![calls::linear(&list, data)]
        })
    }

    /// Products of weights that are decoded first: together, unless they are too large to stay in the second cache.
    fn unpacked(&self, task: &LinearTask, mut list: Vec<LinearPart>, data: LinearData) -> Vec<Call> {
        let bytes: Vec<usize> = (task.parts.iter())
            .map(|part| unpacked_bytes(&self.nodes[part.product], self.memory.weights))
            .collect();
        let apart = bytes.iter().sum::<usize>() > UNPACKED_MAX;
        let data = LinearData { constant: bytes.iter().all(|bytes| *bytes == 0), ..data };
        let act = match list[0].pairs {
            Pairs::GateUp { out } if apart => {
                list[0].pairs = Pairs::Alone;
                Some(out)
            }
            _ => None,
        };
        let (mut calls, mut to) = (Vec::new(), self.memory.scratch);
        for (part, bytes) in list.iter_mut().zip(bytes) {
            if bytes > 0 {
                calls.push(calls::unpack(&part.weight, to));
                part.weight = calls::unpacked(&part.weight, to);
            }
            if apart {
                calls.push(calls::linear(&[*part], data));
            } else {
                to += bytes as Address;
            }
        }
        if !apart {
            calls.push(calls::linear(&list, data));
        }
        if let (Some(out), [gate, up, ..]) = (act, &list[..]) {
            let n = data.rows * gate.weight.outputs;
            calls.extend(calls::glu(Glu::SWIGLU, [gate.out, up.out, out], n, data.storage));
        }
        calls
    }

    fn norm_first(&self, node: &Node) -> Option<NormFirst> {
        let Op::Norm(norm) = &node.op else { return None };
        let weight = self.memory.weights.vector(&norm.weight, norm.width)?;
        Some(NormFirst { weight, out: self.address(node.checkpoint)?, eps: norm.eps })
    }

    fn linear_part(&self, part: &LinearNodes) -> Option<LinearPart> {
        let node = &self.nodes[part.product];
        let Op::Linear { weight, .. } = &node.op else { return None };
        let weight = self.memory.weights.matrix(weight)?;
        let out = self.address(node.checkpoint)?;
        let follow = match part.sum.map(|index| &self.nodes[index]) {
            None => Follow::Nothing,
            Some(next) => {
                let then = self.address(next.checkpoint)?;
                match &next.op {
                    Op::Bias { bias: Some(bias), times } => {
                        let bias = self.memory.weights.vector(bias, weight.outputs)?;
                        Follow::Bias { bias, times: *times, then }
                    }
                    Op::Add { scale } => {
                        Follow::Residual { residual: self.input(next, 1)?, scale: *scale, then }
                    }
                    _ => return None,
                }
            }
        };
        let pairs = match part.rope.map(|index| &self.nodes[index]) {
            Some(Node { op: Op::Rope(rope), checkpoint, .. }) => Pairs::Rotated {
                angles: self.memory.ropes.get(rope)?,
                head_width: rope.head_width,
                pairing: rope.pairing,
                out: self.address(*checkpoint)?,
            },
            _ => Pairs::Alone,
        };
        Some(LinearPart { weight, out, follow, cache: self.cache(self.nodes[part.last()].checkpoint), pairs })
    }
}
