//! Two token lists side by side: where one has tokens that the other has not.

/// A place at which two lists differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hunk {
    /// The first position of it in the candidate and in the reference.
    pub at: [usize; 2],
    /// How many tokens stand there on either side.
    pub tokens: [usize; 2],
}

/// Where two lists differ between what they begin and end with alike; where the shorter rest is a part of the longer one, what
/// stands in front of that part and behind it.
pub fn aligned(candidate: &[u32], reference: &[u32]) -> Vec<Hunk> {
    let before = super::common_positions(candidate, reference) as usize;
    let (a, b) = (&candidate[before..], &reference[before..]);
    let behind = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - behind], &b[..b.len() - behind]);
    let (long, short) = if a.len() > b.len() { (a, b) } else { (b, a) };
    let part =
        (!short.is_empty()).then(|| long.windows(short.len()).position(|part| part == short)).flatten();
    let one = |at: usize, inside: usize, n: usize| match a.len() > b.len() {
        true => Hunk { at: [before + at + inside, before + at], tokens: [n, 0] },
        false => Hunk { at: [before + at, before + at + inside], tokens: [0, n] },
    };
    let hunks = match part {
        Some(front) => {
            let rest = long.len() - front - short.len();
            vec![one(0, 0, front), one(short.len(), front, rest)]
        }
        None => vec![Hunk { at: [before; 2], tokens: [a.len(), b.len()] }],
    };
    hunks.into_iter().filter(|hunk| hunk.tokens != [0, 0]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_aligned() {
        let of = |a: &[u32], b: &[u32]| -> Vec<[usize; 4]> {
            aligned(a, b).iter().map(|h| [h.at[0], h.tokens[0], h.at[1], h.tokens[1]]).collect()
        };
        let none: &[[usize; 4]] = &[];
        assert_eq!(of(&[1, 2, 3], &[1, 2, 3]), none);
        assert_eq!(of(&[9, 1, 2, 3], &[1, 2, 3]), [[0, 1, 0, 0]]);
        assert_eq!(of(&[1, 2, 3], &[1, 9, 9, 2, 3]), [[1, 0, 1, 2]]);
        assert_eq!(of(&[1, 7, 3], &[1, 8, 9, 3]), [[1, 1, 1, 2]]);
        assert_eq!(of(&[1, 5, 6, 4], &[1, 2, 3, 5, 6, 7, 4]), [[1, 0, 1, 2], [3, 0, 5, 1]]);
        assert_eq!(of(&[8, 8, 5, 6, 9], &[5, 6]), [[0, 2, 0, 0], [4, 1, 2, 0]]);
        assert_eq!(of(&[9, 9, 1], &[9, 1]), [[1, 1, 1, 0]], "which of equal ones is more nobody knows");
    }
}
