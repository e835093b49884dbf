//! Rows of products with weights that wait for those of later steps: a weight is decoded once for all of them.
//!
//! A decode step has one row, and to judge it costs a pass over the weight; so it does for fifty. Rows that may have been
//! computed in the same arithmetics are judged together, as if they were of one step: rows of steps of one size, since by
//! that an engine chooses its kernel. (All sizes were judged together, and an engine accused that rounds weights to f16 in
//! its prefill and not in its decode steps.)

use indexmap::IndexMap;
use parity_graph::{Op, Params};

use super::audit_rows::AuditRows;
use super::devices::Devices;
use super::node::{Hypothesis, Sight};
use super::sample::judge_sampled;
use super::tokens::axes;
use super::{Arrangement, Findings, Tensor};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::Node;
use crate::gguf::{DType, Gguf};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided};
use crate::watch;

/// Rows of a step up to which they wait: of more of them a pass over the weight is worth its while.
const ROWS_MAX: usize = 64;
/// Bytes from which nothing waits any longer.
const BYTES_MAX: usize = 256 << 20;

/// What waits, by node, by the rows of a step and by what they may have been computed in.
#[derive(Default)]
pub struct Pending {
    nodes: IndexMap<(Checkpoint, usize, Vec<Arithmetic>), Waiting>,
    bytes: usize,
}

/// Rows of a node.
struct Waiting {
    rule: &'static Rule,
    name: String,
    params: Params,
    weight: String,
    backend: Option<String>,
    dtype: DType,
    tried: Vec<Hypothesis>,
    /// By slot, the rows that each token reads.
    sources: Vec<Option<Rows>>,
    /// Of the result: with as many tokens as there are.
    shape: [usize; 4],
    recorded: Vec<f32>,
    positions: Vec<u32>,
}

/// Rows of a source.
struct Rows {
    dtype: DType,
    shape: [usize; 4],
    values: Vec<f32>,
}

/// Values that are numbers of f32, as all that was recorded are.
fn single(values: &[f64]) -> Option<Vec<f32>> {
    values.iter().map(|&value| Some(value as f32).filter(|single| f64::from(*single) == value)).collect()
}

impl Pending {
    /// Takes the rows of a node, all of which were `recorded`; `false` where they cannot wait.
    pub fn takes(
        &mut self,
        node: &Node<'_>,
        checkpoint: Checkpoint,
        args: &Args<'_, f64>,
        recorded: &Tensor,
        tried: &[Hypothesis],
    ) -> bool {
        let tensor = node.program.graph.get(node.id);
        let is_product = matches!(tensor.op, Op::MulMat | Op::MulMatId);
        let Some((rule, (axis, slots))) = node.rule.zip(axes(&tensor.op, args)).filter(|_| is_product) else {
            return false;
        };
        let rows = args.shape[axis];
        let is_alone = args.shape[..axis].iter().product::<usize>() == 1;
        let is_whole = recorded.positions.len() == rows && recorded.values.len() == args.elements();
        let reads = node.carried.iter().all(Option::is_none) && !tried.is_empty();
        let weight = args.get(0).filter(|source| matches!(source.data, Data::Weight(_)));
        let name = node.program.graph.src(node.id, 0).map(|id| &node.program.graph.get(id).name);
        let (true, Some(name), Some(_)) = (is_alone && is_whole && reads && rows <= ROWS_MAX, name, weight)
        else {
            return false;
        };
        let mut sources: Vec<Option<Rows>> = Vec::new();
        for (slot, source) in args.sources.iter().enumerate() {
            let Some(source) = source.as_ref().filter(|_| slots.iter().any(|(known, _)| *known == slot))
            else {
                sources.push(None);
                continue;
            };
            let Some(values) = single(&source.values()) else { return false };
            let along = slots.iter().find(|(known, _)| *known == slot).map_or(0, |(_, axis)| *axis);
            if source.shape()[..along].iter().product::<usize>() != 1 {
                return false;
            }
            sources.push(Some(Rows { dtype: source.dtype, shape: source.shape(), values }));
        }
        let read: usize = sources.iter().flatten().map(|rows| rows.values.len()).sum();
        self.bytes += size_of::<f32>() * (read + recorded.values.len());
        let key = (checkpoint, rows, tried.iter().map(|one| one.arithmetic).collect());
        let waiting = self.nodes.entry(key).or_insert_with(|| Waiting {
            rule,
            name: args.name.to_owned(),
            params: *args.params,
            weight: name.clone(),
            backend: tensor.backend.clone(),
            dtype: args.dtype,
            tried: tried.to_vec(),
            sources: sources
                .iter()
                .enumerate()
                .map(|(slot, rows)| rows.as_ref().map(|rows| rows.none(slot, slots)))
                .collect(),
            shape: std::array::from_fn(|at| if at == axis { 0 } else { args.shape[at] }),
            recorded: Vec::new(),
            positions: Vec::new(),
        });
        for (slot, (known, new)) in waiting.sources.iter_mut().zip(sources).enumerate() {
            if let (Some(known), Some(new)) = (known, new) {
                known.add(new, slot, slots);
            }
        }
        waiting.shape[axis] += rows;
        waiting.recorded.extend(&recorded.values);
        waiting.positions.extend(&recorded.positions);
        true
    }

    /// Whether it is time to judge.
    pub fn is_full(&self) -> bool {
        self.bytes > BYTES_MAX
    }

    /// Judges what waits.
    pub fn judge(&mut self, gguf: &Gguf, rows: AuditRows, findings: &mut Findings, devices: &mut Devices) {
        for ((checkpoint, ..), waiting) in std::mem::take(&mut self.nodes) {
            if let Some(late) = watch::over() {
                findings.at(checkpoint).late = Some(late);
                continue;
            }
            watch::at(|| checkpoint.to_string(), || None);
            waiting.judge(checkpoint, gguf, rows, findings, devices);
        }
        self.bytes = 0;
    }
}

impl Rows {
    /// None of them.
    fn none(&self, slot: usize, slots: &[(usize, usize)]) -> Rows {
        let mut shape = self.shape;
        slots.iter().filter(|(known, _)| *known == slot).for_each(|(_, axis)| shape[*axis] = 0);
        Rows { dtype: self.dtype, shape, values: Vec::new() }
    }

    fn add(&mut self, new: Rows, slot: usize, slots: &[(usize, usize)]) {
        slots.iter().filter(|(known, _)| *known == slot).for_each(|(_, axis)| {
            self.shape[*axis] += new.shape[*axis];
        });
        self.values.extend(new.values);
    }
}

impl Waiting {
    fn judge(
        self,
        checkpoint: Checkpoint,
        gguf: &Gguf,
        rows: AuditRows,
        findings: &mut Findings,
        devices: &mut Devices,
    ) {
        let Some(weight) = gguf.tensor(&self.weight) else { return };
        let double = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
        let values: Vec<Option<Vec<f64>>> =
            self.sources.iter().map(|rows| rows.as_ref().map(|rows| double(&rows.values))).collect();
        let sources = self.sources.iter().zip(&values).enumerate().map(|(slot, both)| match both {
            (Some(rows), Some(values)) => {
                let data = Data::Values(Strided::whole(values, rows.shape));
                Some(Source { dtype: rows.dtype, data })
            }
            _ => (slot == 0).then_some(Source { dtype: weight.info.dtype, data: Data::Weight(weight) }),
        });
        let arithmetic = &Arithmetic::LLAMA_CPU;
        let (name, params, shape, dtype) = (&self.name[..], &self.params, self.shape, self.dtype);
        let sources = sources.collect();
        let args = Args { name, params, sources, shape, dtype, arithmetic, tokens: None };
        let Some((axis, _)) = axes(&self.rule.op, &args) else { return };
        let recorded = double(&self.recorded);
        let row = Some(shape[axis + 1..].iter().product());
        let sight = Sight { looked_at: &|_| true, carried: &[], row, norm: None };
        let tried = devices.likely(self.backend.as_deref(), &args, self.tried);
        let held = judge_sampled(self.rule, &args, &recorded, &sight, &tried, rows);
        match held {
            Ok(held) => {
                let backend = self.backend.as_deref();
                devices.note(checkpoint, backend, (self.rule, &args), (&recorded, &sight), &held);
                let count = self.positions.len();
                findings.at(checkpoint).add(
                    held,
                    &Arrangement::of_tokens(shape, axis, self.positions),
                    count,
                );
            }
            Err(unknown) => findings.at(checkpoint).cannot(&unknown.reason),
        }
    }
}
