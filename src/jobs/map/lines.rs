//! What was found of single arrays, as the lines of a map: one pattern for all layers where they agree.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::fit::{Fit, NEAR, Way};
use super::{Columns, Found};
use crate::checkpoint::Checkpoint;
use crate::report::words::number;

/// A line of the map.
#[derive(Clone, Debug)]
pub struct Group {
    /// The name, with `{n}` for the layer where it stands for several.
    pub name: String,
    /// The ids, and how each lies.
    pub targets: Vec<(String, Way)>,
    /// The best fits of its arrays: what they are sure of.
    pub members: Vec<Found>,
}

/// A map, with what speaks for it.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// Arrays of tokens and positions.
    pub inputs: BTreeMap<String, &'static str>,
    /// In the order of execution.
    pub groups: Vec<Group>,
    /// Arrays that are the same node as another one, and which.
    pub twice: Vec<(String, Checkpoint)>,
    /// Arrays that are no node.
    pub unknown: Vec<Found>,
}

/// A name with a layer's number taken out, and what that makes of the ids.
type Template = (String, Vec<(String, Way)>);

impl Proposal {
    /// Puts arrays together whose names differ by their layer's number alone.
    pub fn new(inputs: BTreeMap<String, &'static str>, found: Vec<Found>) -> Proposal {
        let (known, unknown): (Vec<Found>, Vec<Found>) =
            found.into_iter().partition(|found| found.fits.iter().any(|fit| fit.distance <= NEAR));
        let mut counts: BTreeMap<Template, usize> = BTreeMap::new();
        for found in &known {
            templates(found).into_iter().for_each(|template| *counts.entry(template).or_default() += 1);
        }
        let mut groups: BTreeMap<Template, Vec<Found>> = BTreeMap::new();
        for found in known {
            // The way that most arrays of such a name agree in; alone, the name as it is.
            let mut all = templates(&found);
            all.sort_by_key(|template| std::cmp::Reverse(counts[template]));
            let shared = all.into_iter().next().filter(|template| counts[template] > 1);
            groups.entry(shared.unwrap_or_else(|| literal(&found))).or_default().push(found);
        }
        let mut out = Proposal { inputs, groups: Vec::new(), twice: Vec::new(), unknown };
        out.adopt(&mut groups);
        let lines = groups.into_iter().map(|((name, targets), members)| Group { name, targets, members });
        let mut lines: Vec<Group> = lines.collect();
        // What moves the least, of these what holds for the most layers, of these the shortest name is the node; others
        // are it as well.
        lines.sort_by_key(|line| {
            let moved = line.targets.iter().filter(|(_, way)| !way.is_plain()).count();
            let count = std::cmp::Reverse(line.members.len());
            (!line.is_sure(), moved, count, line.name.len(), line.name.clone())
        });
        let mut taken: Vec<Checkpoint> = Vec::new();
        for line in lines {
            let ids: Vec<Checkpoint> = line.members.iter().flat_map(targets).map(|fit| fit.id).collect();
            match ids.iter().all(|id| !taken.contains(id)) {
                true => {
                    taken.extend(ids);
                    out.groups.push(line);
                }
                false => out.twice.extend(
                    line.members
                        .iter()
                        .filter_map(|found| Some((found.name.clone(), found.fits.first()?.id))),
                ),
            }
        }
        out.groups.sort_by_key(|line| {
            let first = line.members.iter().flat_map(|found| &found.fits).map(|fit| fit.place).min();
            (first, line.name.clone())
        });
        out
    }

    /// Arrays that fit nothing, and have a name that a group of several layers has: a layer behind a mistake.
    fn adopt(&mut self, groups: &mut BTreeMap<Template, Vec<Found>>) {
        let unknown = std::mem::take(&mut self.unknown);
        for found in unknown {
            let names: Vec<String> = numbers(&found.name).map(|(name, _)| name).collect();
            match groups.iter_mut().find(|((name, _), _)| name.contains("{n}") && names.contains(name)) {
                Some((_, members)) => members.push(found),
                None => self.unknown.push(found),
            }
        }
    }

    /// The lines that are not sure, each with the reason.
    pub fn unsure(&self) -> Vec<String> {
        let unsure = self.groups.iter().filter_map(|line| Some(format!("{}: {}", line.name, line.doubt()?)));
        unsure.collect()
    }

    /// Lines whose every array is near one node and far from all others.
    pub fn sure(&self) -> usize {
        self.groups.iter().filter(|line| line.is_sure()).count()
    }

    /// The map as TOML, with what speaks for each line as a comment.
    pub fn toml(&self) -> String {
        let mut out = String::from(
            "# Proposed by values: each line says how far its tensors are from the exact ones (relative L2), and how far \
             the\n# next best node is. Check what is marked `unsure`.\n",
        );
        for (name, what) in &self.inputs {
            let _ = writeln!(out, "{} = \"{what}\"", quoted(name));
        }
        for line in &self.groups {
            let targets: Vec<String> = line.targets.iter().map(|(id, way)| target(id, way)).collect();
            let value = match targets.as_slice() {
                [one] => one.clone(),
                several => format!("[\n  {},\n]", several.join(",\n  ")),
            };
            let _ = writeln!(out, "# {}\n{} = {value}", line.evidence(), quoted(&line.name));
        }
        for (name, id) in &self.twice {
            let _ = writeln!(out, "# {} holds the values of {id} as well", quoted(name));
        }
        for found in &self.unknown {
            let nearest =
                found.fits.first().map(|fit| format!("; {} is nearest, {:.1e}", fit.id, fit.distance));
            let nearest = nearest.unwrap_or_default();
            let _ =
                writeln!(out, "# {} {:?} is no node of the model{nearest}", quoted(&found.name), found.shape);
        }
        out
    }
}

impl Found {
    /// Whether it is near one node, or near each of several side by side, and far from all others.
    fn is_sure(&self) -> bool {
        !self.fits.is_empty() && self.fits.iter().all(Fit::is_sure)
    }
}

impl Group {
    /// Whether every array is near one node and far from all others.
    pub fn is_sure(&self) -> bool {
        self.members.iter().all(Found::is_sure)
    }

    /// Why a line is not sure: the first of its arrays that is near nothing, or as near to another node.
    fn doubt(&self) -> Option<String> {
        let found = self.members.iter().find(|found| !found.is_sure())?;
        let (name, id) = (&found.name, self.id_of(&found.name));
        let Some(fit) = found.fits.iter().find(|fit| !fit.is_sure()) else {
            return Some(format!("{name} has the size of no node, and is taken for {id} by its name"));
        };
        let far = number(fit.distance);
        Some(match fit.next.filter(|_| fit.distance <= NEAR) {
            Some((next, distance)) => {
                format!("{name} is {far} from {}, and {} from {next}", fit.id, number(distance))
            }
            None => format!(
                "{name} is near no node ({far} from {}, the nearest), and is taken for {id} by its name: its values are \
                 those of a mistake before it or in it, if they are that node",
                fit.id
            ),
        })
    }

    /// What the line says that an array is.
    fn id_of(&self, name: &str) -> String {
        let ids = self.targets.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>().join(", ");
        match numbers(name).find(|(pattern, _)| *pattern == self.name) {
            Some((_, layer)) => ["{n}", "{n-1}", "{n+1}"]
                .into_iter()
                .zip([0, -1, 1])
                .fold(ids, |ids, (letter, by)| ids.replace(letter, &(i64::from(layer) + by).to_string())),
            None => ids,
        }
    }

    /// How near its arrays are, and the next best node.
    fn evidence(&self) -> String {
        let fits = || self.members.iter().flat_map(|found| &found.fits);
        let worst = fits().map(|fit| fit.distance).fold(0.0, f64::max);
        let next = fits().filter_map(|fit| fit.next).min_by(|a, b| a.1.total_cmp(&b.1));
        let next = match next {
            Some((id, distance)) => format!("next best {id} {distance:.1e}"),
            None => "no other node has its size".to_owned(),
        };
        let same = fits().flat_map(|fit| &fit.same).next();
        let same = same.map(|(_, id)| format!("; {id} has the same values")).unwrap_or_default();
        let unsure = self.doubt().map_or_else(String::new, |why| format!("unsure, {why}\n# "));
        let count = self.members.len();
        let tensors = if count == 1 { String::new() } else { format!(" at most, {count} tensors") };
        format!("{unsure}{worst:.1e}{tensors}; {next}{same}")
    }
}

fn quoted(name: &str) -> String {
    toml::Value::String(name.to_owned()).to_string()
}

fn target(id: &str, way: &Way) -> String {
    if way.is_plain() {
        return quoted(id);
    }
    let mut out = format!("{{ id = {}", quoted(id));
    if !way.order.iter().copied().eq(0..way.order.len()) {
        let _ = write!(out, ", transpose = {:?}", way.order);
    }
    if let Some(Columns { from, to, step, .. }) = way.columns {
        let step = if step == 1 { String::new() } else { format!(" step {step}") };
        let _ = write!(out, ", columns = \"{from}..{to}{step}\"");
    }
    out + " }"
}

/// The ids and ways of an array that is near nodes, the columns in order.
fn targets(found: &Found) -> impl Iterator<Item = &Fit> {
    let mut near: Vec<&Fit> = found.fits.iter().filter(|fit| fit.distance <= NEAR).collect();
    near.sort_by_key(|fit| fit.way.columns);
    near.into_iter()
}

fn literal(found: &Found) -> Template {
    (found.name.clone(), targets(found).map(|fit| (fit.id.to_string(), fit.way.clone())).collect())
}

/// A name with each of its numbers replaced by `{n}`, and the number.
fn numbers(name: &str) -> impl Iterator<Item = (String, u32)> {
    let bytes = name.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        if end > at
            && let Ok(number) = name[at..end].parse()
        {
            out.push((format!("{}{{n}}{}", &name[..at], &name[end..]), number));
        }
        at = end.max(at + 1);
    }
    out.into_iter()
}

/// The patterns that an array's name and ids have in common: the layer is a number of the name, or next to it.
fn templates(found: &Found) -> Vec<Template> {
    if found.name.contains(['{', '}']) {
        return Vec::new();
    }
    let of = |(name, number): (String, u32)| {
        let ids = targets(found).map(|fit| {
            let layer = fit.id.layer_index()?;
            let n = match i64::from(layer) - i64::from(number) {
                0 => "{n}",
                -1 => "{n-1}",
                1 => "{n+1}",
                _ => return None,
            };
            let id = fit.id.to_string().replacen(&layer.to_string(), n, 1);
            Some((id, fit.way.clone()))
        });
        Some((name, ids.collect::<Option<Vec<_>>>()?))
    };
    numbers(&found.name).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, id: &str, distance: f64) -> Found {
        let id: Checkpoint = id.parse().unwrap();
        let way = Way { order: vec![0, 1], columns: None };
        let next = Some(("logits".parse().unwrap(), 1.4));
        Found {
            name: name.into(),
            shape: vec![2, 4],
            fits: vec![Fit { place: 0, id, way, distance, next, same: vec![] }],
        }
    }

    #[test]
    fn layers_become_one_pattern() {
        let all = vec![
            found("h.0.w1", "blk.0.ffn_gate", 1e-7),
            found("h.1.w1", "blk.1.ffn_gate", 2e-7),
            found("h.2.w1", "blk.0.ffn_gate", 0.9),
            found("in.1", "blk.0.layer_out", 1e-7),
            found("in.2", "blk.1.layer_out", 1e-7),
            found("t7", "final_norm", 0.4),
            found("h.3.w1", "blk.1.ffn_up", 0.8),
            found("z", "embed", 0.9),
        ];
        let proposal = Proposal::new(BTreeMap::new(), all);
        let text = proposal.toml();
        assert!(text.contains("\"h.{n}.w1\" = \"blk.{n}.ffn_gate\""), "{text}");
        assert!(text.contains("\"in.{n}\" = \"blk.{n-1}.layer_out\""), "{text}");
        assert!(
            text.contains("# unsure, t7 is 0.40 from final_norm, and 1.4 from logits\n# 4.0e-1"),
            "{text}"
        );
        let doubts = proposal.unsure();
        assert_eq!(doubts.len(), 2, "{doubts:?}");
        let of_layers = "h.{n}.w1: h.2.w1 is near no node (0.90 from blk.0.ffn_gate, the nearest), and is taken for blk.2.ffn_gate";
        assert!(doubts[0].starts_with(of_layers), "{doubts:?}");
        assert!(text.contains("is no node of the model; embed is nearest"), "{text}");
        assert!(crate::foreign::map::Map::parse(&text, "x", false).is_ok());
    }
}
