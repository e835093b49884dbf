//! Tokens of another run in the place of those that a program chose: two runs of one prompt then compute the same text,
//! whatever their samplers make of rounding.

use std::fmt::Write;
use std::str::FromStr;

use crate::api::{Api, RawTensor};

/// What another run computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// First position that its program chose the token of: those before are the prompt's, which each run has of its own.
    pub from: u32,
    /// (T,) its token at each position.
    pub tokens: Vec<u32>,
}

impl Forced {
    /// The token that belongs into a pass of one row at `position`; `None` where the program's own stays.
    fn at(&self, positions: &[u32]) -> Option<u32> {
        match positions {
            [position] if *position >= self.from => self.tokens.get(*position as usize).copied(),
            _ => None,
        }
    }

    /// Puts the other run's token into a pass of one row before it is computed; the program's own where that was another.
    /// Batches of several rows are prompts, which are left as they are.
    ///
    /// # Safety
    /// `leaf` is the input of `api`'s library that holds the ids of `tokens`, and is set.
    pub unsafe fn put(
        &self,
        api: &Api,
        leaf: RawTensor,
        tokens: &mut [u32],
        positions: &[u32],
    ) -> Option<u32> {
        let wanted = self.at(positions)?;
        let [token] = tokens else { return None };
        let own = std::mem::replace(token, wanted);
        if own == wanted {
            return None;
        }
        let bytes = wanted.to_ne_bytes();
        // SAFETY: the input holds one id of four bytes, by the caller's promise.
        unsafe { (api.tensor_set)(leaf, bytes.as_ptr().cast(), 0, bytes.len()) };
        Some(own)
    }
}

/// The first position, then the tokens, one a line.
impl std::fmt::Display for Forced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = format!("{}\n", self.from);
        for token in &self.tokens {
            writeln!(text, "{token}")?;
        }
        f.write_str(&text)
    }
}

impl FromStr for Forced {
    type Err = String;

    fn from_str(text: &str) -> Result<Forced, String> {
        let number = |word: &str| word.parse::<u32>().map_err(|_| format!("`{word}` is no token id"));
        let mut words = text.split_whitespace();
        let from = number(words.next().unwrap_or_default())?;
        Ok(Forced { from, tokens: words.map(number).collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_of_one_row_behind_the_prompt_are_forced() {
        let forced = Forced { from: 2, tokens: vec![5, 6, 7, 8] };
        assert_eq!((forced.at(&[1]), forced.at(&[2]), forced.at(&[3])), (None, Some(7), Some(8)));
        assert_eq!((forced.at(&[4]), forced.at(&[2, 3]), forced.at(&[])), (None, None, None));
    }

    #[test]
    fn spelling_round_trips() {
        let forced = Forced { from: 2, tokens: vec![5, 6, 7] };
        assert_eq!(forced.to_string().parse(), Ok(forced));
        assert!("".parse::<Forced>().is_err() && "1\nx".parse::<Forced>().is_err());
    }
}
