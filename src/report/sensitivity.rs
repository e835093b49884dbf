//! What a dump could and could not have shown: `parity audit --self-test`, for people and for programs.

use std::collections::BTreeMap;

use comfy_table::Table;
use indexmap::IndexMap;
use serde::Serialize;

use super::table::Terminal;
use super::words::{self, number};
use crate::checkpoint::Checkpoint;

/// Schema of the JSON form.
pub const SCHEMA: &str = "parity-sensitivity/1";

/// Every mistake of the catalogue, injected at every node of a dump, one at a time.
#[derive(Clone, Debug, Serialize)]
pub struct Sensitivity {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Positions of the token rows that they were injected in.
    pub positions: Vec<u32>,
    /// In execution order.
    pub nodes: Vec<Node>,
}

/// One node.
#[derive(Clone, Debug, Serialize)]
pub struct Node {
    /// Its output.
    pub id: Checkpoint,
    /// Why nothing could be injected; then the rest is empty.
    pub undecided: Option<String>,
    /// ‖bound‖ / ‖output‖: a change of the whole output that is smaller than this may pass for rounding.
    pub rounding: Option<f64>,
    /// Smallest d for which an output that is off by the factor 1 + d is seen.
    pub scale: Option<f64>,
    /// Mistakes that have a place in the node.
    pub injected: usize,
    /// That mistake among those seen which is least above rounding.
    pub faintest: Option<Injected>,
    /// Those that pass for rounding, or that the rows at hand do not decide.
    pub unseen: Vec<Injected>,
}

/// One mistake at one node.
#[derive(Clone, Debug, Serialize)]
pub struct Injected {
    /// As `--inject` takes it, e.g. `rope.base=10000`.
    pub fault: String,
    /// Largest error over its bound; null where the rows at hand do not decide it.
    pub over_bound: Option<f64>,
}

impl Sensitivity {
    /// Mistakes that were injected, and those of them that are seen.
    pub fn counts(&self) -> (usize, usize) {
        let injected = self.nodes.iter().map(|node| node.injected).sum();
        (injected, injected - self.nodes.iter().map(|node| node.unseen.len()).sum::<usize>())
    }
}

/// The text, lines ended by newlines.
pub fn render(sensitivity: &Sensitivity, layout: &Terminal) -> String {
    let (injected, seen) = sensitivity.counts();
    if injected == 0 {
        let lacking = words::count(sensitivity.nodes.len(), "node");
        let text = format!(
            "Nothing could be injected: {lacking}, none of which can be computed again from what was recorded. Record whole layers."
        );
        return words::wrap(&text, layout.width).join("\n") + "\n";
    }
    if let Some(only) = only(sensitivity) {
        return words::wrap(&only, layout.width).join("\n") + "\n";
    }
    let mut lines = words::wrap(
        &format!(
            "An audit of {} of this dump sees {} of the {} mistakes that were injected into it, one at a time.",
            words::count(sensitivity.positions.len(), "row"),
            words::thousands(seen as u64),
            words::thousands(injected as u64),
        ),
        layout.width,
    );
    lines.push(String::new());
    lines.extend(table(sensitivity));
    lines.push(String::new());
    for line in undecided(sensitivity).into_iter().chain(unseen(sensitivity)) {
        lines.extend(words::wrap(&line, layout.width));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A sentence of a dump in which mistakes could be injected at one node alone.
fn only(sensitivity: &Sensitivity) -> Option<String> {
    let mut nodes = sensitivity.nodes.iter().filter(|node| node.undecided.is_none());
    let (node, others) = (nodes.next()?, sensitivity.nodes.len() - 1);
    if nodes.next().is_some() || others == 0 {
        return None;
    }
    let unseen: Vec<&str> = node.unseen.iter().map(|injected| injected.fault.as_str()).collect();
    let not = if unseen.is_empty() { String::new() } else { format!(" (not {})", unseen.join(", ")) };
    let rounding = node.rounding.map_or_else(String::new, |size| {
        format!("; what moves it by less than {} of its size passes for rounding", number(size))
    });
    Some(format!(
        "An audit of {} alone sees {} of the {} mistakes injected there{not}{rounding}. {} could not be judged: record \
         whole layers.",
        node.id,
        node.injected - unseen.len(),
        node.injected,
        words::count(others, "other node"),
    ))
}

fn table(sensitivity: &Sensitivity) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).force_no_tty();
    table.set_header(["node", "rounding", "scale", "seen", "faintest seen", "error/bound"]);
    for node in sensitivity.nodes.iter().filter(|node| node.undecided.is_none()) {
        let dash = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), number);
        let seen = format!("{}/{}", node.injected - node.unseen.len(), node.injected);
        let faintest = node.faintest.as_ref().map_or("–".to_owned(), |injected| injected.fault.clone());
        let over = node.faintest.as_ref().and_then(|injected| injected.over_bound);
        table.add_row([
            node.id.to_string(),
            dash(node.rounding),
            dash(node.scale),
            seen,
            faintest,
            dash(over),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// Nodes in which nothing could be injected, by what they lack.
fn undecided(sensitivity: &Sensitivity) -> Vec<String> {
    let mut by_reason: IndexMap<&str, Vec<Checkpoint>> = IndexMap::new();
    for node in &sensitivity.nodes {
        if let Some(missing) = &node.undecided {
            by_reason.entry(missing).or_default().push(node.id);
        }
    }
    let line = |(missing, ids): (&str, Vec<Checkpoint>)| {
        let more = if ids.len() > 1 { ", …" } else { "" };
        format!("not injected: {} ({}{more}): needs {missing}", words::count(ids.len(), "node"), ids[0])
    };
    by_reason.into_iter().map(line).collect()
}

/// What is not seen, by mistake: at how many nodes, and how near it comes.
fn unseen(sensitivity: &Sensitivity) -> Vec<String> {
    let mut by_name: BTreeMap<&str, Vec<(Checkpoint, Option<f64>)>> = BTreeMap::new();
    for node in &sensitivity.nodes {
        for injected in &node.unseen {
            let name = injected.fault.split('=').next().unwrap_or_default();
            by_name.entry(name).or_default().push((node.id, injected.over_bound));
        }
    }
    let mut lines = Vec::new();
    // Mistakes that are not seen at one and the same node are one line.
    let mut of_one: BTreeMap<String, (Vec<&str>, f64)> = BTreeMap::new();
    for (name, nodes) in by_name {
        let (decided, open): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|(_, over)| over.is_some());
        let most = decided.iter().filter_map(|(_, over)| *over).fold(0.0, f64::max);
        match &decided[..] {
            [] => {}
            [(only, _)] => {
                let (names, worst) = of_one.entry(only.to_string()).or_default();
                names.push(name);
                *worst = worst.max(most);
            }
            [(first, _), ..] => lines.push(format!(
                "not seen: {name} at {} ({first}, …): {} of what rounding explains at most",
                words::count(decided.len(), "node"),
                number(most),
            )),
        }
        if let Some((first, _)) = open.first() {
            lines.push(format!(
                "not decided: {name} at {} ({first}{}): it mixes rows of which some were not audited; \
                 --audit-rows all decides it",
                words::count(open.len(), "node"),
                if open.len() > 1 { ", …" } else { "" },
            ));
        }
    }
    lines.extend(of_one.into_iter().map(|(node, (names, most))| {
        let most = number(most);
        format!("not seen: {} at 1 node ({node}): {most} of what rounding explains at most", names.join(", "))
    }));
    lines
}
