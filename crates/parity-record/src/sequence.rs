//! Token sequences: which forward passes belong together, and which were only a warm-up. Usually all of a context's are
//! recorded; where one prompt alone is asked for, what the program evaluates behind it is not.

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
    /// Whether something was computed that cannot be recorded, before the recording began.
    unseen: bool,
    /// Number of the current sequence; a warm-up has none.
    current: usize,
    /// Token at each position of the current sequence.
    tokens: Vec<u32>,
    passes: usize,
}

/// Longest batch that llama.cpp's tools warm up with: begin and end of text.
const WARM_UP_TOKENS: usize = 2;

impl Sequences {
    /// Records prompt number `wanted`, counted from 0; where none is asked for, all that a context computes.
    pub fn new(wanted: Option<usize>) -> Self {
        let (alone, wanted) = (wanted.is_some(), wanted.unwrap_or(0));
        let (tokens, unseen) = (Vec::new(), false);
        Sequences { wanted, alone, shifted: false, over: false, unseen, current: 0, tokens, passes: 0 }
    }

    /// Notes whether positions in the cache were moved.
    pub fn shift(&mut self, shifted: bool) {
        self.shifted |= shifted;
    }

    /// Takes a forward pass whose tokens are not known.
    pub fn unknown(&mut self) -> Pass {
        self.unseen = true;
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

    /// Takes a forward pass of `tokens` at `positions`, both (T,), which may be what was computed before once `again`, or is of
    /// another sequence beside that.
    pub fn pass(&mut self, tokens: &[u32], positions: &[u32], again: &dyn Fn() -> bool) -> Pass {
        let consecutive = positions.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let Some(first) = positions.first().map(|&p| p as usize) else { return Pass::Skip };
        if !self.alone {
            return self.any(tokens, positions, again);
        }
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
    /// Takes a pass of whichever sequences, all of which are recorded. A warm-up computes the first positions once and begins
    /// again.
    fn any(&mut self, tokens: &[u32], positions: &[u32], again: &dyn Fn() -> bool) -> Pass {
        if std::mem::take(&mut self.unseen) {
            return Pass::Lost("positions before it were computed out of sight, of embeddings".to_owned());
        }
        let few = self.passes > 0 && self.tokens.len() <= WARM_UP_TOKENS;
        let warm_up = few && positions.first() == Some(&0) && again();
        if warm_up {
            (self.tokens, self.passes) = (Vec::new(), 0);
        }
        self.tokens.extend_from_slice(tokens);
        self.passes += 1;
        if warm_up { Pass::StartAgain } else { Pass::Continue }
    }

    /// The recorded sequence ends where the program goes back to position `first` of `so_far`.
    fn end(&mut self, first: usize, so_far: usize, shifted: bool) -> Pass {
        self.over = true;
        match (shifted, first) {
            (true, _) => {
                Pass::Lost("the context was shifted (a larger one, -c N, needs no shift)".to_owned())
            }
            (false, 0) => Pass::Skip,
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
        sequences.pass(&vec![7; n as usize], &positions, &|| true)
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
                sequences.shift(true);
            }
            let all: Vec<Pass> = passes.iter().map(|(first, n)| pass(&mut sequences, *first, *n)).collect();
            assert!(all[1..].iter().all(|pass| *pass == Pass::Skip), "{all:?}");
            match all[0].clone() {
                Pass::Lost(why) => why,
                other => format!("{other:?}"),
            }
        };
        assert_eq!(told(&[(0, 5), (5, 1)], false, Some(0)), "Skip");
        assert!(told(&[(5, 1), (6, 1)], false, Some(0)).contains("went back to position 5 of 8"));
        assert!(told(&[(4, 1), (5, 1)], true, Some(0)).contains("context was shifted"));
        assert!(told(&[(9, 1), (10, 1)], false, Some(0)).contains("positions 8 to 8"));
        let mut batched = Sequences::new(Some(0));
        assert_eq!(pass(&mut batched, 0, 7), Pass::Continue);
        assert!(
            matches!(batched.pass(&[1, 2], &[7, 7], &|| true), Pass::Lost(why) if why.contains("several sequences"))
        );
        assert_eq!(pass(&mut batched, 7, 1), Pass::Skip);
        let mut embedded = Sequences::new(None);
        assert_eq!(pass(&mut embedded, 0, 7), Pass::Continue);
        assert!(matches!(embedded.unknown(), Pass::Lost(why) if why.contains("token ids")));
        let mut pictured = Sequences::new(None);
        assert_eq!(pictured.unknown(), Pass::Skip);
        assert!(matches!(pass(&mut pictured, 4, 7), Pass::Lost(why) if why.contains("embeddings")));
    }

    #[test]
    fn without_a_choice_everything_is_recorded() {
        let mut all = Sequences::new(None);
        for (first, n) in [(0, 7), (7, 1), (5, 2), (0, 4), (9, 1)] {
            assert_eq!(pass(&mut all, first, n), Pass::Continue);
        }
        assert_eq!(all.pass(&[1, 2], &[3, 3], &|| true), Pass::Continue);
        let mut warmed = Sequences::new(None);
        let passes = [(0, 2), (0, 4), (0, 4)].map(|(first, n)| pass(&mut warmed, first, n));
        assert_eq!(passes, [Pass::Continue, Pass::StartAgain, Pass::Continue]);
        // The short prompt of one sequence, and then that of another.
        let mut beside = Sequences::new(None);
        assert_eq!(pass(&mut beside, 0, 2), Pass::Continue);
        assert_eq!(beside.pass(&[7], &[0], &|| false), Pass::Continue);
    }

    #[test]
    fn rows_of_several_sequences_are_left_alone() {
        let mut sequences = Sequences::new(Some(0));
        assert_eq!(sequences.pass(&[1, 2], &[0, 0], &|| true), Pass::Skip);
        assert_eq!(sequences.pass(&[1], &[9], &|| true), Pass::Skip);
        assert_eq!(sequences.seen(), 0);
    }
}
