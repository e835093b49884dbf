//! The comparison for people: what is wrong first, then what each kind of tensor cost.

use std::fmt::Write;

use super::{Comparison, Difference, Pair, Verdict, names};
use crate::inspect::text::table;
use crate::text::printable;

/// Mistakes that are listed.
const LISTED_MAX: usize = 40;

/// The whole text.
pub(super) fn render(found: &Comparison, all: bool) -> String {
    let mut out = String::new();
    let wrong: Vec<&Pair> = found.tensors.iter().filter(|pair| pair.verdict == Verdict::Differs).collect();
    let open: Vec<&Pair> = found.tensors.iter().filter(|pair| pair.verdict == Verdict::Unpaired).collect();
    let all_tensors = found.tensors.len();
    let weights = match (wrong.len() + found.left_out.len(), open.len()) {
        (0, 0) => format!("THE SAME WEIGHTS: {all_tensors} tensors"),
        (0, open) => format!("UNDECIDED: {open} of {all_tensors} tensors have no counterpart"),
        (wrong, _) => format!("NOT THE SAME WEIGHTS: {wrong} of {all_tensors} tensors"),
    };
    let (grave, notes): (Vec<&Difference>, Vec<&Difference>) =
        found.findings.iter().partition(|finding| finding.changes_logits);
    let headline = match grave.first() {
        Some(first) if !found.other_weights() => {
            let more = if grave.len() > 1 { format!(" and {} more", grave.len() - 1) } else { String::new() };
            format!("NOT THE SAME MODEL: {}{more} · {}", first.name, weights.to_lowercase())
        }
        _ => weights,
    };
    let _ = writeln!(out, "{headline}\n\n{} ({})\nagainst {}", found.model, found.architecture, found.folder);
    findings(&mut out, "", &grave);
    mistakes(&mut out, found, &wrong);
    for pair in &open {
        let _ = writeln!(out, "  {}: nothing of the folder has its name or its values", pair.name);
    }
    findings(&mut out, "notes, by which no logit differs:", &notes);
    for why in &found.not_compared {
        let _ = writeln!(out, "  not compared: {why}");
    }
    let _ = writeln!(out);
    let header = ["tensor", "type", "made of", "rearranged", "rel L2", "max |a-b|"];
    let rows: Vec<Vec<String>> = match all {
        true => found.tensors.iter().map(|pair| row(&pair.name, std::slice::from_ref(&pair))).collect(),
        false => by_role(found).iter().map(|(name, pairs)| row(name, pairs)).collect(),
    };
    out += &table(&header, 4, rows.into_iter());
    out += "\n";
    if !found.unused.is_empty() {
        let some: Vec<&str> = found.unused.iter().take(4).map(String::as_str).collect();
        let more = if found.unused.len() > some.len() { ", …" } else { "" };
        let _ = writeln!(out, "\nnot looked at in the folder: {}{more}", some.join(", "));
    }
    out
}

/// What else differs, three lines each.
fn findings(out: &mut String, title: &str, found: &[&Difference]) {
    if found.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    for Difference { name, place, original, converted, effect, .. } in found {
        let _ =
            writeln!(out, "  {name}: {}, the original says {}", printable(converted), printable(original));
        let _ = writeln!(out, "    {effect}\n    in {place}");
    }
}

fn mistakes(out: &mut String, found: &Comparison, wrong: &[&Pair]) {
    let named = |fault: Option<&str>| fault.map_or(String::new(), |fault| format!(" ({fault})"));
    let of_tensors = wrong.iter().flat_map(|pair| {
        pair.mistakes.iter().map(|wrong| format!("{} {}{}", pair.name, wrong.text, named(wrong.fault)))
    });
    let of_folder =
        found.left_out.iter().map(|out| format!("{} {}{}", out.name, out.wrong.text, named(out.wrong.fault)));
    let lines: Vec<String> = of_tensors.chain(of_folder).collect();
    if !lines.is_empty() {
        let _ = writeln!(out);
    }
    for line in lines.iter().take(LISTED_MAX) {
        let _ = writeln!(out, "  {line}");
    }
    if lines.len() > LISTED_MAX {
        let _ = writeln!(out, "  … {} more", lines.len() - LISTED_MAX);
    }
}

/// Tensors of one role together, in the order of the file.
fn by_role(found: &Comparison) -> Vec<(String, Vec<&Pair>)> {
    let mut roles: Vec<(String, Vec<&Pair>)> = Vec::new();
    for pair in &found.tensors {
        let (role, layer, bias) = names::role(&pair.name);
        let kind = if bias { "bias" } else { "weight" };
        let name = match layer {
            Some(_) => format!("blk.N.{role}.{kind}"),
            None => pair.name.clone(),
        };
        match roles.iter_mut().find(|(known, _)| *known == name) {
            Some((_, pairs)) => pairs.push(pair),
            None => roles.push((name, vec![pair])),
        }
    }
    roles
}

/// One line of the table: of several tensors the worst.
fn row(name: &str, pairs: &[&Pair]) -> Vec<String> {
    let each = |of: &dyn Fn(&Pair) -> String| {
        let mut seen: Vec<String> = Vec::new();
        for text in pairs.iter().map(|pair| of(pair)).filter(|text| !text.is_empty()) {
            if !seen.contains(&text) {
                seen.push(text);
            }
        }
        seen.join(", ")
    };
    let worst = |of: &dyn Fn(&Pair) -> Option<f64>| {
        let values = pairs.iter().filter_map(|pair| of(pair));
        let worst = values.reduce(|a, b| if a >= b || a.is_nan() { a } else { b });
        worst.map_or(
            "–".to_owned(),
            |worst| if worst == 0.0 { "0".to_owned() } else { format!("{worst:.1e}") },
        )
    };
    let count = if pairs.len() > 1 { format!("{name} ({})", pairs.len()) } else { name.to_owned() };
    let made_of = each(&|pair| {
        let first = pair.made_of.first().map(|name| module(name, pairs.len() > 1)).unwrap_or_default();
        if pair.made_of.len() > 1 { format!("{first}, …") } else { first }
    });
    vec![
        count,
        each(&|pair| pair.dtype.clone()),
        made_of,
        each(&|pair| pair.how.clone()),
        worst(&|pair| pair.rel_l2),
        worst(&|pair| pair.distance.map(|distance| distance.max_abs)),
    ]
}

/// The name of a tensor of the folder, without its layer where it stands for those of all.
fn module(name: &str, of_many: bool) -> String {
    if of_many { names::Place::of(name).rest.join(".") } else { name.to_owned() }
}
