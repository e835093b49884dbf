//! A text that was seen says which bytes were said, and not in which tokens: an engine may say what no tokenizer makes of it.

use std::sync::Arc;

use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// A text, and where each of its tokens begins.
pub struct Spelling {
    words: Arc<Words>,
    /// By token that was seen.
    starts: Vec<usize>,
}

/// What the tokens of a text are looked up in.
struct Words {
    tokenizer: Tokenizer,
    /// By token of the vocabulary.
    of: Vec<Vec<u8>>,
    /// The text behind the prompt.
    text: Vec<u8>,
}

/// The tokens of a text. A line that ends it may be the engine's or the program's that printed it: what depends on that is
/// left out.
fn tokens_of(tokenizer: &Tokenizer, text: &[u8]) -> Result<Vec<u32>> {
    let mut tokens = tokenizer.encode_without_bos(text)?;
    if let Some(cut) = text.strip_suffix(b"\n") {
        let cut = tokenizer.encode_without_bos(cut)?;
        tokens.truncate(tokens.iter().zip(&cut).take_while(|(a, b)| a == b).count());
    }
    Ok(tokens)
}

impl Spelling {
    /// A text in the tokens that its tokenizer makes of it.
    ///
    /// # Errors
    /// A text that has no tokens.
    pub fn new(tokenizer: Tokenizer, text: &[u8]) -> Result<(Vec<u32>, Spelling)> {
        let spelt = |id: u32| tokenizer.spelt(id).map(|text| text.as_bytes().into());
        let piece = |id: u32| {
            let bytes = tokenizer.bytes(id).filter(|bytes| !bytes.is_empty()).or_else(|| spelt(id));
            bytes.unwrap_or_default().into_owned()
        };
        let of: Vec<Vec<u8>> = (0..tokenizer.n_tokens() as u32).map(piece).collect();
        let tokens = tokens_of(&tokenizer, text)?;
        let end: usize = tokens.iter().map(|token| of[*token as usize].len()).sum();
        let text = text[..end.min(text.len())].to_vec();
        let spelling = Spelling::of(&tokens, Arc::new(Words { tokenizer, of, text }));
        Ok((tokens, spelling))
    }

    fn of(tokens: &[u32], words: Arc<Words>) -> Spelling {
        let (mut starts, mut at) = (Vec::with_capacity(tokens.len()), 0);
        for token in tokens {
            starts.push(at);
            at += words.of.get(*token as usize).map_or(0, Vec::len);
        }
        Spelling { words, starts }
    }

    /// The text that is left of a row on.
    fn rest(&self, t: usize) -> Option<&[u8]> {
        self.words.text.get(*self.starts.get(t)?..)
    }

    /// A token in place of another one, where the text that is left of a row on begins with it.
    pub fn otherwise(&self, t: usize, seen: u32, token: u32) -> Option<u32> {
        let piece = self.words.of.get(token as usize).filter(|piece| !piece.is_empty())?;
        (token != seen && self.rest(t)?.starts_with(piece)).then_some(token)
    }

    /// As many tokens as these in which the token of a row is another one.
    pub fn respelt(&self, tokens: &[u32], t: usize, token: u32) -> Option<(Vec<u32>, Spelling)> {
        let words = &self.words;
        let behind = self.rest(t)?.get(words.of.get(token as usize)?.len()..)?;
        let mut other = [&tokens[..t], &[token]].concat();
        other.extend(words.tokenizer.encode_without_bos(behind).ok()?);
        other.truncate(tokens.len());
        let spelling = Spelling::of(&other, Arc::clone(words));
        Some((other, spelling))
    }
}
