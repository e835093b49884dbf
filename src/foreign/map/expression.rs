//! Widths in a map: `H*E`, `H*E+K*E`, `W/2`, in letters of the model and numbers.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::gguf::Gguf;
use parity_graph::weights;

/// What the letters stand for: D model width, H query heads, K key/value heads, E head width, F feed-forward width,
/// V vocabulary, L layers; of one rank, where a dump has several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Widths(BTreeMap<char, usize>);

impl Widths {
    /// Of a model file: those that its metadata give as one number.
    ///
    /// # Errors
    /// A file whose metadata cannot be read.
    pub fn of(gguf: &Gguf) -> Result<Widths> {
        let arch = gguf.require_str("general.architecture")?;
        let number = |key: &str| gguf.get(&format!("{arch}.{key}")).and_then(|value| value.as_integer());
        let number = |key: &str| number(key).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        let (d, h) = (number("embedding_length"), number("attention.head_count"));
        let vocabulary = gguf
            .tensor(&weights::weight(weights::TOKEN_EMBD))
            .and_then(|tensor| tensor.info.shape.first().copied());
        let all = [
            ('D', d),
            ('H', h),
            ('K', number("attention.head_count_kv").or(h)),
            ('E', number("attention.key_length").or_else(|| Some(d? / h?))),
            ('F', number("feed_forward_length")),
            ('V', vocabulary),
            ('L', number("block_count")),
        ];
        Ok(Widths(all.into_iter().filter_map(|(letter, value)| Some((letter, value?))).collect()))
    }

    /// Of one rank of `ranks`: heads, feed-forward columns and vocabulary are divided; where there are fewer key/value
    /// heads than ranks, each has one.
    #[must_use]
    pub fn of_rank(&self, ranks: usize) -> Widths {
        let of = |(&letter, &n): (&char, &usize)| match letter {
            'H' | 'K' | 'F' | 'V' => (letter, (n / ranks.max(1)).max(1)),
            _ => (letter, n),
        };
        Widths(self.0.iter().map(of).collect())
    }

    /// With W, the width of the tensor that is looked at.
    #[must_use]
    pub fn with_own(mut self, width: usize) -> Widths {
        self.0.insert('W', width);
        self
    }

    /// What a letter stands for.
    pub fn get(&self, letter: char) -> Option<usize> {
        self.0.get(&letter).copied()
    }
}

/// Letters that an expression may have.
pub const LETTERS: &str = "DHKEFVLW";

/// A sum of terms of factors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    text: String,
    /// Terms of (divides, factor).
    terms: Vec<Vec<(bool, Factor)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Factor {
    Number(usize),
    Letter(char),
}

impl Expression {
    /// Reads one; what is wrong with it otherwise.
    ///
    /// # Errors
    /// What is no number, letter or operator.
    pub fn parse(text: &str) -> std::result::Result<Expression, String> {
        let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let term = |term: &str| -> std::result::Result<Vec<(bool, Factor)>, String> {
            let mut factors = Vec::new();
            let mut rest = term;
            let mut divides = false;
            loop {
                let end = rest.find(['*', '·', '/']).unwrap_or(rest.len());
                factors.push((divides, factor(&rest[..end])?));
                let Some(operator) = rest[end..].chars().next() else { return Ok(factors) };
                divides = operator == '/';
                rest = &rest[end + operator.len_utf8()..];
            }
        };
        let terms = compact.split('+').map(term).collect::<std::result::Result<_, _>>()?;
        Ok(Expression { text: text.trim().to_owned(), terms })
    }

    /// Its value; which letter is not known, or which division leaves a rest.
    ///
    /// # Errors
    /// The reason as a sentence's end.
    pub fn value(&self, widths: &Widths) -> std::result::Result<usize, String> {
        let mut sum = 0usize;
        let large = || format!("`{}` is too large", self.text);
        for term in &self.terms {
            let mut product = 1usize;
            for &(divides, factor) in term {
                let value = match factor {
                    Factor::Number(value) => value,
                    Factor::Letter(letter) => widths.get(letter).ok_or_else(|| {
                        format!(
                            "`{letter}` in `{}` is known of a model file alone: give one with -m",
                            self.text
                        )
                    })?,
                };
                product = match divides {
                    false => product.checked_mul(value).ok_or_else(large)?,
                    true if value > 0 && product.is_multiple_of(value) => product / value,
                    true => return Err(format!("`{}` is no whole number: {product} / {value}", self.text)),
                };
            }
            sum = sum.checked_add(product).ok_or_else(large)?;
        }
        Ok(sum)
    }
}

fn factor(text: &str) -> std::result::Result<Factor, String> {
    if let Ok(number) = text.parse() {
        return Ok(Factor::Number(number));
    }
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(letter), None) if LETTERS.contains(letter) => Ok(Factor::Letter(letter)),
        _ => Err(format!("`{text}` is neither a number nor one of the letters {LETTERS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_computed() {
        let widths = Widths([('H', 8), ('K', 2), ('E', 32)].into()).with_own(512);
        let value = |text: &str| Expression::parse(text).unwrap().value(&widths);
        assert_eq!(value("H*E + K·E"), Ok(320));
        assert_eq!(value("W/2"), Ok(256));
        assert_eq!(value("7"), Ok(7));
        assert!(value("W/3").unwrap_err().contains("512 / 3") && value("F").unwrap_err().contains("-m"));
        assert!(value("W/0").is_err() && value("18446744073709551615*9").is_err());
        for wrong in ["", "H*", "x", "HE", "-1", "+"] {
            assert!(Expression::parse(wrong).is_err(), "{wrong}");
        }
        let rank = widths.of_rank(4);
        assert_eq!((rank.get('H'), rank.get('K'), rank.get('E')), (Some(2), Some(1), Some(32)));
    }
}
