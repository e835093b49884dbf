//! A prompt that tells hypotheses apart which an output does not: short texts are tried, and the one is taken behind
//! which they say different tokens most clearly.

use serde::Serialize;

use super::Known;
use super::hypotheses::{self, Hypothesis};
use super::passes::Prompt;
use crate::compare::argmax;
use crate::error::Result;
use crate::random;
use crate::tokenizer::Tokenizer;

/// Texts that are tried.
const TRIALS: u64 = 24;
/// Tokens of each.
const LENGTH: usize = 12;

/// A prompt, and what each hypothesis says behind it.
#[derive(Clone, Debug, Serialize)]
pub struct Apart {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its text, where that has these tokens again.
    pub text: Option<String>,
    /// What each says first.
    pub says: Vec<Says>,
}

/// The first token that a hypothesis says.
#[derive(Clone, Debug, Serialize)]
pub struct Says {
    /// Of the hypothesis.
    pub name: String,
    /// The token.
    pub token: u32,
    /// Its text.
    pub text: Option<String>,
}

/// Looks for a prompt behind which all of these say something else; nothing where none of those that are tried does.
///
/// # Errors
/// A graph that cannot be built.
pub fn apart(known: &Known<'_>, which: &[&Hypothesis]) -> Result<Option<Apart>> {
    let tokenizer = Tokenizer::from_gguf(known.gguf).ok();
    let mut best: Option<(f64, Apart)> = None;
    for trial in 0..TRIALS {
        let Some((tokens, text)) = trial_of(known, tokenizer.as_ref(), trial) else { continue };
        let pass = Prompt::new(known.gguf, &tokens, tokens.len(), 1)?;
        let again = hypotheses::again(&pass.labelled, pass.layers(), which);
        let Some(again) = again.into_iter().collect::<Option<Vec<Hypothesis>>>() else { continue };
        let logits: Option<Vec<Vec<f32>>> =
            pass.logits(&again.iter().collect::<Vec<_>>()).into_iter().skip(1).collect();
        let Some(logits) = logits else { continue };
        let said: Option<Vec<u32>> = logits.iter().map(|row| argmax(row)).collect();
        let Some(said) = said else { continue };
        let clear = clearness(&logits, &said);
        if clear > 0.0 && best.as_ref().is_none_or(|(known, _)| clear > *known) {
            let piece = |token: u32| tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&[token]));
            let says = which.iter().zip(said);
            let says = says.map(|(one, token)| Says { name: one.name.clone(), token, text: piece(token) });
            best = Some((clear, Apart { tokens, text, says: says.collect() }));
        }
    }
    Ok(best.map(|(_, apart)| apart))
}

/// The least margin by which each prefers its own token to every other's, in logits; 0 where two say the same.
fn clearness(logits: &[Vec<f32>], said: &[u32]) -> f64 {
    let mut least = f64::INFINITY;
    for (i, row) in logits.iter().enumerate() {
        for (j, other) in said.iter().enumerate().filter(|(j, _)| *j != i) {
            let margin = f64::from(row[said[i] as usize]) - f64::from(row[*other as usize]);
            least = if said[i] == said[j] { 0.0 } else { least.min(margin) };
        }
    }
    least
}

/// Random tokens, that a text stands for where the model file's tokenizer is known; behind the beginning of the prompt that
/// was given, so that BOS and the like stand where they did.
fn trial_of(
    known: &Known<'_>,
    tokenizer: Option<&Tokenizer>,
    trial: u64,
) -> Option<(Vec<u32>, Option<String>)> {
    let Some(tokenizer) = tokenizer else {
        let tokens = (0..LENGTH).map(|i| known.prompt[(i * (trial as usize + 1)) % known.prompt.len()]);
        return Some((tokens.collect(), None));
    };
    let n = tokenizer.n_tokens() as u64;
    let draw =
        |i: u64| (random::mixed((trial + 1).wrapping_mul(random::GAMMA).wrapping_add(i)) % n.max(1)) as u32;
    let plain = |token: &u32| !tokenizer.is_unused(*token) && !tokenizer.is_end_of_generation(*token);
    let drawn: Vec<u32> = (0..4 * LENGTH as u64).map(draw).filter(plain).take(LENGTH).collect();
    let text = tokenizer.decode(&drawn);
    let tokens = tokenizer.encode(&text).ok().filter(|tokens| !tokens.is_empty())?;
    let is_plain = !text.contains('\u{FFFD}') && text.chars().all(|c| !c.is_control());
    Some((tokens, is_plain.then_some(text)))
}
