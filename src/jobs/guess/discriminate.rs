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

/// Looks for a prompt behind which as many of these as can be say something else; nothing where none of those that are tried
/// tells any two of them apart. Each beginning of a text that is tried is a prompt.
///
/// # Errors
/// A graph that cannot be built.
pub fn apart(known: &Known<'_>, which: &[&Hypothesis]) -> Result<Option<Apart>> {
    let tokenizer = Tokenizer::from_gguf(known.gguf).ok();
    let (mut best, mut clearest) = (None, (0, 0.0));
    for trial in 0..TRIALS {
        let Some(tokens) = trial_of(known, tokenizer.as_ref(), trial) else { continue };
        let pass = Prompt::new(known.model(), &tokens, tokens.len(), tokens.len())?;
        let again = hypotheses::again(&pass.labelled, pass.layers(), which);
        let Some(again) = again.into_iter().collect::<Option<Vec<Hypothesis>>>() else { continue };
        let logits: Option<Vec<Vec<f32>>> =
            pass.logits(&again.iter().collect::<Vec<_>>()).into_iter().skip(1).collect();
        let Some(logits) = logits else { continue };
        for end in 1..=tokens.len() {
            let rows: Vec<&[f32]> =
                logits.iter().filter_map(|all| all.chunks(pass.width).nth(end - 1)).collect();
            let said: Vec<u32> = rows.iter().map(|row| argmax(row).unwrap_or(0)).collect();
            let clear = clearness(&rows, &said);
            if clear > clearest {
                (best, clearest) = (Some((tokens[..end].to_vec(), said)), clear);
            }
        }
    }
    let Some((tokens, said)) = best else { return Ok(None) };
    let decode = |tokens: &[u32]| tokenizer.as_ref().map(|tokenizer| tokenizer.decode(tokens));
    // A text that has these tokens again.
    let is_plain = |text: &String| {
        let again = tokenizer.as_ref().and_then(|tokenizer| tokenizer.encode(text).ok());
        again.as_deref() == Some(&tokens[..]) && !text.chars().any(|c| c == '\u{FFFD}' || c.is_control())
    };
    let says = which.iter().zip(said);
    let says = says.map(|(one, token)| Says { name: one.name.clone(), token, text: decode(&[token]) });
    Ok(Some(Apart { text: decode(&tokens).filter(is_plain), says: says.collect(), tokens }))
}

/// How many pairs say something else, and the least margin by which one of such a pair prefers its own token to the other's, in
/// logits. Logits that are all alike, or no numbers, come to token 0.
fn clearness(logits: &[&[f32]], said: &[u32]) -> (usize, f64) {
    let (mut pairs, mut least) = (0, f64::INFINITY);
    for (i, row) in logits.iter().enumerate() {
        for other in said.iter().skip(i + 1).filter(|other| **other != said[i]) {
            let margin = f64::from(row[said[i] as usize]) - f64::from(row[*other as usize]);
            pairs += 1;
            least = least.min(if margin.is_nan() { 0.0 } else { margin });
        }
    }
    if pairs == 0 { (0, 0.0) } else { (pairs, least) }
}

/// Random tokens, that a text stands for where the model file's tokenizer is known, which puts BOS and the like in front.
fn trial_of(known: &Known<'_>, tokenizer: Option<&Tokenizer>, trial: u64) -> Option<Vec<u32>> {
    let Some(tokenizer) = tokenizer else {
        let tokens = (0..LENGTH).map(|i| known.prompt[(i * (trial as usize + 1)) % known.prompt.len()]);
        return Some(tokens.collect());
    };
    let n = tokenizer.n_tokens() as u64;
    let draw =
        |i: u64| (random::mixed((trial + 1).wrapping_mul(random::GAMMA).wrapping_add(i)) % n.max(1)) as u32;
    let plain = |token: &u32| !tokenizer.is_unused(*token) && !tokenizer.is_end_of_generation(*token);
    let drawn: Vec<u32> = (0..4 * LENGTH as u64).map(draw).filter(plain).take(LENGTH).collect();
    tokenizer.encode(tokenizer.decode(&drawn)).ok().filter(|tokens| !tokens.is_empty())
}
