//! Engines that declare nothing and leave nodes out: what stands between was computed all the same, and the values show in
//! what.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use half::bf16;
use parity::audit::Findings;
use parity::checkpoint::Kind;
use parity_dump::manifest::Producer;
use parity_dump::{Dump, Writer};
use tempfile::TempDir;

use crate::support::audited::{F16, Q4, audit_all, id, model, origins, recorded, run, run_of};
use crate::support::program;
use crate::support::samples::sample;

/// The same steps with some checkpoints left out, values mapped, and a producer that declares nothing.
fn foreign(dump: &Path, keep: impl Fn(Kind) -> bool, map: impl Fn(f32) -> f32) -> (TempDir, PathBuf) {
    let (from, folder) = (Dump::open(dump).unwrap(), tempfile::tempdir().unwrap());
    let path = folder.path().join("dump");
    let producer = Producer { name: "other".to_owned(), ..Producer::default() };
    let mut writer = Writer::create(&path, producer, from.manifest().model.clone()).unwrap();
    for (number, step) in from.manifest().steps.iter().enumerate() {
        let tokens: Vec<u32> = step.positions.iter().map(|p| from.tokens()[*p as usize]).collect();
        writer.begin_step(&tokens, &step.positions, from.checkpoints().count()).unwrap();
        for checkpoint in from.checkpoints().filter(|checkpoint| keep(checkpoint.kind())) {
            let (shape, _, mut values) = from.in_step(number, checkpoint).unwrap();
            values.iter_mut().for_each(|x| *x = map(*x));
            writer.tensor_f32(checkpoint, &shape, &values).unwrap();
        }
        writer.end_step().unwrap();
    }
    writer.finish().unwrap();
    (folder, path)
}

/// What hooks on the modules of a Python implementation record.
fn hooked(kind: Kind) -> bool {
    use Kind::{AttnResidual, FfnAct, KProj, QProj, VProj};
    !matches!(kind, QProj | KProj | VProj | AttnResidual | FfnAct)
}

/// The nodes that were crossed to a node, of those that any engine has.
fn bridged(findings: &Findings, at: &str) -> Vec<String> {
    let bridged = findings.nodes[&id(at)].bridged.iter();
    bridged.filter(|id| id.kind().is_fixed()).map(ToString::to_string).collect()
}

#[test]
fn nodes_are_bridged_where_a_recording_lacks_what_stands_between() {
    let gguf = model(F16);
    let (_whole, whole) = run(F16, &[]);
    let (_folder, dump) = foreign(&whole, hooked, |x| x);
    let findings = audit_all(&dump, &gguf);
    assert_eq!(origins(&findings), Vec::<String>::new());
    for checkpoint in recorded(&dump, &gguf) {
        let finding = &findings.nodes[&checkpoint];
        assert!(finding.judged > 0 && finding.undecided.is_none(), "{checkpoint}: {:?}", finding.undecided);
    }
    assert_eq!(bridged(&findings, "blk.1.q"), ["blk.1.q_proj"]);
    assert_eq!(bridged(&findings, "blk.1.ffn_norm"), ["blk.1.attn_residual"]);
    assert_eq!(bridged(&findings, "blk.1.ffn_out"), ["blk.1.ffn_act"]);

    // A mistake inside of a bridge shows at its end.
    let (_faulty, faulty) = run(F16, &["--inject", "ffn.gelu@2"]);
    let (_folder, dump) = foreign(&faulty, hooked, |x| x);
    assert_eq!(origins(&audit_all(&dump, &gguf)), ["blk.2.ffn_out"]);
}

/// Attention too is computed across, between the ends of layers; what rounding explains between them is simulated.
#[test]
fn layers_are_bridged_where_their_ends_alone_were_recorded() {
    let gguf = model(F16);
    let ends = |kind: Kind| matches!(kind, Kind::Embed | Kind::LayerOut);
    let (_whole, whole) = run(F16, &[]);
    let (_folder, dump) = foreign(&whole, ends, |x| x);
    let findings = audit_all(&dump, &gguf);
    assert_eq!(origins(&findings), Vec::<String>::new());
    let finding = &findings.nodes[&id("blk.1.layer_out")];
    assert!(finding.judged > 0 && finding.undecided.is_none() && !finding.is_blind(), "{finding:?}");
    assert!(bridged(&findings, "blk.1.layer_out").contains(&"blk.1.attn_ctx".to_owned()), "{finding:?}");

    let (_faulty, faulty) = run(F16, &["--inject", "attn.no_scale@1"]);
    let (_folder, dump) = foreign(&faulty, ends, |x| x);
    assert_eq!(origins(&audit_all(&dump, &gguf)), ["blk.1.layer_out"]);
}

/// What an engine of f32 gives with a mistake in all layers is also what products of bf16 might: it is told by what is left.
#[test]
fn a_mistake_in_plain_arithmetic_is_preferred_to_a_coarser_one_that_nobody_declared() {
    let ends: fn(Kind) -> bool = |kind| matches!(kind, Kind::Embed | Kind::LayerOut);
    let more: fn(Kind) -> bool =
        |kind| matches!(kind, Kind::Embed | Kind::LayerOut | Kind::FinalNorm | Kind::Logits);
    let mistakes = [("norm.eps=1e-5", "norm.eps"), ("rope.base=500000", "rope.base")];
    let cases = [(mistakes[0], ends), (mistakes[0], more), (mistakes[1], more), (mistakes[1], ends)];
    for ((mistake, of_first), keep) in sample("mistakes and checkpoints", 1, cases) {
        let (_faulty, faulty) = run(F16, &["--numerics", "f32", "--inject", mistake]);
        let (_folder, dump) = foreign(&faulty, keep, |x| x);
        let audited = program::audit(&dump, Path::new(F16), &["--allow-missing"]);
        let first = &audited.report["first_divergence"];
        assert_eq!((audited.code, audited.first.as_str()), (1, "blk.0.layer_out"), "{mistake}: {first}");
        assert_eq!(first["diagnosis"][0]["fault"], of_first, "{mistake}: {first}");
    }
    // Engines whose products are coarser are not accused, whatever mistake comes near.
    let healthy = ["f32", "llama-cpu", "f16", "bf16"].map(|numerics| [(numerics, ends), (numerics, more)]);
    for (numerics, keep) in sample("arithmetics and checkpoints", 1, healthy.into_iter().flatten()) {
        let (_whole, whole) = run(F16, &["--numerics", numerics]);
        let (_folder, dump) = foreign(&whole, keep, |x| x);
        let audited = program::audit(&dump, Path::new(F16), &["--allow-missing"]);
        assert_ne!(audited.code, 1, "{numerics}: {}", audited.report["first_divergence"]);
    }
}

/// A product that is wrong shows little of what it was computed in: the others do.
#[test]
fn a_wrong_product_is_named_in_what_the_others_are_computed_in() {
    for (numerics, model) in sample("arithmetics and models", 2, [("f32", Q4), ("f32", F16), ("f16", Q4)]) {
        let (_faulty, faulty) = run(model, &["--numerics", numerics, "--inject", "data.scaled=1.005@logits"]);
        let (_folder, dump) = foreign(&faulty, |_| true, |x| x);
        let audited = program::audit(&dump, Path::new(model), &["--allow-missing"]);
        let first = &audited.report["first_divergence"];
        assert_eq!((audited.code, audited.first.as_str()), (1, "logits"), "{numerics}: {first}");
        assert_eq!(first["diagnosis"][0]["fault"], "data.scaled", "{numerics}: {first}");
    }
}

/// Several arithmetics leave such a mistake alike, and one of them nothing else.
#[test]
fn outputs_that_are_zero_are_named_in_what_explains_all_others() {
    for columns in sample("columns", 1, ["12..14", "240..241", "167..167"]) {
        let (_folder, faulty) =
            run(Q4, &["--numerics", "f32", "--inject", &format!("data.zero={columns}@blk.0.ffn_gate")]);
        let audited = program::audit(&faulty, Path::new(Q4), &[]);
        let first = &audited.report["first_divergence"];
        assert_eq!(
            (&audited.first[..], &audited.fault[..]),
            ("blk.0.ffn_gate", "data.zero"),
            "{columns}: {first}"
        );
    }
}

/// Of logits alone not every mistake of every node can be tried: what one piece of code does to all layers comes first, and then
/// what has few spellings.
#[test]
fn mistakes_anywhere_in_a_model_are_named_of_its_logits() {
    let keys = (0..4).map(|layer| format!("rope.position_zero@blk.{layer}.k_rope")).collect();
    let one = |spec: &str| vec![spec.to_owned()];
    let cases = [
        (one("logits.no_norm"), "logits.no_norm"),
        (one("linear.no_bias"), "linear.no_bias"),
        (keys, "rope.position_zero"),
        (one("norm.unit_offset"), "norm.unit_offset"),
    ];
    for (wrong, fault) in sample("mistakes", 1, cases) {
        let specs = wrong.iter().flat_map(|spec| ["--inject", spec]);
        let numerics = ["--numerics", "f32"];
        let (_faulty, faulty) = run(F16, &numerics.into_iter().chain(specs).collect::<Vec<_>>());
        let (_folder, dump) = foreign(&faulty, |kind| kind == Kind::Logits, |x| x);
        let audited = program::audit(&dump, Path::new(F16), &["--allow-missing"]);
        let first = &audited.report["first_divergence"];
        let found = (audited.code, audited.first.as_str(), audited.fault.as_str());
        assert_eq!(found, (1, "logits", fault), "{wrong:?}: {first}");
    }
}

/// What rounding explains across everything in an engine that keeps bf16 would hide mistakes.
#[test]
fn what_cannot_be_bridged_says_what_it_needs() {
    let (_whole, whole) = run(F16, &["--numerics", "bf16 storage=bf16 kv=bf16"]);
    let (_folder, dump) = foreign(&whole, |kind| kind == Kind::Logits, |x| x);
    let audited = program::audit(&dump, Path::new(F16), &["--allow-missing"]);
    let reason = audited.reason();
    assert_eq!((audited.code, audited.first.as_str()), (2, ""), "{reason}");
    assert!(reason.contains("or record final_norm as well"), "{reason}");
}

/// Every arithmetic that explains a node of a recording, in words.
fn arithmetics(findings: &Findings) -> BTreeSet<&'static str> {
    findings.nodes.values().flat_map(|finding| finding.computed_in.iter().copied()).collect()
}

#[test]
fn undeclared_arithmetic_is_inferred_from_the_values_and_said() {
    let gguf = model(F16);
    let (_whole, whole) = run(F16, &[]);
    let (_folder, f32s) = foreign(&whole, |_| true, |x| x);
    let findings = audit_all(&f32s, &gguf);
    assert_eq!(origins(&findings), Vec::<String>::new());
    let found = arithmetics(&findings);
    assert!(found.contains("nothing but f32 rounding"), "{found:?}");
    assert!(!found.iter().any(|name| name.contains("bf16") || name.contains("operands")), "{found:?}");
    let audited = program::audit(&f32s, Path::new(F16), &[]);
    let said = audited.report["checkpoints"].as_array().unwrap().iter();
    let q_proj = said.into_iter().find(|entry| entry["id"] == "blk.1.q_proj").unwrap();
    let evidence = q_proj["evidence"].as_str().unwrap();
    assert!(
        evidence.contains("another arithmetic than llama.cpp's usual: nothing but f32 rounding"),
        "{evidence}"
    );

    let round = |x: f32| bf16::from_f32(x).to_f32();
    let (_folder, narrow) = foreign(&whole, |_| true, round);
    let findings = audit_all(&narrow, &gguf);
    assert_eq!(origins(&findings), Vec::<String>::new(), "values that were rounded when they were written");
    let found = arithmetics(&findings);
    assert!(found.contains("values rounded to bf16 when they were recorded"), "{found:?}");
    let audited = program::audit(&narrow, Path::new(F16), &[]);
    let said = audited.report.to_string();
    assert!(said.contains("values rounded to bf16 when they were recorded"), "{said}");

    let (_faulty, faulty) = run(F16, &["--inject", "linear.no_bias@blk.1.k"]);
    let (_folder, dump) = foreign(&faulty, |_| true, round);
    assert_eq!(origins(&audit_all(&dump, &gguf)), ["blk.1.k"]);
}

#[test]
fn a_cache_in_bf16_that_nobody_declares_is_known_and_hides_nothing() {
    let gguf = model(F16);
    let (_whole, whole) = run(F16, &["--numerics", "f32 kv=bf16"]);
    let (_folder, dump) = foreign(&whole, |_| true, |x| x);
    let findings = audit_all(&dump, &gguf);
    assert_eq!(origins(&findings), Vec::<String>::new());
    let found = arithmetics(&findings);
    assert!(found.contains("keys and values in bf16"), "{found:?}");
    assert!(!found.iter().any(|name| name.contains("operands")), "{found:?}");
    // A scale of heads of 32 that is off by a hundredth.
    let (_faulty, faulty) = run(F16, &["--numerics", "f32 kv=bf16", "--inject", "attn.scale=0.1785"]);
    let (_folder, dump) = foreign(&faulty, |_| true, |x| x);
    assert_eq!(origins(&audit_all(&dump, &gguf)).first().map(String::as_str), Some("blk.0.attn_ctx"));
}

/// In bf16 the first layers hide in rounding what a decode step turned too little; the layer that is off by far the most has the name.
#[test]
fn of_layer_outputs_alone_the_one_that_is_off_the_most_names_a_faint_mistake() {
    let how = ["-n", "8", "--numerics", "bf16 storage=bf16 kv=bf16", "--inject", "rope.decode_shift=-1"];
    let (_whole, whole) = run_of(F16, &[312, 863, 2039, 1444, 1518], &how);
    let of_layers = |kind: Kind| matches!(kind, Kind::Embed | Kind::LayerOut);
    let (_folder, dump) = foreign(&whole, of_layers, |x| x);
    let audited = program::audit(&dump, Path::new(F16), &["--allow-missing"]);
    let named: Vec<&str> = audited.report["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|node| node["diagnosis"].as_array().into_iter().flatten())
        .filter_map(|name| name["fault"].as_str())
        .collect();
    assert_eq!((audited.code, named), (1, vec!["rope.decode_shift"]), "{}", audited.report["reason"]);
}

/// Activations in blocks of eight bits come nearer to such a product than f32 does, and leave none of its name.
#[test]
fn a_small_factor_is_named_in_what_other_products_are_computed_in() {
    let (_whole, whole) = run(Q4, &["--inject", "data.scaled=1.01@blk.1.q_proj"]);
    let (_folder, dump) = foreign(&whole, |_| true, |x| x);
    let audited = program::audit(&dump, Path::new(Q4), &["--allow-missing"]);
    let first = &audited.report["first_divergence"];
    assert_eq!((audited.code, &audited.first[..]), (1, "blk.1.q_proj"));
    assert_eq!(first["diagnosis"][0]["fault"], "data.scaled", "{first}");
}

/// The product before the bias was not recorded: others show that it is of f32, in which the bias alone is missing.
#[test]
fn a_lost_bias_is_named_where_what_it_is_added_to_was_not_recorded() {
    let (_whole, whole) = run(Q4, &["--inject", "linear.no_bias@blk.2.v"]);
    let (_folder, dump) = foreign(&whole, hooked, |x| x);
    let audited = program::audit(&dump, Path::new(Q4), &["--allow-missing", "--numerics", "f32"]);
    let first = &audited.report["first_divergence"];
    assert_eq!((audited.code, &audited.first[..]), (1, "blk.2.v"));
    assert_eq!(first["diagnosis"][0]["fault"], "linear.no_bias", "{first}");
}
