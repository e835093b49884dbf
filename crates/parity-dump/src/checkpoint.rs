//! The vocabulary: every place in a forward pass that parity can name.
//!
//! This is the one file in which checkpoint ids are spelt. Shapes use the letters
//! T token rows, D model width, H query heads, K key/value heads, E head width,
//! F feed-forward width, V vocabulary, S cached positions; slowest axis first.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What is computed at a checkpoint, without the layer it is computed in.
///
/// The order of the variants is the order of execution within a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
}

/// Every kind with its spelling, in order of execution. The only place where ids are spelt.
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
    /// All kinds in order of execution.
    pub fn all() -> impl ExactSizeIterator<Item = Kind> {
        KINDS.iter().map(|(kind, _)| *kind)
    }

    /// The spelling without the layer prefix, e.g. `q_rope`.
    pub fn name(self) -> &'static str {
        KINDS[self as usize].1
    }

    /// Whether ids of this kind carry a layer number.
    pub fn in_layer(self) -> bool {
        !matches!(self, Kind::Embed | Kind::FinalNorm | Kind::Logits)
    }

    /// Whether an engine records this kind only when it is asked for by name.
    ///
    /// The attention matrices grow with the square of the prompt.
    pub fn is_optional(self) -> bool {
        matches!(self, Kind::AttnScores | Kind::AttnProbs)
    }
}

/// A named place in the forward pass: `embed`, `blk.3.q_rope`, `logits`.
///
/// Ordered by execution. Serialised as its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checkpoint {
    kind: Kind,
    layer: u32,
}

impl Checkpoint {
    /// A checkpoint outside the layers: [`Kind::Embed`], [`Kind::FinalNorm`] or [`Kind::Logits`].
    ///
    /// # Panics
    /// If `kind` belongs to a layer (a mistake in the caller, not in data).
    pub const fn global(kind: Kind) -> Self {
        assert!(matches!(kind, Kind::Embed | Kind::FinalNorm | Kind::Logits));
        Checkpoint { kind, layer: 0 }
    }

    /// A checkpoint of layer `layer`, counted from 0.
    ///
    /// # Panics
    /// If `kind` does not belong to a layer (a mistake in the caller, not in data).
    pub const fn layer(kind: Kind, layer: u32) -> Self {
        assert!(!matches!(kind, Kind::Embed | Kind::FinalNorm | Kind::Logits));
        Checkpoint { kind, layer }
    }

    /// What is computed here.
    pub const fn kind(self) -> Kind {
        self.kind
    }

    /// The layer, counted from 0; `None` for `embed`, `final_norm` and `logits`.
    pub fn layer_index(self) -> Option<u32> {
        self.kind.in_layer().then_some(self.layer)
    }

    /// The same layer, another kind.
    ///
    /// # Panics
    /// If `self` is in a layer and `kind` is not, or the reverse.
    pub const fn sibling(self, kind: Kind) -> Self {
        match self.kind {
            Kind::Embed | Kind::FinalNorm | Kind::Logits => Checkpoint::global(kind),
            _ => Checkpoint::layer(kind, self.layer),
        }
    }

    /// Sort key: embed, then the layers, then the head of the model.
    fn order(self) -> (u32, u32, Kind) {
        match self.kind {
            Kind::Embed => (0, 0, self.kind),
            Kind::FinalNorm | Kind::Logits => (2, 0, self.kind),
            _ => (1, self.layer, self.kind),
        }
    }
}

impl PartialOrd for Checkpoint {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Checkpoint {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
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
        let kind = KINDS.iter().find(|(_, spelt)| *spelt == name).ok_or_else(unknown)?.0;
        match (layer, kind.in_layer()) {
            (Some(layer), true) => Ok(Checkpoint { kind, layer }),
            (None, false) => Ok(Checkpoint { kind, layer: 0 }),
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
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, (kind, _)) in KINDS.iter().enumerate() {
            assert_eq!(*kind as usize, index);
        }
    }

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
        for id in ["blk.00.q", "blk.+1.q", "blk.q", "blk.1.embed", "q", "blk.1.", "", "blk.4294967296.q"] {
            assert!(id.parse::<Checkpoint>().is_err(), "{id} was accepted");
        }
    }

    #[test]
    fn order_is_execution_order() {
        let mut ids: Vec<Checkpoint> =
            ["logits", "blk.10.attn_norm", "blk.2.layer_out", "embed", "final_norm"]
                .map(|id| id.parse().unwrap())
                .into();
        ids.sort();
        let spelt: Vec<String> = ids.iter().map(ToString::to_string).collect();
        assert_eq!(spelt, ["embed", "blk.2.layer_out", "blk.10.attn_norm", "final_norm", "logits"]);
    }
}
