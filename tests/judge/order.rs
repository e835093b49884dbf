//! What is computed before what is the graph's business: a graph in another order is run, cut, audited and judged in it.

use std::collections::HashMap;
use std::path::Path;

use parity::audit::AuditRows;
use parity::checkpoint::{Checkpoint, Kind, usual_order};
use parity::engine::device::Device;
use parity::engine::fused::Model;
use parity::engine::fused::cpu::CpuEngine;
use parity::engine::fused::file::ModelFile;
use parity::engine::fused::graph::Graph;
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::jobs::run::{RunOptions, run as run_report};
use parity::numerics::Numerics;
use parity::report::Report;

use crate::support::runs::model;

const TOKENS: [u32; 5] = [9, 270, 33, 1200, 45];

/// A healthy model that computes values first, then keys, then queries.
fn values_first() -> Model {
    let mut model = model("qwen2-tiny-py-F16.gguf").unwrap();
    let place = |kind: Kind| match kind {
        Kind::VProj | Kind::V => 1,
        Kind::KProj | Kind::K | Kind::KRope => 2,
        Kind::QProj | Kind::Q | Kind::QRope => 3,
        Kind::AttnNorm => 0,
        _ => 4,
    };
    let layers = u32::try_from(model.config.dims.layers).unwrap();
    let part = |id: Checkpoint| match id.kind() {
        Kind::Embed => 0,
        _ => 1 + id.layer_index().unwrap_or(layers),
    };
    model.graph.nodes.sort_by_key(|node| (part(node.checkpoint), place(node.checkpoint.kind())));
    model
}

/// What an engine shows of one step.
#[derive(Default)]
struct Shown(HashMap<Checkpoint, Vec<f32>>);

impl Shown {
    fn by(model: &Model, graph: &Graph) -> Shown {
        let mut shown = Shown::default();
        let mut engine = CpuEngine::<f32>::new(&model.gguf, graph.clone(), Numerics::default());
        engine.step(&Batch { tokens: &TOKENS, first: 0 }, &mut shown).unwrap();
        shown
    }
}

impl Probe for Shown {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        !checkpoint.kind().is_optional()
    }

    fn record(&mut self, id: Checkpoint, _: &Batch<'_>, _: &[usize], values: Values<'_>) -> Result<()> {
        let Values::F32(values) = values else { panic!("the engine computes in f32") };
        self.0.insert(id, values.to_vec());
        Ok(())
    }
}

fn id(text: &str) -> Checkpoint {
    text.parse().unwrap()
}

#[test]
fn a_graph_is_cut_where_it_stands_and_not_where_a_name_would() {
    let model = values_first();
    let order: Vec<Checkpoint> = model.graph.checkpoints().collect();
    assert_ne!(order, usual_order(order.iter().copied()), "this order is another one");
    let cut: Vec<Checkpoint> = model.graph.until(id("blk.0.v")).checkpoints().collect();
    assert_eq!(cut, ["embed", "blk.0.attn_norm", "blk.0.v_proj", "blk.0.v"].map(id));
    let wanted = ["blk.0.v", "blk.0.q_rope", "blk.0.k_rope"].map(id);
    assert_eq!(model.graph.last_of(|id| wanted.contains(&id)), Some(id("blk.0.q_rope")));
    assert_eq!(model.graph.last_of(|_| false), None);
    // What the cut needs is in it: it runs, and its values are those of the whole.
    let whole = Shown::by(&model, &model.graph);
    let part = Shown::by(&model, &model.graph.until(id("blk.1.q_rope")));
    assert!(part.0.contains_key(&id("blk.1.v")) && !part.0.contains_key(&id("blk.1.attn_ctx")));
    for (id, values) in &part.0 {
        assert_eq!(Some(values), whole.0.get(id), "{id}");
    }
}

/// The report of a run with these mistakes against a healthy one.
fn judged(mistakes: &[&str]) -> Report {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf");
    let file = ModelFile::open(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (healthy, tokens) = (folder.path().join("healthy"), TOKENS.to_vec());
    let of_reference =
        RunOptions { tokens, dump: Some(healthy.clone()), device: Device::Cpu, ..RunOptions::default() };
    run_report(&file, &of_reference, &|_, _| ()).unwrap();
    let options = RunOptions {
        reference: Some(healthy),
        device: Device::Cpu,
        audit: Some(AuditRows::All),
        inject: mistakes.iter().map(|spec| spec.parse().unwrap()).collect(),
        ..RunOptions::default()
    };
    run_report(&file, &options, &|_, _| ()).unwrap()
}

#[test]
fn of_two_mistakes_the_first_is_the_one_that_is_computed_first() {
    // llama.cpp's graph computes values before keys; in the order in which ids are listed keys stand first.
    let ids = ["blk.0.k", "blk.0.v"].map(id);
    assert_eq!(usual_order(ids.into_iter()), ids);
    let report = judged(&["linear.no_bias@blk.0.k", "linear.no_bias@blk.0.v"]);
    assert_eq!(report.origins, ["blk.0.v", "blk.0.k"].map(id));
    assert_eq!(report.first_divergence.unwrap().checkpoint, id("blk.0.v"));
    let entry = |at: &str| report.checkpoints.iter().find(|entry| entry.id == id(at)).unwrap();
    let evidence = entry("blk.0.attn_ctx").evidence.clone().unwrap();
    assert!(evidence.contains("blk.0.v") && !evidence.contains("blk.0.k"), "{evidence}");
}
