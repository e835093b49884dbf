//! Two weights in each other's place, as tensors of one shape are that a table of names confuses.

use std::collections::BTreeMap;

use parity_graph::Id;
use parity_graph::fault::{Scene, find};

use super::hypotheses::{Hypothesis, Layers, Rows, of_nodes, part};
use crate::audit::Labelled;
use crate::checkpoint::Checkpoint;
use crate::faults::injected::Injected;

/// Two weights by their names, and the layer that both are of, if they are of one.
type Exchange = ([String; 2], Option<u32>);

/// Two weights of a layer, in all layers and in each; and one of two layers, of which one follows on the other.
pub fn exchanged(labelled: &Labelled, layers: u32) -> Vec<Hypothesis> {
    let roles = |a: Checkpoint, b: Checkpoint| {
        let mut names = [a.kind().name(), b.kind().name()];
        names.sort_unstable();
        (a.layer_index() == b.layer_index()).then(|| (names.map(str::to_owned), None))
    };
    let neighbours = |a: Checkpoint, b: Checkpoint| {
        let (one, other) = (a.layer_index()?, b.layer_index()?);
        let names =
            [one.min(other), one.max(other)].map(|layer| format!("layer {layer}'s {}", a.kind().name()));
        (a.kind() == b.kind() && one.abs_diff(other) == 1).then(|| (names, Some(one.min(other))))
    };
    let mut out = of_entry(labelled, "linear.wrong_layer", &neighbours);
    for one in of_entry(labelled, "linear.wrong_weight", &roles) {
        let in_layer = |layer| {
            let of_layer = part(&one, Layers::One(layer), Rows::All, layers)?;
            Some(Hypothesis { text: one.text.clone(), spelling: None, ..of_layer })
        };
        out.extend((0..layers).filter_map(in_layer));
        out.push(one);
    }
    out
}

/// What two products are called that may read each other's weights, and their layer, where it is one that is meant.
type Pair<'a> = &'a dyn Fn(Checkpoint, Checkpoint) -> Option<Exchange>;

/// The pairs of products of which each makes a mistake by which it reads the other's weight.
fn of_entry(labelled: &Labelled, name: &str, pair: Pair<'_>) -> Vec<Hypothesis> {
    let (graph, scene) = (&labelled.program.graph, Scene::new(&labelled.program.graph));
    let Some(entry) = find(name) else { return Vec::new() };
    let read = |id: Id| graph.src(id, 0).map(|weight| graph.origin(weight));
    let products: Vec<(Id, Checkpoint)> = labelled.products().collect();
    let mut pairs: BTreeMap<Exchange, BTreeMap<Id, Vec<Injected>>> = BTreeMap::new();
    for &(id, checkpoint) in &products {
        for fault in entry.all_at(&scene, id) {
            let others = fault.rewrite.change.others();
            let partners =
                products.iter().filter(|(other, _)| read(*other).is_some_and(|own| others.contains(&own)));
            if let Some(of) = partners.filter_map(|(_, at)| pair(checkpoint, *at)).next() {
                pairs.entry(of).or_default().insert(id, vec![Injected { spec: 0, checkpoint, fault }]);
            }
        }
    }
    let whole = pairs.into_iter().filter_map(|(([a, b], layer), nodes)| {
        let layers = layer.map_or(Layers::All, Layers::One);
        let one = of_nodes(nodes, layers, Rows::All, format!("{name} of {a} and {b}"))?;
        let text = format!("the weights of {a} and {b} have changed places");
        Some(Hypothesis { text, spelling: None, ..one })
    });
    whole.collect()
}
