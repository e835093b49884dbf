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
}

/// The tokens seen so far, sequence by sequence.
#[derive(Clone, Debug)]
pub struct Sequences {
    wanted: usize,
    /// Number of the current sequence; a warm-up has none.
    current: usize,
    /// Token at each position of the current sequence.
    tokens: Vec<u32>,
    passes: usize,
}

/// Longest batch that llama.cpp's tools warm up with: begin and end of text.
const WARM_UP_TOKENS: usize = 2;

impl Sequences {
    /// Records sequence number `wanted`, counted from 0.
    pub fn new(wanted: usize) -> Self {
        Sequences { wanted, current: 0, tokens: Vec::new(), passes: 0 }
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
        // Rows of several sequences in one batch have no one position each.
        if !consecutive || tokens.len() != positions.len() || first > self.tokens.len() {
            return Pass::Skip;
        }
        let restarts = self.passes > 0 && first < self.tokens.len();
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
        match (self.current == self.wanted, restarts && warm_up) {
            (true, true) => Pass::StartAgain,
            (true, false) => Pass::Continue,
            (false, _) => Pass::Skip,
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
        let mut sequences = Sequences::new(0);
        for (first, n) in [(0, 64), (64, 9), (73, 1), (74, 1)] {
            assert_eq!(pass(&mut sequences, first, n), Pass::Continue);
        }
        assert_eq!(sequences.seen(), 1);
    }

    #[test]
    fn a_warm_up_is_dropped() {
        let mut sequences = Sequences::new(0);
        assert_eq!(pass(&mut sequences, 0, 2), Pass::Continue);
        assert_eq!(pass(&mut sequences, 0, 7), Pass::StartAgain);
        assert_eq!(pass(&mut sequences, 7, 1), Pass::Continue);
        assert_eq!(sequences.seen(), 1);
        let mut one_by_one = Sequences::new(0);
        for (first, then) in
            [(0, Pass::Continue), (1, Pass::Continue), (0, Pass::StartAgain), (1, Pass::Continue)]
        {
            assert_eq!(pass(&mut one_by_one, first, 1), then);
        }
        assert_eq!(one_by_one.seen(), 1);
    }

    #[test]
    fn a_second_prompt_is_another_sequence() {
        let mut sequences = Sequences::new(0);
        assert_eq!(pass(&mut sequences, 0, 7), Pass::Continue);
        assert_eq!(pass(&mut sequences, 7, 1), Pass::Continue);
        assert_eq!(pass(&mut sequences, 0, 5), Pass::Skip);
        assert_eq!(pass(&mut sequences, 5, 1), Pass::Skip);
        assert_eq!(sequences.seen(), 2);
        let mut second = Sequences::new(1);
        assert_eq!(pass(&mut second, 0, 7), Pass::Skip);
        assert_eq!(pass(&mut second, 0, 5), Pass::Continue);
    }

    #[test]
    fn rows_of_several_sequences_are_left_alone() {
        let mut sequences = Sequences::new(0);
        assert_eq!(sequences.pass(&[1, 2], &[0, 0]), Pass::Skip);
        assert_eq!(sequences.pass(&[1], &[9]), Pass::Skip);
        assert_eq!(sequences.seen(), 0);
    }
}
