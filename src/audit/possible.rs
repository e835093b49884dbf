//! Arithmetics that an engine may have, for what lies between two recorded nodes.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use indexmap::IndexSet;

use super::Steps;
use super::attentions::{self, ATTENTIONS, attends};
use super::operands::{CANDLE, PRODUCTS, products};
use super::shown_products::Shown;
use super::storage_types;
use crate::arithmetic::{Arithmetic, Flash, Fresh, Narrow, OfAttention, Operands, Scaled, Weights};
use crate::checkpoint::Kind;
use crate::numerics::{Numerics, Products, Storage};

/// The arithmetics that an engine may have which keeps its values in `kept`, the likeliest first; where products were recorded
/// those alone that multiply as these were `shown` to.
pub fn arithmetics(
    steps: &dyn Steps,
    (kept, shown): (Storage, Option<Shown>),
    two_products: Option<Arithmetic>,
) -> IndexSet<Arithmetic> {
    let own = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
    let candle = [CANDLE, Arithmetic { narrow: kept, cache: kept, ..CANDLE }];
    let candle = candle.into_iter().filter(|_| steps.declared().is_none());
    let llama = Some(Arithmetic::LLAMA_CPU).filter(|_| !storage_types::declares_plain(steps));
    let tried = [Arithmetic::EXACT, own].into_iter().chain(llama).chain(two_products).chain(candle);
    // llama.cpp's products show the rounding of their weights' type, f16 operands of F16 weights for one, others that of one side;
    // what the operands of attention are rounded to, which meet no weight, is open then.
    let beside_shown = |one: Arithmetic| match (shown.map(|shown| shown.operands), one.flash) {
        (Some(shown @ (Operands::VecDot | Operands::One(..))), Flash::Rounded(..)) => {
            Arithmetic { operands: shown, ..one }
        }
        _ => one,
    };
    let tried = tried.chain(attentions::with_operands(steps.declared()).into_iter().map(beside_shown));
    // What an engine rarely has comes last.
    let rare = [Narrow::Pair, Narrow::Tf32Away].map(products);
    // Activations in eight bits round as much as a cache of eight bits does: where no product shows them they would hide that. What
    // one side alone is rounded to shows in products too.
    let is_rare = |operands| matches!(operands, Operands::Rows | Operands::Blocks(_) | Operands::One(..));
    let as_shown = shown.map(|shown| shown.operands).filter(|operands| is_rare(*operands));
    let rare = rare.into_iter().chain(as_shown.map(|operands| Arithmetic { operands, ..Arithmetic::EXACT }));
    let tried = tried.chain(rare.filter(|_| steps.declared().is_none()));
    let tried: Vec<Arithmetic> =
        tried.filter(|one| shown.is_none_or(|shown| shown.allows(one.operands))).collect();
    let with = |cache: Storage| tried.iter().map(move |one| with_cache(*one, cache)).collect::<Vec<_>>();
    let caches = attentions::caches(steps);
    // What an attention rounds that reads some keys before they are kept shows where it rounds nothing else.
    let is_plain = |one: &&Arithmetic| {
        one.flash == Flash::Exact
            && one.narrow == Storage::F32
            && (shown.is_some() || one.operands == Operands::Exact)
    };
    let fresh = |cache: Storage| {
        let plain = tried.iter().filter(is_plain).map(move |one| with_cache(*one, cache));
        plain.flat_map(|one| Fresh::KINDS.map(|fresh| Arithmetic { fresh, ..one })).collect::<Vec<_>>()
    };
    let narrow =
        caches.iter().copied().filter(|cache| *cache != Storage::F32 && !steps.positions(1).is_empty());
    caches.iter().copied().flat_map(with).chain(narrow.flat_map(fresh)).collect()
}

/// Whether a producer says that it rounds to a type narrower than f32.
pub fn declares_narrow(steps: &dyn Steps) -> bool {
    let narrow = |numerics: Numerics| {
        numerics.storage != Storage::F32 || matches!(numerics.products, Products::F16 | Products::Bf16)
    };
    steps.declared().is_some_and(narrow)
}

/// An arithmetic with keys and values in a cache of a type, unless its own is narrower than f32.
fn with_cache(one: Arithmetic, cache: Storage) -> Arithmetic {
    Arithmetic { cache: if one.cache == Storage::F32 { cache } else { one.cache }, ..one }
}

/// The rows whose operands are rounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    Any,
    /// Steps of one row alone.
    One,
    /// All others.
    Several,
    /// Those at these positions, whatever others of their step are.
    At(Arc<BTreeSet<u32>>),
}

/// Which products round their operands, and to what, of an engine that rounds those of some and not of others: by the kind of the
/// node, as where a library has no such kernel for a shape, or by the row, as where single rows meet a weight in another kernel.
#[derive(Clone, Debug)]
pub struct Mix {
    /// What they are rounded to.
    pub narrow: Narrow,
    /// The kinds of the nodes that are such products, or attention.
    pub kinds: HashSet<Kind>,
    /// What attention rounds, if it is among them.
    pub attention: OfAttention,
    /// The rows of which they do.
    pub rows: Rows,
}

impl Mix {
    /// Of an engine that rounds no operands.
    pub fn none() -> Mix {
        let attention = OfAttention::all(Weights::Divided);
        Mix { narrow: Narrow::Tf32, kinds: HashSet::new(), attention, rows: Rows::Any }
    }

    /// Whether the operands of each of some rows are rounded, at a node of a kind.
    pub fn rounds(&self, kind: Option<Kind>, positions: &[u32]) -> Vec<bool> {
        let is_such = kind.is_some_and(|kind| self.kinds.contains(&kind));
        let rounds = |position: &u32| match &self.rows {
            Rows::Any => true,
            Rows::One => positions.len() == 1,
            Rows::Several => positions.len() > 1,
            Rows::At(rows) => rows.contains(position),
        };
        positions.iter().map(|position| is_such && rounds(position)).collect()
    }

    /// What is left of an arithmetic where no operand is rounded.
    pub fn plain(one: Arithmetic) -> Arithmetic {
        let Arithmetic { operands, flash, .. } = Arithmetic::EXACT;
        Arithmetic { operands, flash, ..one }
    }

    /// What these nodes are computed in.
    pub fn arithmetic(&self) -> Arithmetic {
        let products = products(self.narrow);
        if !self.kinds.iter().any(|kind| attends(*kind)) {
            return products;
        }
        Arithmetic { flash: Flash::Rounded(self.narrow, self.attention, Scaled::Scores), ..products }
    }

    /// What that is called; `None` where nothing is rounded.
    pub fn name(&self) -> Option<&'static str> {
        let is_of_weights = self.kinds.iter().any(|kind| !attends(*kind));
        let names = if is_of_weights { &PRODUCTS[..] } else { &ATTENTIONS[..] };
        let named = names.iter().find(|(_, narrow)| *narrow == self.narrow);
        named.map(|(name, _)| *name).filter(|_| !self.kinds.is_empty())
    }
}
