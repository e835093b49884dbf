//! SentencePiece vocabularies as llama.cpp reads them: neighbours are merged, best score first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::vocabulary::Vocabulary;

/// Stands for a space in the texts of tokens.
const SPACE: &str = "▁";

/// The scores of a vocabulary, and its tokens for single bytes.
pub(super) struct Spm {
    scores: Vec<f32>,        // (V,)
    bytes: Vec<Option<u32>>, // (256,)
}

/// A stretch of the text that becomes one token, in a list from left to right.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// 0: swallowed by its left neighbour.
    len: usize,
    left: Option<usize>,
    right: Option<usize>,
}

/// Two neighbours whose texts together are a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

/// The highest score first, then the leftmost.
impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

impl Spm {
    /// `scores` (V,).
    pub(super) fn new(vocabulary: &Vocabulary, scores: Vec<f32>) -> Spm {
        let byte = |byte: u8| vocabulary.id(format!("<0x{byte:02X}>")).or_else(|| vocabulary.id([byte]));
        // Adding zero makes -0 equal to 0 for the order.
        let scores = scores.into_iter().map(|score| score + 0.0).collect();
        Spm { scores, bytes: (0..=255).map(byte).collect() }
    }

    /// Appends the tokens of a text. The byte that no token stands for, where there is one, as an error.
    pub(super) fn encode(
        &self,
        text: &[u8],
        vocabulary: &Vocabulary,
        tokens: &mut Vec<u32>,
    ) -> Result<(), u8> {
        let text = escape_spaces(text);
        let mut symbols = characters(&text);
        let mut queue = BinaryHeap::new();
        let pair = |symbols: &[Symbol], left: Option<usize>, right: Option<usize>| -> Option<Pair> {
            let (left, right) = (left?, right?);
            let (start, len) = (symbols[left].start, symbols[left].len + symbols[right].len);
            let token = vocabulary.id(&text[start..start + len])?;
            Some(Pair { score: self.scores[token as usize], left, right, len })
        };
        for right in 1..symbols.len() {
            queue.extend(pair(&symbols, Some(right - 1), Some(right)));
        }
        while let Some(Pair { left, right, len, .. }) = queue.pop() {
            let (l, r) = (symbols[left], symbols[right]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue; // one of them was merged with something else meanwhile
            }
            symbols[left] = Symbol { len, right: r.right, ..l };
            symbols[right].len = 0;
            if let Some(next) = r.right {
                symbols[next].left = Some(left);
            }
            queue.extend(pair(&symbols, l.left, Some(left)));
            queue.extend(pair(&symbols, Some(left), r.right));
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let bytes = &text[symbol.start..symbol.start + symbol.len];
            match vocabulary.id(bytes) {
                Some(token) => tokens.push(token),
                None => {
                    for &byte in bytes {
                        tokens.push(self.bytes[usize::from(byte)].ok_or(byte)?);
                    }
                }
            }
        }
        Ok(())
    }
}

/// What a token's text stands for.
pub(super) fn decode(text: &str) -> Vec<u8> {
    text.replace(SPACE, " ").into_bytes()
}

fn escape_spaces(text: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(text.len());
    for &byte in text {
        match byte {
            b' ' => escaped.extend(SPACE.as_bytes()),
            byte => escaped.push(byte),
        }
    }
    escaped
}

/// One symbol per character; lengths as the first byte announces them, as llama.cpp has it.
fn characters(text: &[u8]) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
    let mut start = 0;
    while start < text.len() {
        let announced = match text[start] {
            0xC0..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xFF => 4,
            _ => 1,
        };
        let len = announced.min(text.len() - start);
        let index = symbols.len();
        let right = (start + len < text.len()).then_some(index + 1);
        symbols.push(Symbol { start, len, left: index.checked_sub(1), right });
        start += len;
    }
    symbols
}
