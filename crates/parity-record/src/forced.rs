//! Tokens of another run in the place of those that a program chose: two runs of one prompt then compute the same text,
//! whatever their samplers make of rounding.

use std::collections::HashMap;
use std::fmt::Write;
use std::str::FromStr;

use crate::api::{Api, RawTensor};

/// A row of another run: its sequence, its position, and its token where the program chose that; none of a prompt's, which each
/// run has of its own.
pub type Computed = (u32, u32, Option<u32>);

/// What another run computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// In the order in which they were computed: a position may come again.
    rows: Vec<Computed>,
    /// How often each sequence and position was computed by this run.
    seen: HashMap<(u32, u32), usize>,
}

impl Forced {
    /// Of the rows of another run, in order.
    pub fn new(rows: Vec<Computed>) -> Forced {
        Forced { rows, seen: HashMap::new() }
    }

    /// Counts the rows of a pass, by sequence and position. The token that belongs into it where it is of one row; `None` where
    /// the program's own stays.
    fn pass(&mut self, rows: &[(u32, u32)]) -> Option<u32> {
        let mut wanted = None;
        for &(sequence, position) in rows {
            let times = self.seen.entry((sequence, position)).or_insert(0);
            let same = |row: &&Computed| (row.0, row.1) == (sequence, position);
            wanted = self.rows.iter().filter(same).nth(*times).and_then(|(_, _, token)| *token);
            *times += 1;
        }
        wanted.filter(|_| rows.len() == 1)
    }

    /// Counts anew: what was computed so far was a warm-up.
    pub fn begin_again(&mut self) {
        self.seen.clear();
    }

    /// Puts the other run's token into a pass of one row before it is computed; the program's own where that was another.
    /// Batches of several rows are prompts, which are left as they are. `rows` are the sequence and the position of each.
    ///
    /// # Safety
    /// `leaf` is the input of `api`'s library that holds the ids of `tokens`, and is set.
    pub unsafe fn put(
        &mut self,
        api: &Api,
        leaf: RawTensor,
        tokens: &mut [u32],
        rows: &[(u32, u32)],
    ) -> Option<u32> {
        let wanted = self.pass(rows)?;
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

/// A row a line: sequence, position, and the token or `-`.
impl std::fmt::Display for Forced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = String::new();
        for (sequence, position, token) in &self.rows {
            let token = token.map_or("-".to_owned(), |token| token.to_string());
            writeln!(text, "{sequence} {position} {token}")?;
        }
        f.write_str(&text)
    }
}

impl FromStr for Forced {
    type Err = String;

    fn from_str(text: &str) -> Result<Forced, String> {
        let number = |word: &str| word.parse::<u32>().map_err(|_| format!("`{word}` is no number"));
        let row = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [sequence, position, "-"] => Ok((number(sequence)?, number(position)?, None)),
            [sequence, position, token] => Ok((number(sequence)?, number(position)?, Some(number(token)?))),
            _ => Err(format!("`{line}` is no sequence, position and token")),
        };
        Ok(Forced::new(text.lines().map(row).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt of two tokens, then a choice; another sequence; and the first one's choice taken back and made anew.
    fn forced() -> Forced {
        Forced::new(vec![
            (0, 0, None),
            (0, 1, None),
            (0, 2, Some(7)),
            (1, 0, None),
            (1, 1, Some(9)),
            (0, 2, Some(8)),
        ])
    }

    #[test]
    fn only_steps_of_one_row_behind_the_prompt_are_forced() {
        let mut forced = forced();
        assert_eq!(forced.pass(&[(0, 0), (0, 1)]), None);
        assert_eq!((forced.pass(&[(0, 2)]), forced.pass(&[(1, 0)])), (Some(7), None));
        assert_eq!((forced.pass(&[(1, 1)]), forced.pass(&[(0, 2)])), (Some(9), Some(8)));
        assert_eq!((forced.pass(&[(0, 2)]), forced.pass(&[(0, 3)]), forced.pass(&[])), (None, None, None));
        forced.begin_again();
        assert_eq!((forced.pass(&[(0, 2), (1, 1)]), forced.pass(&[(0, 2)])), (None, Some(8)));
    }

    #[test]
    fn spelling_round_trips() {
        let forced = forced();
        assert_eq!(forced.to_string().parse(), Ok(forced));
        assert!("1\n".parse::<Forced>().is_err() && "1 2 x".parse::<Forced>().is_err());
    }
}
