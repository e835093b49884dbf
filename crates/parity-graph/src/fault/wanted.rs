//! A mistake as a user writes it: `rope.base=10000@0..2`, `attn.mask_shift=1@blk.1.attn_ctx#2`.

use std::fmt;
use std::str::FromStr;

use parity_dump::Checkpoint;

use super::{Argument, Fault, Scene, entries, find};
use crate::graph::Id;

/// `FAULT[=VALUE][@LAYER|@A..B|@CHECKPOINT]`: the one form for every command, architecture and device.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Its name in the catalogue.
    pub fault: String,
    /// What follows `=`.
    pub argument: Argument,
    /// Which of a node's mistakes of that name, where it is counted (`#1`) as in the release before.
    variant: Option<usize>,
    /// What follows the first `@`.
    pub place: Place,
    text: String,
}

/// Where a mistake is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Everywhere that has a place for it.
    Everywhere,
    /// In the layers from the first up to and including the second.
    Layers(u32, u32),
    /// In one node.
    Node(String),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        let (head, place) = text.split_once('@').map_or((text, None), |(head, place)| (head, Some(place)));
        let (head, variant) = match head.split_once('#') {
            Some((head, number)) => {
                let number =
                    number.parse().map_err(|_| format!("`{text}`: a number is expected after `#`"))?;
                (head, Some(number))
            }
            None => (head, None),
        };
        let (fault, value) = head.split_once('=').map_or((head, None), |(fault, value)| (fault, Some(value)));
        let fault = fault.trim();
        let entry = find(fault).ok_or_else(|| format!("`{fault}` is in no catalogue: {}", near(fault)))?;
        if entry.recognised {
            return Err(format!("`{fault}` is recognised in recordings, and cannot be injected"));
        }
        let argument = match (value, entry.parameter) {
            (None, _) => Argument::None,
            (Some(""), _) => return Err(format!("`{text}`: a value is expected after `=`")),
            (Some(_), None) => return Err(format!("`{fault}` takes no value")),
            (Some(value), Some(_)) => Argument::parse(value),
        };
        let place = match place {
            None => Place::Everywhere,
            Some("") => return Err(format!("`{text}`: a layer or a checkpoint is expected after `@`")),
            Some(place) => layers(place)
                .map_or_else(|| Place::Node(place.to_owned()), |(first, last)| Place::Layers(first, last)),
        };
        Ok(Wanted { fault: fault.to_owned(), argument, variant, place, text: text.to_owned() })
    }
}

/// `3` or `0..3`: the first and the last layer.
fn layers(place: &str) -> Option<(u32, u32)> {
    match place.split_once("..") {
        Some((first, last)) => first.parse().ok().zip(last.trim_start_matches('=').parse().ok()),
        None => place.parse().ok().map(|layer| (layer, layer)),
    }
}

/// Names of the catalogue that look like this one.
fn near(name: &str) -> String {
    let mut names: Vec<&str> = entries().map(|entry| entry.name).collect();
    names.sort_by_key(|other| apart(name.as_bytes(), other.as_bytes()));
    names.truncate(3);
    format!("did you mean {}?", names.join(", "))
}

/// Letters to insert, delete or replace (Levenshtein).
fn apart(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let least = (row[j] + 1).min(row[j + 1] + 1).min(diagonal + usize::from(x != y));
            diagonal = std::mem::replace(&mut row[j + 1], least);
        }
    }
    row[b.len()]
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Wanted {
    /// Whether it is made in a node of this name.
    pub fn is_at(&self, checkpoint: Checkpoint) -> bool {
        match &self.place {
            Place::Everywhere => true,
            Place::Layers(first, last) => {
                checkpoint.layer_index().is_some_and(|layer| (*first..=*last).contains(&layer))
            }
            Place::Node(id) => checkpoint.to_string() == *id,
        }
    }

    /// The mistake at a node, as it is made; `None` where the node has no place for it.
    pub fn find(&self, scene: &Scene<'_>, id: Id) -> Option<Fault> {
        let entry = find(&self.fault)?;
        let fault = match self.variant {
            Some(variant) => entry.all_at(scene, id).into_iter().nth(variant),
            None => entry.at(scene, id, &self.argument),
        }?;
        Some(Fault { rewrite: fault.rewrite.where_made(), ..fault })
    }

    /// What a user should know who counts variants.
    pub fn warning(&self) -> Option<String> {
        let name = &self.fault;
        self.variant.map(|_| {
            format!(
                "`{}`: counted variants go with the next release; write a value, as in `{name}=VALUE`",
                self.text
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_a_name_a_value_and_a_place() {
        let wanted: Wanted = "rope.base=10000@blk.1.rope#2".parse().unwrap();
        assert_eq!((wanted.fault.as_str(), &wanted.argument), ("rope.base", &Argument::Number(1e4)));
        assert_eq!(wanted.place, Place::Node("blk.1.rope#2".to_owned()));
        assert_eq!(wanted.to_string(), "rope.base=10000@blk.1.rope#2");
        assert!(wanted.warning().is_none());
        let counted: Wanted = "rope.base#1@0..2".parse().unwrap();
        assert_eq!((counted.variant, counted.place.clone()), (Some(1), Place::Layers(0, 2)));
        assert!(counted.warning().is_some());
        let order: Wanted = "attn.head_order=1,0".parse().unwrap();
        assert_eq!((order.argument, order.place), (Argument::Order(vec![1, 0]), Place::Everywhere));
        assert!("rope.no_freqs".parse::<Wanted>().is_ok(), "an alias");
        for (text, why) in [
            ("rope.bsae@1", "rope.base"),
            ("rope.none@", "a layer or a checkpoint"),
            ("attn.no_scale=3", "takes no value"),
            ("rope.base=", "a value is expected"),
            ("rope.base#x", "a number is expected"),
            ("precision.tf32", "cannot be injected"),
        ] {
            let error = text.parse::<Wanted>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
