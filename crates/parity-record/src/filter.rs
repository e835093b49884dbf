//! Which checkpoints are recorded: by layer and by glob.

use std::fmt;
use std::str::FromStr;

use parity_dump::{Checkpoint, Kind};

/// A choice of checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// First and last layer, both included; all where `None`.
    pub layers: Option<(u32, u32)>,
    /// Globs (`*` any text, `?` one character), one of which must fit the id; where there are none,
    /// everything but the attention matrices.
    pub globs: Vec<String>,
}

impl Filter {
    /// Whether a checkpoint of a model with `layers` layers is chosen.
    ///
    /// A choice of layers takes the embedding along with layer 0, and the head with the last layer.
    pub fn wants(&self, checkpoint: Checkpoint, layers: u32) -> bool {
        let in_layers = self.layers.is_none_or(|(first, last)| match checkpoint.layer_index() {
            Some(layer) => (first..=last).contains(&layer),
            None if checkpoint.kind() == Kind::Embed => first == 0,
            None => last >= layers.saturating_sub(1),
        });
        let by_name = if self.globs.is_empty() {
            !checkpoint.kind().is_optional()
        } else {
            let id = checkpoint.to_string();
            self.globs.iter().any(|glob| fits(glob.as_bytes(), id.as_bytes()))
        };
        in_layers && by_name
    }

    /// Whether nothing is left out.
    pub fn is_all(&self) -> bool {
        self.layers.is_none() && self.globs.is_empty()
    }

    /// Whether a checkpoint is chosen that llama.cpp computes only for rows that logits are asked of: the tail
    /// of the last layer and what comes after it. `layers` is how many the model has, where that is known.
    pub fn wants_tail(&self, layers: Option<u32>) -> bool {
        let Some(last) = layers.and_then(|layers| layers.checked_sub(1)) else { return true };
        let at = |kind: Kind| match kind.in_layer() {
            true => Checkpoint::layer(kind, last),
            false => Checkpoint::global(kind),
        };
        // A pattern that fits no fixed id asks for a name, and the name alone does not tell where it is computed.
        let fixed = || (0..=last).flat_map(|layer| Kind::all().map(move |kind| (kind, layer)));
        let of = |(kind, layer): (Kind, u32)| match kind.in_layer() {
            true => Checkpoint::layer(kind, layer),
            false => Checkpoint::global(kind),
        };
        let is_name = |glob: &String| !fixed().any(|at| fits(glob.as_bytes(), of(at).to_string().as_bytes()));
        let reaches_last = self.layers.is_none_or(|(_, end)| end >= last);
        Kind::all().skip_while(|kind| *kind != Kind::AttnOut).any(|kind| self.wants(at(kind), last + 1))
            || reaches_last && self.globs.iter().any(is_name)
    }
}

/// Whether `text` fits a glob of `*`, `?`, `[a-z]`, `[!a]` and `{one,other}`, as the commands read it.
fn fits(glob: &[u8], text: &[u8]) -> bool {
    match (glob.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => fits(rest, text) || !text.is_empty() && fits(glob, &text[1..]),
        (Some((b'?', rest)), Some((_, text))) => fits(rest, text),
        (Some((b'[', rest)), Some((&t, text))) => match rest.iter().skip(1).position(|&byte| byte == b']') {
            Some(end) => in_class(&rest[..=end], t) && fits(&rest[end + 2..], text),
            None => false,
        },
        (Some((b'{', rest)), _) => match rest.iter().position(|&byte| byte == b'}') {
            Some(end) => {
                let alternatives = rest[..end].split(|&byte| byte == b',');
                let mut spelt = alternatives.map(|alternative| [alternative, &rest[end + 1..]].concat());
                spelt.any(|glob| fits(&glob, text))
            }
            None => false,
        },
        (Some((g, rest)), Some((t, text))) => g == t && fits(rest, text),
        _ => false,
    }
}

/// Whether a byte is in `abc`, `a-c` or, reversed, `!abc`.
fn in_class(class: &[u8], byte: u8) -> bool {
    let (reversed, class) = match class {
        [b'!' | b'^', rest @ ..] => (true, rest),
        _ => (false, class),
    };
    let range = |w: &[u8]| w[1] == b'-' && (w[0]..=w[2]).contains(&byte);
    (class.contains(&byte) || class.windows(3).any(range)) != reversed
}

/// What parts the fields of a spelt filter: no character of an id or a glob.
const SEPARATOR: char = ';';

/// `0..3` or `5`, then the globs, each behind a separator; an empty first field means all layers.
impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((first, last)) = self.layers {
            write!(f, "{first}..{last}")?;
        }
        self.globs.iter().try_for_each(|glob| write!(f, "{SEPARATOR}{glob}"))
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut fields = text.split(SEPARATOR);
        let layers = fields.next().unwrap_or_default();
        let number =
            |digits: &str| digits.parse::<u32>().map_err(|_| format!("`{layers}` is no layer range"));
        let layers = match layers.split_once("..") {
            _ if layers.is_empty() => None,
            Some((first, last)) => Some((number(first)?, number(last)?)),
            None => Some((number(layers)?, number(layers)?)),
        };
        Ok(Filter { layers, globs: fields.map(str::to_owned).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants(filter: &str, id: &str) -> bool {
        filter.parse::<Filter>().unwrap().wants(id.parse().unwrap(), 4)
    }

    #[test]
    fn layers_take_the_ends_of_the_model_along() {
        assert!(wants("0", "blk.0.q") && wants("0", "embed"));
        assert!(!wants("0", "blk.1.q") && !wants("0", "logits"));
        assert!(wants("1..3", "logits") && wants("1..3", "blk.3.q") && !wants("1..3", "embed"));
    }

    #[test]
    fn globs_choose_by_name_and_are_the_way_to_the_matrices() {
        assert!(!wants("", "blk.0.attn_probs") && wants("", "blk.0.attn_ctx"));
        assert!(wants(";blk.*.attn_probs", "blk.0.attn_probs") && !wants(";blk.*.attn_probs", "blk.0.q"));
        assert!(wants(";blk.?.q*;logits", "blk.3.q_rope") && wants(";blk.?.q*;logits", "logits"));
        assert!(wants(";blk.[0-2].{q,k}_rope", "blk.2.k_rope") && wants(";blk.[!3].q", "blk.2.q"));
        assert!(
            !wants(";blk.[0-2].{q,k}_rope", "blk.3.k_rope") && !wants(";blk.[0-2].{q,k}_rope", "blk.0.q")
        );
        assert!(!wants("0;blk.*.q", "blk.1.q") && !wants(";blk.[0", "blk.0.q") && !wants(";{q", "logits"));
        assert!(wants("2..4294967295", "logits"));
    }

    #[test]
    fn rows_are_added_only_where_they_are_wanted() {
        let tail = |filter: &str, layers| filter.parse::<Filter>().unwrap().wants_tail(layers);
        assert!(tail("", Some(4)) && tail("3", Some(4)) && tail(";logits", Some(4)) && tail("0", None));
        assert!(!tail("0", Some(4)) && !tail("0..2", Some(4)) && !tail(";blk.*.q_rope", Some(4)));
        assert!(tail(";blk.*.ffn_moe_probs", Some(4)) && !tail("0;blk.*.ffn_moe_probs", Some(4)));
        assert!(tail(";blk.3.ffn_out", Some(4)) && !tail(";blk.2.ffn_out", Some(4)) && tail("0", Some(1)));
    }

    #[test]
    fn spelling_round_trips() {
        for text in ["", "0..3", "2..2;blk.*.{q,k};logits", ";*"] {
            assert_eq!(text.parse::<Filter>().unwrap().to_string(), text);
        }
        assert!("x".parse::<Filter>().is_err());
    }
}
