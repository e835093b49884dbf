//! What a recording was computed in, and what that hides, in one line.

use std::collections::BTreeMap;

use crate::arithmetic::backend::Backend;
use crate::audit::recorded::{Findings, Labelled};
use crate::checkpoint::Checkpoint;
use crate::report::words::{count, number};

/// Nodes that one arithmetic explains.
struct Class {
    nodes: usize,
    /// The widest bound among them, as a share of the node's values, and where it is.
    blind: Option<(f64, Checkpoint)>,
}

/// Of a recording whose nodes ran on a device: by arithmetic, how many nodes it explains and below what a mistake in
/// them is not seen. `None` of one that ran on the CPU alone.
pub fn sentence(side: &str, graphs: &[(usize, &Labelled)], findings: &Findings) -> Option<String> {
    let mut tensors = graphs.iter().flat_map(|(_, labelled)| &labelled.program.graph.tensors);
    tensors.find(|tensor| tensor.backend.as_deref().and_then(Backend::of).is_some())?;
    let mut classes: BTreeMap<&str, Class> = BTreeMap::new();
    for id in &findings.order {
        let Some(finding) = findings.nodes.get(id) else { continue };
        let bound = finding.audit().and_then(|audit| audit.local.bound_rel_l2);
        for name in &finding.computed_in {
            let class = classes.entry(name).or_insert(Class { nodes: 0, blind: None });
            class.nodes += 1;
            let wider = |bound: &f64| class.blind.is_none_or(|(widest, _)| *bound > widest);
            if let Some(bound) = bound.filter(wider) {
                class.blind = Some((bound, *id));
            }
        }
    }
    let of = |(name, class): (&&str, &Class)| {
        let blind = class.blind.filter(|(bound, _)| *bound > 0.0);
        let blind = blind.map(|(bound, id)| format!(", blind below {} at {id}", number(bound)));
        format!("{name} ({}{})", count(class.nodes, "node"), blind.unwrap_or_default())
    };
    let classes: Vec<String> = classes.iter().map(of).collect();
    (!classes.is_empty()).then(|| format!("{side} computes with: {}", classes.join("; ")))
}
