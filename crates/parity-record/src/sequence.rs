//! Token sequences: which forward passes belong together, and which were only a warm-up.

/// What is to be done with a forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pass {
    /// It continues the recorded sequence.
    Continue,
    /// A recorded sequence starts with it; what was recorded before was a warm-up, to be dropped.
    StartAgain,
    /// It belongs to a sequence that is not recorded.
    Skip,
    /// The recorded sequence goes on without what was computed here: why, as the middle of a sentence.
    Lost(String),
}

/// The tokens seen so far, sequence by sequence.
#[derive(Clone, Debug)]
pub struct Sequences {
    wanted: usize,
    /// Whether that one alone was asked for: what the program evaluates after it is not missed.
    alone: bool,
    /// Whether the cache was shifted since the pass before.
    shifted: bool,
    /// Whether it ended.
    over: bool,
    /// Number of the current sequence; a warm-up has none.
    current: usize,
    /// Token at each position of the current sequence.
    tokens: Vec<u32>,
    passes: usize,
}

/// Longest batch that llama.cpp's tools warm up with: begin and end of text.
const WARM_UP_TOKENS: usize = 2;

impl Sequences {
    /// Records sequence number `wanted`, counted from 0; where none is asked for, the first, behind which there should be
    /// no other.
    pub fn new(wanted: Option<usize>) -> Self {
        let (alone, wanted) = (wanted.is_some(), wanted.unwrap_or(0));
        Sequences { wanted, alone, shifted: false, over: false, current: 0, tokens: Vec::new(), passes: 0 }
    }

    /// Notes that positions in the cache were moved.
    pub fn shift(&mut self) {
        self.shifted = true;
    }

    /// Takes a forward pass whose tokens are not known.
    pub fn unknown(&mut self) -> Pass {
        self.lose("a pass without token ids, of embeddings, is not recorded".to_owned())
    }

    /// Whether passes of the wanted sequence were recorded that this one should have followed.
    fn is_recorded(&self) -> bool {
        self.current == self.wanted && self.passes > 0 && !self.over
    }

    /// Ends the recorded sequence, if it began.
    fn lose(&mut self, why: String) -> Pass {
        if !self.is_recorded() {
            return Pass::Skip;
        }
        self.over = true;
        Pass::Lost(why)
    }

    /// How many sequences were seen, warm-ups left out.
    pub fn seen(&self) -> usize {
        self.current + usize::from(self.passes > 0)
    }

    /// The `n` positions behind those seen, for models that have no position input.
    pub fn following(&self, n: usize) -> Vec<u32> {
        (self.tokens.len() as u32..).take(n).collect()
    }

    /// Takes a forward pass of `tokens` at `positions`, both (T,).
    pub fn pass(&mut self, tokens: &[u32], positions: &[u32]) -> Pass {
        let consecutive = positions.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let Some(first) = positions.first().map(|&p| p as usize) else { return Pass::Skip };
        let (shifted, so_far) = (std::mem::take(&mut self.shifted), self.tokens.len());
        // Rows of several sequences in one batch have no one position each.
        if !consecutive || tokens.len() != positions.len() {
            return self.lose("a batch of several sequences is not recorded".to_owned());
        }
        if first > so_far {
            return self.lose(format!("positions {so_far} to {} were computed out of sight", first - 1));
        }
        let was_recorded = self.is_recorded();
        let restarts = self.passes > 0 && first < so_far;
        // In one pass, or token by token where a program computes so few at once.
        let warm_up = self.current == 0 && first == 0 && self.tokens.len() <= WARM_UP_TOKENS;
        if restarts && !warm_up {
            self.current += 1;
        }
        if restarts {
            self.passes = 0;
        }
        self.tokens.truncate(first);
        self.tokens.extend_from_slice(tokens);
        self.passes += 1;
        match (self.current == self.wanted && !self.over, restarts && warm_up) {
            (true, true) => Pass::StartAgain,
            (true, false) => Pass::Continue,
            (false, _) if was_recorded => self.end(first, so_far, shifted),
            (false, _) => Pass::Skip,
        }
    }
}

impl Sequences {
    /// The recorded sequence ends where the program goes back to position `first` of `so_far`.
    fn end(&mut self, first: usize, so_far: usize, shifted: bool) -> Pass {
        self.over = true;
        match (shifted, first) {
            (true, _) => {
                Pass::Lost("the context was shifted (a larger one, -c N, needs no shift)".to_owned())
            }
            (false, 0) if self.alone => Pass::Skip,
            (false, 0) => Pass::Lost(format!(
                "the program evaluated another prompt (--sequence {} records this one alone)",
                self.wanted
            )),
            (false, first) => Pass::Lost(format!(
                "the program went back to position {first} of {so_far}: a rollback, or a prompt with the same beginning"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(sequences: &mut Sequences, first: u32, n: u32) -> Pass {
        let positions: Vec<u32> = (first..first + n).collect();
        sequences.pass(&vec![7; n as usize], &positions)
    }

    #[test]
    fn a_prefill_in_chunks_and_its_decode_steps_are_one_sequence() {
        let mut sequences = Sequences::new(Some(0));
        for (first, n) in [(0, 64), (64, 9), (73, 1), (74, 1)] {
            assert_eq!(pass(&mut sequences, first, n), Pass::Continue);
        }
        assert_eq!(sequences.seen(), 1);
    }

    #[test]
    fn a_warm_up_is_dropped() {
        let mut sequences = Sequences::new(Some(0));
        assert_eq!(pass(&mut sequences, 0, 2), Pass::Continue);
        assert_eq!(pass(&mut sequences, 0, 7), Pass::StartAgain);
        assert_eq!(pass(&mut sequences, 7, 1), Pass::Continue);
        assert_eq!(sequences.seen(), 1);
        let mut one_by_one = Sequences::new(Some(0));
        for (first, then) in
            [(0, Pass::Continue), (1, Pass::Continue), (0, Pass::StartAgain), (1, Pass::Continue)]
        {
            assert_eq!(pass(&mut one_by_one, first, 1), then);
        }
        assert_eq!(one_by_one.seen(), 1);
    }

    #[test]
    fn a_second_prompt_is_another_sequence() {
        let mut sequences = Sequences::new(Some(0));
        assert_eq!(pass(&mut sequences, 0, 7), Pass::Continue);
        assert_eq!(pass(&mut sequences, 7, 1), Pass::Continue);
        assert_eq!(pass(&mut sequences, 0, 5), Pass::Skip);
        assert_eq!(pass(&mut sequences, 5, 1), Pass::Skip);
        assert_eq!(sequences.seen(), 2);
        let mut second = Sequences::new(Some(1));
        assert_eq!(pass(&mut second, 0, 7), Pass::Skip);
        assert_eq!(pass(&mut second, 0, 5), Pass::Continue);
    }

    #[test]
    fn what_ends_a_sequence_early_is_told() {
        let told = |passes: &[(u32, u32)], shift: bool, wanted: Option<usize>| {
            let mut sequences = Sequences::new(wanted);
            assert_eq!(pass(&mut sequences, 0, 7), Pass::Continue);
            assert_eq!(pass(&mut sequences, 7, 1), Pass::Continue);
            if shift {
                sequences.shift();
            }
            let all: Vec<Pass> = passes.iter().map(|(first, n)| pass(&mut sequences, *first, *n)).collect();
            assert!(all[1..].iter().all(|pass| *pass == Pass::Skip), "{all:?}");
            match all[0].clone() {
                Pass::Lost(why) => why,
                other => format!("{other:?}"),
            }
        };
        assert!(told(&[(0, 5), (5, 1)], false, None).contains("another prompt (--sequence 0 "));
        assert_eq!(told(&[(0, 5), (5, 1)], false, Some(0)), "Skip");
        for wanted in [None, Some(0)] {
            assert!(told(&[(5, 1), (6, 1)], false, wanted).contains("went back to position 5 of 8"));
            assert!(told(&[(4, 1), (5, 1)], true, wanted).contains("context was shifted"));
            assert!(told(&[(9, 1), (10, 1)], false, wanted).contains("positions 8 to 8"));
        }
        let mut batched = Sequences::new(Some(0));
        assert_eq!(pass(&mut batched, 0, 7), Pass::Continue);
        assert!(
            matches!(batched.pass(&[1, 2], &[7, 7]), Pass::Lost(why) if why.contains("several sequences"))
        );
        assert_eq!(pass(&mut batched, 7, 1), Pass::Skip);
        let mut embedded = Sequences::new(None);
        assert_eq!(embedded.unknown(), Pass::Skip);
        assert_eq!(pass(&mut embedded, 0, 7), Pass::Continue);
        assert!(matches!(embedded.unknown(), Pass::Lost(why) if why.contains("token ids")));
    }

    #[test]
    fn rows_of_several_sequences_are_left_alone() {
        let mut sequences = Sequences::new(Some(0));
        assert_eq!(sequences.pass(&[1, 2], &[0, 0]), Pass::Skip);
        assert_eq!(sequences.pass(&[1], &[9]), Pass::Skip);
        assert_eq!(sequences.seen(), 0);
    }
}
