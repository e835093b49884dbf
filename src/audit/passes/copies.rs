//! An engine whose nodes read copies in a narrow type of what others computed in f32, which is what was recorded.
//!
//! Matrix units give sums in f32, and what reads them reads numbers of f16 or bf16 (OpenVINO's precision hint, autocast by hand):
//! such a dump shows no narrow number, so that it looks like one of an engine of f32, and nodes behind what was not recorded lie
//! a thousand times further off than f32 rounds. Which nodes read copies is not known: norms of such an engine read what was
//! recorded, and products behind them copies. So the stretch is simulated with every copy rounded either way.

use std::collections::HashMap;

use indexmap::IndexSet;

use super::super::attentions::attention;
use super::super::best::{Simulated, scouts};
use super::super::operands::products;
use super::super::shown_products::Shown;
use super::super::simulate::Stretch;
use super::mixed::crossed;
use super::unlike::WHOLLY;
use super::{APART, Assumed, Findings, Passes};
use crate::arithmetic::{Arithmetic, Narrow, Operands};
use crate::audit::Finding;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::{Numerics, Products, Storage};

impl Passes<'_> {
    /// Takes wrong nodes that have no name, as most of their kind are wrong, for what an engine computes of such copies. Where nobody
    /// declares a narrow type they are undecided.
    pub(super) fn copies(
        &self,
        assumed: &Assumed,
        shown: Option<Shown>,
        findings: &mut Findings,
    ) -> Result<()> {
        let declared = self.steps.declared();
        let own = Arithmetic { narrow: assumed.kept, cache: assumed.kept, ..Arithmetic::EXACT };
        let types = Some(types(declared, shown)).filter(|_| assumed.kept == Storage::F32);
        let copies = types.into_iter().flatten().flat_map(arithmetics);
        // What no product shows, and nobody declares, may be in eight bits. That rounds more than all others, and so comes last.
        let is_open = declared.is_none() && shown.is_none();
        let in_rows = Arithmetic { operands: Operands::Rows, ..own };
        let in_rows = Some((Storage::F32, in_rows)).filter(|_| is_open);
        let tried: Vec<(Storage, Arithmetic)> = copies.chain(in_rows).collect();
        let mut wrong = self.mostly_wrong(findings);
        if wrong.is_empty() || tried.is_empty() {
            return Ok(());
        }
        let as_is = self.known().explained(own, &wrong)?;
        let is_open = |found: &Simulated| !found.explains_most || found.is_hidden_in(assumed.kept);
        wrong.retain(|id| as_is.get(id).is_some_and(is_open));
        let mut likely = None;
        for (kept, own) in tried {
            let some = self.reading(kept).explained(own, &scouts(&wrong))?;
            // The first that explains all; else, of those that round all between, the first that explains any.
            if some.values().all(Simulated::is_explained) {
                likely = Some((kept, own));
                break;
            }
            if own.narrow != Storage::F32 && some.values().any(Simulated::is_explained) {
                likely.get_or_insert((kept, own));
            }
        }
        let Some((kept, own)) = likely else { return Ok(()) };
        let all = self.reading(kept).explained(own, &wrong)?;
        // Where it explains half of them, one that lies no further from it than a few times as far as they do is no more wrong.
        let explained: Vec<f64> =
            all.values().filter(|found| found.is_explained()).map(|found| found.over).collect();
        let furthest = explained.iter().copied().fold(0.0, f64::max);
        let times = if 2 * explained.len() >= all.len() { APART * furthest } else { 1.0 };
        let all = all.into_iter().map(|(id, found)| (id, found.widened(times)));
        for (id, mut found) in all.filter(|(_, found)| found.is_explained()) {
            found.known = declared.is_some();
            findings.at(id).settle(found);
            findings.at(id).forget_names();
        }
        Ok(())
    }

    /// What is simulated of an engine whose nodes may read copies in `kept` of what was recorded; f32: what was recorded.
    fn reading(&self, kept: Storage) -> Stretch<'_> {
        match kept {
            Storage::F32 => self.known(),
            kept => self.known().reading_copies(kept),
        }
    }

    /// Wrong nodes behind what was not recorded that have no name, of kinds of which most are.
    fn mostly_wrong(&self, findings: &Findings) -> IndexSet<Checkpoint> {
        let mut counts: HashMap<Kind, [usize; 2]> = HashMap::new();
        for id in crossed(findings, &|finding| finding.judged > 0) {
            let [wrong, all] = counts.entry(id.kind()).or_default();
            *wrong += usize::from(findings.nodes[&id].is_wrong());
            *all += 1;
        }
        let is_named =
            |finding: &Finding| finding.diagnosis().0.first().is_some_and(|first| first.explains >= WHOLLY);
        let mut wrong = crossed(findings, &|finding| finding.is_wrong() && !is_named(finding));
        wrong.retain(|id| {
            let [wrong, all] = counts[&id.kind()];
            2 * wrong > all
        });
        wrong
    }
}

/// What an engine may compute in whose nodes read copies of a type: with operands of products and of attention alone rounded to it,
/// or all that lies between, in an order that nobody knows.
fn arithmetics(kept: Storage) -> [(Storage, Arithmetic); 2] {
    let narrow = if kept == Storage::F16 { Narrow::F16 } else { Narrow::Bf16 };
    let all = Arithmetic { narrow: kept, cache: kept, ..products(narrow) };
    [(kept, attention(narrow)), (kept, all)]
}

/// The types that such copies may have.
fn types(declared: Option<Numerics>, shown: Option<Shown>) -> Vec<Storage> {
    match (declared, shown.map(|shown| shown.operands)) {
        (Some(Numerics { storage, .. }), _) if storage != Storage::F32 => vec![storage],
        (Some(Numerics { products: Products::F16, .. }), _) => vec![Storage::F16],
        (Some(Numerics { products: Products::Bf16, .. }), _) => vec![Storage::Bf16],
        (None, None) => vec![Storage::F16, Storage::Bf16],
        (None, Some(Operands::Both(Narrow::F16))) => vec![Storage::F16],
        (None, Some(Operands::Both(Narrow::Bf16))) => vec![Storage::Bf16],
        _ => Vec::new(),
    }
}
