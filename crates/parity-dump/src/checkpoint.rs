//! The vocabulary: every place in a forward pass that parity can name.
//!
//! This is the one file in which the fixed ids are spelt; whatever else a recorded graph computes has a name from
//! that graph ([`Kind::Named`]). Shapes use the letters
//! T token rows, D model width, H query heads, K key/value heads, E head width,
//! F feed-forward width, V vocabulary, S cached positions; slowest axis first.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::symbol::Symbol;

/// What is computed at a checkpoint, without the layer it is computed in.
///
/// Kinds have no order: what is computed before what is the graph's business. See [`usual_order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// (T, D) rows of the token embedding table.
    Embed,
    /// (T, D) RMS norm of the layer input times its weight.
    AttnNorm,
    /// (T, H·E) query product before any bias.
    QProj,
    /// (T, H, E) query after bias.
    Q,
    /// (T, K·E) key product before any bias.
    KProj,
    /// (T, K, E) key after bias.
    K,
    /// (T, K·E) value product before any bias.
    VProj,
    /// (T, K, E) value after bias.
    V,
    /// (T, H, E) per-head RMS norm of the query (qwen3).
    QNorm,
    /// (T, K, E) per-head RMS norm of the key (qwen3).
    KNorm,
    /// (T, H, E) query after rotary position embedding.
    QRope,
    /// (T, K, E) key after rotary position embedding.
    KRope,
    /// (H, T, S) q·k, unscaled and unmasked.
    AttnScores,
    /// (H, T, S) softmax of the scaled, masked scores.
    AttnProbs,
    /// (T, H·E) attention output, heads concatenated, before the output product.
    AttnCtx,
    /// (T, D) attention output product.
    AttnOut,
    /// (T, D) attention output plus the layer input.
    AttnResidual,
    /// (T, D) RMS norm of the attention residual times its weight.
    FfnNorm,
    /// (T, F) gate product.
    FfnGate,
    /// (T, F) up product.
    FfnUp,
    /// (T, F) silu(gate)·up.
    FfnAct,
    /// (T, D) down product.
    FfnOut,
    /// (T, D) feed-forward output plus the attention residual.
    LayerOut,
    /// (T, D) final RMS norm times its weight.
    FinalNorm,
    /// (T, V) scores over the vocabulary.
    Logits,
    /// Anything else that a graph computes, in a layer or outside, after llama.cpp's name for it.
    Named(Symbol),
}

/// Every fixed kind with its spelling, in the order in which they are listed: see [`usual_order`]. The only place where
/// these ids are spelt.
const KINDS: [(Kind, &str); 25] = [
    (Kind::Embed, "embed"),
    (Kind::AttnNorm, "attn_norm"),
    (Kind::QProj, "q_proj"),
    (Kind::Q, "q"),
    (Kind::KProj, "k_proj"),
    (Kind::K, "k"),
    (Kind::VProj, "v_proj"),
    (Kind::V, "v"),
    (Kind::QNorm, "q_norm"),
    (Kind::KNorm, "k_norm"),
    (Kind::QRope, "q_rope"),
    (Kind::KRope, "k_rope"),
    (Kind::AttnScores, "attn_scores"),
    (Kind::AttnProbs, "attn_probs"),
    (Kind::AttnCtx, "attn_ctx"),
    (Kind::AttnOut, "attn_out"),
    (Kind::AttnResidual, "attn_residual"),
    (Kind::FfnNorm, "ffn_norm"),
    (Kind::FfnGate, "ffn_gate"),
    (Kind::FfnUp, "ffn_up"),
    (Kind::FfnAct, "ffn_act"),
    (Kind::FfnOut, "ffn_out"),
    (Kind::LayerOut, "layer_out"),
    (Kind::FinalNorm, "final_norm"),
    (Kind::Logits, "logits"),
];

/// Prefix of every id that belongs to a layer, as in GGUF tensor names.
const LAYER_PREFIX: &str = "blk.";

impl Kind {
    /// The fixed kinds in their usual order: see [`usual_order`].
    pub fn all() -> impl ExactSizeIterator<Item = Kind> {
        KINDS.iter().map(|(kind, _)| *kind)
    }

    /// The kind that is spelt so: a fixed one, or else a name. `None` where it cannot be a name.
    pub fn of(name: &str) -> Option<Kind> {
        let fixed = KINDS.iter().find(|(_, spelt)| *spelt == name);
        fixed.map(|(kind, _)| *kind).or_else(|| Symbol::new(name).map(Kind::Named))
    }

    /// The spelling without the layer prefix, e.g. `q_rope`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Named(symbol) => symbol.name(),
            fixed => KINDS.iter().find(|(kind, _)| *kind == fixed).map_or("", |(_, name)| name),
        }
    }

    /// Whether the meaning is fixed, and not that of one graph.
    pub const fn is_fixed(self) -> bool {
        !matches!(self, Kind::Named(_))
    }

    /// Whether ids of this kind carry a layer number. A name may stand in a layer or outside: then the
    /// [`Checkpoint`] knows, and this is `true`.
    pub const fn in_layer(self) -> bool {
        !matches!(self, Kind::Embed | Kind::FinalNorm | Kind::Logits)
    }

    /// Whether an engine records this kind only when it is asked for by name.
    ///
    /// The attention matrices grow with the square of the prompt.
    pub const fn is_optional(self) -> bool {
        matches!(self, Kind::AttnScores | Kind::AttnProbs)
    }
}

/// Layer number of what is in no layer.
const NO_LAYER: u32 = u32::MAX;

/// A named place in the forward pass: `embed`, `blk.3.q_rope`, `blk.3.ffn_moe_probs`, `logits`.
///
/// Serialised as its id. It is a name and has no order: when it is computed stands in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checkpoint {
    kind: Kind,
    layer: u32,
}

impl Checkpoint {
    /// A checkpoint outside the layers: [`Kind::Embed`], [`Kind::FinalNorm`], [`Kind::Logits`] or a name.
    ///
    /// # Panics
    /// If `kind` belongs to a layer (a mistake in the caller, not in data).
    pub const fn global(kind: Kind) -> Self {
        assert!(!kind.in_layer() || !kind.is_fixed());
        Checkpoint { kind, layer: NO_LAYER }
    }

    /// A checkpoint of layer `layer`, counted from 0.
    ///
    /// # Panics
    /// If `kind` does not belong to a layer (a mistake in the caller, not in data).
    pub const fn layer(kind: Kind, layer: u32) -> Self {
        assert!(kind.in_layer() && layer != NO_LAYER);
        Checkpoint { kind, layer }
    }

    /// What is computed here.
    pub const fn kind(self) -> Kind {
        self.kind
    }

    /// The layer, counted from 0; `None` for `embed`, `final_norm`, `logits` and names outside of layers.
    pub const fn layer_index(self) -> Option<u32> {
        if self.layer == NO_LAYER { None } else { Some(self.layer) }
    }

    /// The same layer, another kind.
    ///
    /// # Panics
    /// If `self` is in a layer and `kind` is not, or the reverse.
    pub const fn sibling(self, kind: Kind) -> Self {
        match self.layer_index() {
            Some(layer) => Checkpoint::layer(kind, layer),
            None => Checkpoint::global(kind),
        }
    }

    /// A fixed id that this one is a single slip of the pen away from, e.g. `blk.0.q_rope` of `blk.0.q_ropee`: in a
    /// dump without a graph such a name is a mistake rather than a node of its own.
    pub fn likely_meant(self) -> Option<Checkpoint> {
        let Kind::Named(symbol) = self.kind else { return None };
        // Of the shortest ids everything short is a slip away.
        let long = |name: &str| name.len() >= LIKELY_MIN;
        let close = KINDS.iter().find(|(kind, name)| {
            kind.in_layer() == self.layer_index().is_some() && long(name) && one_slip(symbol.name(), name)
        });
        close.map(|(kind, _)| self.sibling(*kind))
    }
}

/// `ids` in the order in which they are listed where nobody knows a graph, each once: the embedding, layer by layer
/// what [`Kind::all`] has, then the head; names stand behind the fixed ids of their layer, by their letters.
///
/// What is computed before what, the graph alone says: nothing may be concluded from this order.
pub fn usual_order(ids: impl IntoIterator<Item = Checkpoint>) -> Vec<Checkpoint> {
    let key = |id: &Checkpoint| {
        let part = match (id.kind, id.layer_index()) {
            (Kind::Embed, _) => 0,
            (_, Some(_)) => 1,
            (_, None) => 2,
        };
        let place = KINDS.iter().position(|(kind, _)| *kind == id.kind).unwrap_or(KINDS.len());
        (part, id.layer, place, id.kind.name())
    };
    let mut ids: Vec<Checkpoint> = ids.into_iter().collect();
    ids.sort_by_cached_key(key);
    ids.dedup();
    ids
}

/// What is known by id, as a file has it: sorted by the text of the id, so that the same is always written alike.
pub(crate) fn by_spelling<T>(known: &HashMap<Checkpoint, T>) -> BTreeMap<String, &T> {
    known.iter().map(|(id, value)| (id.to_string(), value)).collect()
}

/// Letters of the shortest id that a slip of the pen is recognised of.
const LIKELY_MIN: usize = 4;

/// Whether one letter too many, too few, or another one makes `a` of `b`.
fn one_slip(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let start = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let (a, b) = (&a[start..], &b[start..]);
    match (a.len(), b.len()) {
        (0, 0) => false,
        (n, m) if n == m => a[1..] == b[1..],
        (n, m) if n == m + 1 => a[1..] == *b,
        (n, m) if n + 1 == m => *a == b[1..],
        _ => false,
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `pad` keeps width and alignment of the caller's format string.
        match self.layer_index() {
            Some(layer) => f.pad(&format!("{LAYER_PREFIX}{layer}.{}", self.kind.name())),
            None => f.pad(self.kind.name()),
        }
    }
}

/// A string that is no checkpoint id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownCheckpoint(pub String);

impl fmt::Display for UnknownCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no checkpoint id (such as embed, {LAYER_PREFIX}0.q_rope, logits)", self.0)
    }
}

impl std::error::Error for UnknownCheckpoint {}

impl FromStr for Checkpoint {
    type Err = UnknownCheckpoint;

    fn from_str(id: &str) -> Result<Self, UnknownCheckpoint> {
        let unknown = || UnknownCheckpoint(id.to_owned());
        let (layer, name) = match id.strip_prefix(LAYER_PREFIX) {
            Some(rest) => {
                let (digits, name) = rest.split_once('.').ok_or_else(unknown)?;
                // Exactly one spelling per checkpoint: no sign, no leading zeros.
                let canonical = digits == "0" || !digits.starts_with(['0', '+']);
                let layer = digits.parse().ok().filter(|_| canonical).ok_or_else(unknown)?;
                (Some(layer), name)
            }
            None => (None, id),
        };
        let kind = Kind::of(name).ok_or_else(unknown)?;
        // A fixed id in the wrong place is no name.
        match layer {
            Some(layer) if kind.in_layer() && layer != NO_LAYER => Ok(Checkpoint::layer(kind, layer)),
            None if !kind.in_layer() || !kind.is_fixed() => Ok(Checkpoint::global(kind)),
            _ => Err(unknown()),
        }
    }
}

impl Serialize for Checkpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checkpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let id = String::deserialize(deserializer)?;
        id.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip() {
        for kind in Kind::all() {
            let checkpoint =
                if kind.in_layer() { Checkpoint::layer(kind, 27) } else { Checkpoint::global(kind) };
            assert_eq!(checkpoint.to_string().parse(), Ok(checkpoint));
        }
    }

    #[test]
    fn ids_have_one_spelling() {
        let wrong = ["blk.00.q", "blk.+1.q", "blk.q", "blk.1.embed", "q", "blk.1.", "", "blk.4294967296.q"];
        for id in wrong.into_iter().chain(["blk.4294967295.q", "blk.01.probs", "blk.1.a b", "a/b"]) {
            assert!(id.parse::<Checkpoint>().is_err(), "{id} was accepted");
        }
    }

    #[test]
    fn names_round_trip() {
        for id in
            ["blk.3.ffn_moe_probs", "blk.3.rms_norm#2", "result_scaled", "blk.0.a-b.c", "per_layer_proj"]
        {
            let checkpoint: Checkpoint = id.parse().unwrap();
            assert_eq!(checkpoint.to_string(), id);
            assert_eq!(checkpoint.layer_index().is_some(), id.starts_with(LAYER_PREFIX), "{id}");
            let json = serde_json::to_string(&checkpoint).unwrap();
            assert_eq!(serde_json::from_str::<Checkpoint>(&json).unwrap(), checkpoint);
        }
    }

    #[test]
    fn a_slip_of_the_pen_is_recognised() {
        let meant = |id: &str| id.parse::<Checkpoint>().unwrap().likely_meant().map(|id| id.to_string());
        for id in ["blk.0.q_ropee", "blk.0.q_rpe", "blk.0.q-rope"] {
            assert_eq!(meant(id).as_deref(), Some("blk.0.q_rope"), "{id}");
        }
        assert_eq!(meant("logit").as_deref(), Some("logits"));
        for id in
            ["blk.0.q_rope", "blk.0.q_pe", "blk.0.ffn_moe_out", "blk.0.logit", "blk.0.z", "blk.0.q_norm#2"]
        {
            assert_eq!(meant(id), None, "{id}");
        }
    }

    #[test]
    fn the_usual_order_goes_through_the_layers() {
        let ids: Vec<Checkpoint> = [
            "logits",
            "result_scaled",
            "blk.10.attn_norm",
            "blk.2.z",
            "blk.2.layer_out",
            "blk.2.k_proj",
            "embed",
            "blk.2.q_rope",
            "final_norm",
            "blk.2.z",
        ]
        .map(|id| id.parse().unwrap())
        .into();
        let spelt: Vec<String> = usual_order(ids).iter().map(ToString::to_string).collect();
        let expected = [
            "embed",
            "blk.2.k_proj",
            "blk.2.q_rope",
            "blk.2.layer_out",
            "blk.2.z",
            "blk.10.attn_norm",
            "final_norm",
            "logits",
            "result_scaled",
        ];
        assert_eq!(spelt, expected);
    }
}
