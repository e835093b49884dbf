//! Names with numbers in them: `model.layers.{n}.self_attn.q_proj`, and ids that are made of the numbers.

use crate::checkpoint::Checkpoint;

/// Numbers that a pattern found, by their letters.
pub type Numbers = Vec<(char, u32)>;

/// A name in which `{n}` (any small letter) stands for a number and `{L}` (any capital) for a width of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// As it was written.
    pub text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    /// A letter and what is added to its number.
    Number(char, i64),
}

impl Pattern {
    /// Reads a pattern, of names or of ids; what is wrong with it otherwise.
    ///
    /// # Errors
    /// Braces that hold no letter.
    pub fn parse(text: &str) -> Result<Pattern, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            let end = rest[start..].find('}').map(|end| start + end).ok_or("a brace that is not closed")?;
            pieces.push(Piece::Text(rest[..start].to_owned()));
            let inner = &rest[start + 1..end];
            let wrong = || format!("`{{{inner}}}` is no number: {{n}}, {{n-1}} or {{n+1}}");
            let letter = inner.chars().next().filter(char::is_ascii_alphabetic).ok_or_else(wrong)?;
            let added = match &inner[1..] {
                "" => 0,
                added => added.parse::<i8>().map_err(|_| wrong())?.into(),
            };
            pieces.push(Piece::Number(letter, added));
            rest = &rest[end + 1..];
        }
        pieces.push(Piece::Text(rest.to_owned()));
        let is_adjacent = pieces.windows(3).any(|three| {
            matches!(three, [Piece::Number(..), Piece::Text(text), Piece::Number(..)] if text.is_empty())
        });
        match is_adjacent {
            true => Err("two numbers with nothing between them".to_owned()),
            false => Ok(Pattern { text: text.to_owned(), pieces }),
        }
    }

    /// Letters of the numbers in it, a letter each.
    pub fn letters(&self) -> impl Iterator<Item = char> + '_ {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Number(letter, _) => Some(*letter),
            Piece::Text(_) => None,
        })
    }

    /// The numbers of a name that fits; `known` says those that are fixed. A width that is not known is any number.
    pub fn find(&self, name: &str, known: &dyn Fn(char) -> Option<usize>) -> Option<Numbers> {
        let (mut rest, mut numbers) = (name, Numbers::new());
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => rest = rest.strip_prefix(text.as_str())?,
                Piece::Number(letter, added) => {
                    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                    let written = &rest[..end];
                    let canonical = written == "0" || !written.starts_with('0');
                    let number = written.parse::<u32>().ok().filter(|_| canonical)?;
                    let number = u32::try_from(i64::from(number) - added).ok()?;
                    let before = numbers.iter().find(|(other, _)| other == letter).map(|(_, n)| *n as usize);
                    let fixed = if letter.is_uppercase() { known(*letter) } else { before };
                    if fixed.is_some_and(|fixed| fixed != number as usize) {
                        return None;
                    }
                    numbers.push((*letter, number));
                    rest = &rest[end..];
                }
            }
        }
        rest.is_empty().then_some(numbers)
    }

    /// The text with numbers in their places; `None` where one is below zero.
    pub fn fill(&self, numbers: &Numbers) -> Option<String> {
        let mut out = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out += text,
                Piece::Number(letter, added) => {
                    let (_, number) = numbers.iter().find(|(other, _)| other == letter)?;
                    out += &u32::try_from(i64::from(*number) + added).ok()?.to_string();
                }
            }
        }
        Some(out)
    }

    /// Whether it makes ids, whatever the numbers.
    pub fn makes_ids(&self) -> bool {
        let numbers = self.letters().map(|letter| (letter, 8)).collect();
        self.fill(&numbers).is_some_and(|id| id.parse::<Checkpoint>().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_and_filled_in() {
        let none = |_: char| None;
        let pattern = Pattern::parse("h.{n}.attn").unwrap();
        assert_eq!(pattern.find("h.12.attn", &none), Some(vec![('n', 12)]));
        for name in ["h..attn", "h.01.attn", "h.1.attn2", "x.1.attn", "h.99999999999.attn", "h.-1.attn"] {
            assert_eq!(pattern.find(name, &none), None, "{name}");
        }
        let before = Pattern::parse("blk.{n-1}.layer_out").unwrap();
        assert_eq!(before.fill(&vec![('n', 3)]).as_deref(), Some("blk.2.layer_out"));
        assert_eq!(before.fill(&vec![('n', 0)]), None);
        assert!(before.makes_ids() && !Pattern::parse("blk.{n}.a b").unwrap().makes_ids());
        let last = Pattern::parse("hidden_states.{L}").unwrap();
        assert!(last.find("hidden_states.4", &none).is_some());
        assert!(last.find("hidden_states.4", &|_| Some(4)).is_some());
        assert!(last.find("hidden_states.3", &|_| Some(4)).is_none());
        for wrong in ["{", "{}", "{nn}", "{n-}", "{n}{m}", "{1}"] {
            assert!(Pattern::parse(wrong).is_err(), "{wrong}");
        }
    }
}
