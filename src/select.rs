//! Which checkpoints a command looks at: `--layer 0..3`, `--checkpoint 'blk.*.q_rope'`.

use std::fmt;
use std::str::FromStr;

use globset::{Glob, GlobMatcher, GlobSet, GlobSetBuilder};
use indexmap::IndexSet;

use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Error, Result};

/// A pattern of ids, given as `subject` (a flag, a file, a key).
///
/// # Errors
/// Names the pattern where it is none.
pub fn pattern(subject: &str, glob: &str) -> Result<GlobMatcher> {
    parsed(subject, glob).map(|glob| glob.compile_matcher())
}

/// Several patterns, one of which has to match.
///
/// # Errors
/// As [`pattern`].
pub fn patterns(subject: &str, globs: &[String]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        set.add(parsed(subject, glob)?);
    }
    set.build().map_err(|e| Error::new(subject, e))
}

fn parsed(subject: &str, glob: &str) -> Result<Glob> {
    Glob::new(glob).map_err(|e| {
        Error::new(subject, format!("`{glob}` is no pattern: {e}"))
            .expected("an id or a pattern such as 'blk.*.q_rope'")
    })
}

/// Layers `first` to `last`, both included: `3`, `0..3`, `0-3`, `5..` (to the end).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// First layer.
    pub first: u32,
    /// Last layer.
    pub last: u32,
}

impl FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |part: &str| {
            part.parse::<u32>().map_err(|_| format!("`{text}` is no layer or range of layers (3, 0..3, 5..)"))
        };
        let (first, last) = match text.split_once("..").or_else(|| text.split_once('-')) {
            Some((first, "")) => (number(first)?, u32::MAX),
            Some((first, last)) => (number(first)?, number(last.trim_start_matches('='))?),
            None => (number(text)?, number(text)?),
        };
        if first <= last { Ok(Layers { first, last }) } else { Err(format!("`{text}` runs backwards")) }
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (first, last) if first == last => write!(f, "{first}"),
            (first, u32::MAX) => write!(f, "{first}.."),
            (first, last) => write!(f, "{first}..{last}"),
        }
    }
}

/// What a pattern that fits none of `ids` was probably meant to be: a name without its layer, or a misspelt id.
fn meant(typed: &str, ids: &[String]) -> Option<String> {
    if ids.iter().any(|id| is_layerless(typed, id)) {
        return Some(format!("'blk.*.{typed}'"));
    }
    alike(typed, ids).cloned()
}

fn is_layerless(typed: &str, id: &str) -> bool {
    id.strip_suffix(typed).is_some_and(|head| head.ends_with('.'))
}

/// The one of `ids` that a misspelt one, or a name without its layer, probably was to be.
pub fn alike<'a>(typed: &str, ids: &'a [String]) -> Option<&'a String> {
    if let Some(id) = ids.iter().find(|id| is_layerless(typed, id)) {
        return Some(id);
    }
    let likeness = |id: &&String| strsim::jaro_winkler(typed, id);
    let best = ids.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) >= ALIKE_MIN).then_some(best)
}

/// The checkpoints that a command looks at; all standard ones by default.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    layers: Option<Layers>,
    globs: Option<GlobSet>,
    /// The patterns as they were typed.
    typed: Vec<String>,
    /// What is looked at besides, whatever was chosen.
    also: IndexSet<Checkpoint>,
}

/// How alike two ids must be (0 to 1, Jaro and Winkler) for one to be meant by the other: one letter off in five.
const ALIKE_MIN: f64 = 1.0 - 1.0 / 5.0;

impl Selection {
    /// The selection of `--layer` and `--checkpoint` (several allowed).
    pub fn new(layers: Option<Layers>, globs: &[String]) -> Result<Selection> {
        let set = patterns("--checkpoint", globs)?;
        Ok(Selection {
            layers,
            globs: (!globs.is_empty()).then_some(set),
            typed: globs.to_vec(),
            also: IndexSet::new(),
        })
    }

    /// Refuses the selection where none of `ids`, of a model of `n_layers` layers, is looked at; says what may be meant.
    pub fn refused(&self, ids: impl Iterator<Item = Checkpoint>, n_layers: usize) -> Error {
        let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
        let error = Error::new("--layer, --checkpoint", "no checkpoint of this model is selected")
            .expected(format!(
                "layers 0 to {}, or a pattern such as 'blk.*.q_rope'",
                n_layers.saturating_sub(1)
            ))
            .found(
                [self.layers.map(|layers| layers.to_string()), self.typed.first().cloned()]
                    .into_iter()
                    .flatten()
                    .collect::<Vec<_>>()
                    .join(" "),
            );
        match self.typed.iter().find_map(|typed| meant(typed, &ids)) {
            Some(meant) => error.hint(format!("--checkpoint {meant}")),
            None => error,
        }
    }

    /// Whether `checkpoint` is looked at, in a model of `n_layers` layers.
    ///
    /// The first layer brings the embedding along, the last one the head. Attention matrices have to be asked
    /// for by name, or to be recorded (see [`Selection::and_unnamed`]).
    pub fn wants(&self, checkpoint: Checkpoint, n_layers: usize) -> bool {
        let named = match &self.globs {
            Some(globs) => globs.is_match(checkpoint.to_string()),
            None => !checkpoint.kind().is_optional(),
        };
        self.also.contains(&checkpoint) || named && self.is_in_layers(checkpoint, n_layers)
    }

    /// The same, and those checkpoints of `all` that it leaves out only because nobody named them and that are `there`.
    pub fn and_unnamed(&self, all: &[Checkpoint], there: impl Fn(Checkpoint) -> bool) -> Selection {
        let n_layers = layers_of(all.iter().copied());
        let unnamed = |id: &Checkpoint| {
            self.globs.is_none() && id.kind().is_optional() && self.is_in_layers(*id, n_layers)
        };
        let mut out = self.clone();
        out.also.extend(all.iter().copied().filter(|id| unnamed(id) && there(*id)));
        out
    }

    fn is_in_layers(&self, checkpoint: Checkpoint, n_layers: usize) -> bool {
        self.layers.is_none_or(|layers| match (checkpoint.layer_index(), checkpoint.kind()) {
            (Some(layer), _) => (layers.first..=layers.last).contains(&layer),
            (None, Kind::Embed) => layers.first == 0,
            (None, _) => (layers.first as usize..=layers.last as usize).contains(&n_layers.saturating_sub(1)),
        })
    }

    /// The checkpoints that are looked at, of all that a model or a recording has, in the order that they are given in.
    pub fn among(&self, all: impl Iterator<Item = Checkpoint>) -> IndexSet<Checkpoint> {
        let all: IndexSet<Checkpoint> = all.collect();
        let n_layers = layers_of(all.iter().copied());
        all.into_iter().filter(|id| self.wants(*id, n_layers)).collect()
    }

    /// The same of a recorded graph, every node of which is looked at where nothing is chosen.
    pub fn of_graph(&self, all: impl Iterator<Item = Checkpoint>) -> IndexSet<Checkpoint> {
        if self.is_all() { all.collect() } else { self.among(all) }
    }

    /// Whether `checkpoint` is looked at whatever else is, such as one that a pattern names.
    pub fn names(&self, checkpoint: Checkpoint) -> bool {
        self.also.contains(&checkpoint)
            || self.globs.as_ref().is_some_and(|globs| globs.is_match(checkpoint.to_string()))
    }

    /// Whether everything standard is looked at.
    pub fn is_all(&self) -> bool {
        self.layers.is_none() && self.globs.is_none()
    }
}

/// Layers of a model that has these checkpoints.
fn layers_of(all: impl Iterator<Item = Checkpoint>) -> usize {
    all.filter_map(|id| id.layer_index()).max().map_or(0, |last| last as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(layers: Option<&str>, globs: &[&str]) -> Vec<String> {
        let globs: Vec<String> = globs.iter().map(ToString::to_string).collect();
        let selection = Selection::new(layers.map(|l| l.parse().unwrap()), &globs).unwrap();
        let ids = ["embed", "blk.0.q", "blk.0.attn_probs", "blk.1.q", "blk.2.q", "blk.2.layer_out", "logits"];
        ids.iter().filter(|id| selection.wants(id.parse().unwrap(), 3)).map(ToString::to_string).collect()
    }

    #[test]
    fn a_layer_brings_its_end_of_the_model_along() {
        assert_eq!(selected(Some("0"), &[]), ["embed", "blk.0.q"]);
        assert_eq!(selected(Some("1"), &[]), ["blk.1.q"]);
        assert_eq!(selected(Some("1..2"), &[]), ["blk.1.q", "blk.2.q", "blk.2.layer_out", "logits"]);
        assert_eq!(selected(Some("2.."), &[]), ["blk.2.q", "blk.2.layer_out", "logits"]);
        assert!(selected(Some("3"), &[]).is_empty(), "there is no layer 3");
    }

    #[test]
    fn matrices_are_looked_at_when_named() {
        assert_eq!(
            selected(None, &["blk.*.q", "*.attn_probs"]),
            ["blk.0.q", "blk.0.attn_probs", "blk.1.q", "blk.2.q"]
        );
    }

    #[test]
    fn a_name_that_fits_nothing_is_answered_with_what_may_be_meant() {
        let hint = |glob: &str| {
            let ids = ["embed", "blk.0.q_rope", "blk.1.q_rope", "blk.1.ffn_out", "logits"];
            let selection = Selection::new(Some("0..1".parse().unwrap()), &[glob.to_owned()]).unwrap();
            selection.refused(ids.iter().map(|id| id.parse().unwrap()), 2).to_string()
        };
        assert!(hint("blk.1.q_ropee").contains("--checkpoint blk.1.q_rope"), "{}", hint("blk.1.q_ropee"));
        assert!(hint("logit").contains("--checkpoint logits"));
        assert!(hint("ffn_out").contains("--checkpoint 'blk.*.ffn_out'"));
        assert!(!hint("xyz").contains("hint"), "{}", hint("xyz"));
        assert!(hint("xyz").contains("0..1 xyz"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "x", "3..1", "-1", "1..x"] {
            assert!(text.parse::<Layers>().is_err(), "{text}");
        }
        assert!(Selection::new(None, &["blk.[".to_owned()]).is_err());
    }
}
