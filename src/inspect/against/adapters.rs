//! An adapter of low rank against the one that it was converted from.

use indexmap::IndexMap;

use super::Difference;
use super::measure::{Distance, whole};
use super::view::{Order, View};
use crate::gguf::{Adapter, Pair, TensorInfo};
use parity_dump::Element;
use parity_graph::fault::spell;

/// What differs between an adapter in the model's own names and the one that it was `converted` from: each thing once.
pub fn compare_adapters(converted: &Adapter, original: &Adapter) -> Vec<Difference> {
    let mut found: IndexMap<[String; 4], Vec<&str>> = IndexMap::new();
    let weights = original.pairs().map(|(weight, _)| weight);
    let more = converted.pairs().map(|(weight, _)| weight).filter(|weight| original.pair(weight).is_none());
    for weight in weights.chain(more) {
        for difference in of_weight(weight, converted, original) {
            found.entry(difference).or_default().push(weight);
        }
    }
    let difference = |([name, original, converted, effect], weights): ([String; 4], Vec<&str>)| {
        let place = match weights[..] {
            [one] => one.to_owned(),
            _ => format!("{} matrices: {}, …", weights.len(), weights[0]),
        };
        Difference { name, place, original, converted, effect, changes_logits: true }
    };
    found.into_iter().map(difference).collect()
}

/// Name, original, converted and effect of what differs at a weight.
fn of_weight(weight: &str, converted: &Adapter, original: &Adapter) -> Vec<[String; 4]> {
    let said = |pair: Option<&Pair>| {
        pair.map_or_else(|| "no matrices".to_owned(), |pair| format!("matrices of rank {}", pair.rank()))
    };
    let (ours, theirs) = (converted.pair(weight), original.pair(weight));
    let (Some(own), Some(of)) = (ours, theirs) else {
        let effect = "what the adapter adds there is left out on one side";
        return vec![["lora.missing".to_owned(), said(theirs), said(ours), effect.to_owned()]];
    };
    let mut found = Vec::new();
    let (scale, wanted) = (converted.scale(own), original.scale(of));
    if !Adapter::is_scale(scale, wanted) {
        let is_alpha = Adapter::is_scale(wanted * of.rank() as f32, scale);
        let name = if is_alpha { "lora.alpha" } else { "lora.scale" };
        let effect = "what the adapter adds is of another size";
        let scales = [wanted, scale].map(|scale| format!("a scale of {}", spell(f64::from(scale))));
        let [wanted, scale] = scales;
        found.push([name.to_owned(), wanted, scale, effect.to_owned()]);
    }
    for (own, of, half) in [(&own.a, &of.a, "A"), (&own.b, &of.b, "B")] {
        let effect = format!("{half} of the adapter is another matrix");
        if own.0.shape != of.0.shape {
            let [theirs, ours] = [of, own].map(|(info, _)| format!("{half} of shape {:?}", info.shape));
            found.push(["weights.differ".to_owned(), theirs, ours, effect]);
            continue;
        }
        let distance = distance(own, of);
        if !distance.is_explained() {
            let ours = format!("{half}, {:.1e} from it", distance.rel_l2());
            found.push(["weights.differ".to_owned(), half.to_owned(), ours, effect]);
        }
    }
    found
}

/// A matrix against one in f32 of the same shape.
fn distance((info, bytes): &(TensorInfo, Vec<u8>), (of, values): &(TensorInfo, Vec<u8>)) -> Distance {
    let cols = of.cols();
    let rows = of.elements() / cols.max(1);
    let shape = [rows, cols];
    let (row, order) = (cols, Order::AsStored);
    let view = View { bytes: values, element: Element::F32, start: 0, shape, row, col: 1, order, add: 0.0 };
    whole(crate::gguf::TensorRef { info, bytes }, 0, &view)
}
