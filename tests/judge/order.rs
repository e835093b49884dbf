//! What is computed before what is the graph's business: a graph in another order is run, cut, audited and judged in it.

use indexmap::IndexSet;
use parity::audit::{AuditRows, Options, audit};
use parity::checkpoint::{Checkpoint, Kind, usual_order};
use parity::compare::{self, Tolerances};
use parity::dump::{Kept, Recording};
use parity::faults::inject::inject;
use parity::model::Model;
use parity::report::Report;
use parity::verdict::{self, Parts};

use crate::support::runs::{model, run};

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
    let whole = run(&model, &model.graph, &TOKENS, TOKENS.len(), false);
    let part = run(&model, &model.graph.until(id("blk.1.q_rope")), &TOKENS, TOKENS.len(), false);
    let recorded: IndexSet<Checkpoint> = part.checkpoints().into_iter().collect();
    assert!(recorded.contains(&id("blk.1.v")) && !recorded.contains(&id("blk.1.attn_ctx")));
    let positions: Vec<u32> = (0..TOKENS.len() as u32).collect();
    for id in recorded {
        assert_eq!(part.gather(id, &positions), whole.gather(id, &positions), "{id}");
    }
}

/// The report of `candidate` against a healthy run of the same graph.
fn judged(model: &Model, candidate: &Kept) -> Report {
    let reference = run(model, &model.graph, &TOKENS, TOKENS.len(), false);
    let ids: Vec<Checkpoint> = model.graph.checkpoints().filter(|id| !id.kind().is_optional()).collect();
    let comparisons = compare::recordings(candidate, &reference, &ids, &Tolerances::default());
    let sides: [&dyn Recording; 2] = [candidate, &reference];
    let positions = AuditRows::All.positions(&candidate.manifest().steps);
    let wants = |id: Checkpoint| !id.kind().is_optional();
    let how = Options { positions: &positions, wants: &wants, isolated: false };
    let audits = audit(&sides, &model.gguf, &model.graph, &how).unwrap();
    let judgement = verdict::judge(model, &sides, &comparisons, Some(&audits)).unwrap();
    verdict::assemble(Parts { judgement, comparisons, ..Parts::default() })
}

#[test]
fn of_two_mistakes_the_first_is_the_one_that_is_computed_first() {
    let model = values_first();
    let mut graph = model.graph.clone();
    // In the order in which ids are listed, the query stands before the value.
    let specs = ["linear.no_bias@blk.0.q", "linear.no_bias@blk.0.v"].map(|spec| spec.parse().unwrap());
    inject(&mut graph, &specs, &model).unwrap();
    let report = judged(&model, &run(&model, &graph, &TOKENS, TOKENS.len(), false));
    assert_eq!(report.origins, ["blk.0.v", "blk.0.q"].map(id));
    assert_eq!(report.first_divergence.unwrap().checkpoint, id("blk.0.v"));
    let entry = |at: &str| report.checkpoints.iter().find(|entry| entry.id == id(at)).unwrap();
    let evidence = entry("blk.0.attn_ctx").evidence.clone().unwrap();
    assert!(evidence.contains("blk.0.v") && !evidence.contains("blk.0.q"), "{evidence}");
}
