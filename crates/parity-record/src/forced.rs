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

    /// Counts the rows of a pass, by sequence and position. The token that belongs into each that is the only one of its
    /// sequence; `None` where the program's own stays.
    fn pass(&mut self, rows: &[(u32, u32)]) -> Vec<Option<u32>> {
        let mut wanted = Vec::with_capacity(rows.len());
        for &(sequence, position) in rows {
            let times = self.seen.entry((sequence, position)).or_insert(0);
            let same = |row: &&Computed| (row.0, row.1) == (sequence, position);
            let token = self.rows.iter().filter(same).nth(*times).and_then(|(_, _, token)| *token);
            *times += 1;
            let alone = rows.iter().filter(|row| row.0 == sequence).count() == 1;
            wanted.push(token.filter(|_| alone));
        }
        wanted
    }

    /// Counts anew: what was computed so far was a warm-up.
    pub fn begin_again(&mut self) {
        self.seen.clear();
    }

    /// Puts the other run's tokens into a pass before it is computed; the rows where the program's own was another, with that.
    /// Several rows of one sequence are a prompt, which is left as it is. `rows` are the sequence and the position of each.
    ///
    /// # Safety
    /// `leaf` is the input of `api`'s library that holds the ids of `tokens`, and is set.
    pub unsafe fn put(
        &mut self,
        api: &Api,
        leaf: RawTensor,
        tokens: &mut [u32],
        rows: &[(u32, u32)],
    ) -> Vec<(usize, u32)> {
        let mut replaced = Vec::new();
        for (row, (token, wanted)) in tokens.iter_mut().zip(self.pass(rows)).enumerate() {
            let Some(wanted) = wanted.filter(|wanted| wanted != token) else { continue };
            replaced.push((row, std::mem::replace(token, wanted)));
            let bytes = wanted.to_ne_bytes();
            // SAFETY: the input holds an id of four bytes for each token, by the caller's promise.
            unsafe { (api.tensor_set)(leaf, bytes.as_ptr().cast(), row * bytes.len(), bytes.len()) };
        }
        replaced
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
    fn rows_behind_the_prompt_are_forced() {
        let mut forced = forced();
        assert_eq!(forced.pass(&[(0, 0), (0, 1)]), [None, None]);
        assert_eq!(forced.pass(&[(0, 2)]), [Some(7)]);
        assert_eq!(forced.pass(&[(1, 0)]), [None]);
        // Two sequences that are decoded together.
        assert_eq!(forced.pass(&[(1, 1), (0, 2)]), [Some(9), Some(8)]);
        assert_eq!((forced.pass(&[(0, 2)]), forced.pass(&[(0, 3)])), (vec![None], vec![None]));
        forced.begin_again();
        assert_eq!(forced.pass(&[(0, 1), (0, 2)]), [None, None]);
    }

    #[test]
    fn spelling_round_trips() {
        let forced = forced();
        assert_eq!(forced.to_string().parse(), Ok(forced));
        assert!("1\n".parse::<Forced>().is_err() && "1 2 x".parse::<Forced>().is_err());
    }
}
