//! Every mistake of the catalogue, injected into graphs: found at its node and called by its name; and nothing found
//! where nothing is injected.

use parity::checkpoint::Checkpoint;
use parity::faults::injected::parse;
use parity::gguf::Gguf;
use parity_graph::fault::{ALIASES, Entry, entries, find};

use crate::support::graphs::filled;
use crate::support::injected::{Made, Ran, run, specs};
use crate::support::runs::{Random, path};
use crate::support::samples::sample;

/// What people wrote in scripts and suites.
const NAMES: &str = include_str!("names.txt");
const TINY: [&str; 2] = ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"];
const BUILT: [&str; 4] = ["gemma3-dense", "qwen3moe-moe", "gpt-oss-moe", "llama-moe"];
/// Tokens of a run: a prompt and three decode steps.
const PROMPT: usize = 6;
const TOKENS: usize = 9;
/// Mistakes and places of a model in the quick tests.
const MISTAKES: usize = 60;
/// Tokens that every one of these models knows.
const VOCABULARY: usize = 128;

#[test]
fn every_name_that_was_ever_printed_is_in_the_catalogue() {
    assert_eq!(NAMES.lines().count(), 132);
    for name in NAMES.lines() {
        assert!(find(name).is_some(), "{name}");
        if !find(name).unwrap().recognised {
            assert!(parse(name).is_ok(), "{name}");
        }
    }
    for (alias, own) in ALIASES {
        assert!(
            find(own).is_some_and(|entry| entry.name == own) && entries().all(|entry| entry.name != alias)
        );
    }
}

/// What happens to any value, and the name of the same where a node has one of its own: both are one mistake.
const SAME: [(&str, &str); 5] = [
    ("data.zero", "embed.scaled"),
    ("data.sign", "embed.scaled"),
    ("data.scaled", "embed.scaled"),
    ("data.zero", "logits.untied"),
    // Of a table in F16, which the rows of the embedding are copies of.
    ("data.f16_as_bf16", "quant.half_type"),
];

/// How one injected mistake came out.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// Right node, right name first.
    Named,
    /// Right node; the right name is among several that these data do not tell apart.
    Among,
    /// Right node, no name.
    Unnamed(String),
    /// Right node, wrong name.
    Wrong(String),
    /// Wrong node, or none.
    Elsewhere(Vec<String>),
    /// The mistake is within rounding on these data.
    Silent,
}

/// How it came out in a run with it in some nodes.
pub fn judged(entry: &Entry, ran: &Ran, nodes: &[Checkpoint]) -> Outcome {
    let findings = ran.audit();
    let origins = Ran::origins(&findings);
    if origins.is_empty() && entry.silent.is_some() {
        return Outcome::Silent;
    }
    let strayed = origins.iter().any(|origin| !nodes.contains(origin));
    if origins.is_empty() || strayed {
        return Outcome::Elsewhere(origins.iter().map(ToString::to_string).collect());
    }
    let (found, tried) = findings.nodes[&origins[0]].diagnosis();
    let names: Vec<&str> = found.iter().map(|item| item.fault.as_str()).collect();
    match &names[..] {
        [] => Outcome::Unnamed(format!("{:?}", tried.first())),
        [first, ..] if *first == entry.name => Outcome::Named,
        names if names.contains(&entry.name) => Outcome::Among,
        [first] if SAME.contains(&(entry.name, first)) => Outcome::Among,
        _ if found[0].text.contains(&format!("indistinguishable here from {}", entry.name)) => Outcome::Among,
        names => Outcome::Wrong(format!("{}: {}", names.join(", "), found[0].text)),
    }
}

fn of_every_mistake(open: &dyn Fn() -> Gguf, name: &str, places: &[&str], flash: bool) -> Vec<String> {
    let mut random = Random(1);
    let mut failures = Vec::new();
    let (mut named, mut among, mut silent) = (0, 0, 0);
    let only = std::env::var("PARITY_ONLY").unwrap_or_default();
    let cases = entries().filter(|entry| !entry.recognised && entry.name.contains(&only));
    let cases = cases.flat_map(|entry| places.iter().map(move |place| (entry, place)));
    for (entry, place) in sample("mistakes and places", MISTAKES, cases) {
        let spec = format!("{}{place}", entry.name);
        let tokens = random.tokens(TOKENS, VOCABULARY);
        let how = Made { tokens: &tokens, prompt: PROMPT, flash };
        let one = || {
            let (ran, nodes) = run(open(), &how, &specs(&[&spec]))?;
            Some(judged(entry, &ran, &nodes))
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(one));
        let Some(outcome) = outcome.unwrap_or_else(|_| Some(Outcome::Unnamed("panics".to_owned()))) else {
            continue;
        };
        match outcome {
            Outcome::Named => named += 1,
            Outcome::Among => among += 1,
            Outcome::Silent => silent += 1,
            other => failures.push(format!("{name} {spec}: {other:?}")),
        }
    }
    println!(
        "{name}: {named} named first, {among} among others, {silent} within rounding, {} not",
        failures.len()
    );
    failures
}

#[test]
fn every_mistake_is_found_where_it_sits_and_called_by_its_name() {
    let mut failures = Vec::new();
    for name in TINY {
        let Some(path) = path(name) else { return eprintln!("SKIP: {name} is not there") };
        let open = || Gguf::open(&path).unwrap();
        failures.extend(of_every_mistake(&open, name, &["@1", "@embed", "@logits", "@blk.2.v"], true));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_mistake_is_found_and_named_in_every_family() {
    let mut failures = Vec::new();
    for name in BUILT {
        failures.extend(of_every_mistake(&|| filled(name), name, &["@1", "@0"], name != "llama-moe"));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn clean_runs_are_silent() {
    let mut random = Random(3);
    for name in BUILT {
        for flash in [true, false] {
            let tokens = random.tokens(TOKENS, VOCABULARY);
            let how = Made { tokens: &tokens, prompt: 1 + random.below(TOKENS - 1), flash };
            let (ran, _) = run(filled(name), &how, &[]).unwrap();
            assert_eq!(Ran::origins(&ran.audit()), [], "{name} {tokens:?}");
        }
    }
}
