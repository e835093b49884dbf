//! What both sides of a run say: the text and the tokens behind the prompt.

use parity_dump::Dump;

use crate::gguf::Gguf;
use crate::report::Report;
use crate::tokenizer::Tokenizer;

/// A line for each side of a run that decoded; none where it did not.
pub fn notes(report: &Report, candidate: &Dump, gguf: &Gguf) -> Vec<String> {
    let prompt = candidate.manifest().steps.first().map_or(0, |step| step.positions.len());
    let tokens = candidate.tokens();
    let Some(behind) = tokens.get(prompt..).filter(|behind| !behind.is_empty() && prompt > 1) else {
        return Vec::new();
    };
    let chosen = report.tokens.as_ref().map(|tokens| tokens.chosen.as_slice()).unwrap_or_default();
    let from = prompt as u32 - 1;
    let rows = || chosen.iter().filter(|row| row.position >= from);
    let own: Vec<u32> = rows().map(|row| row.candidate).collect();
    let theirs: Vec<u32> = rows().map(|row| row.reference).collect();
    let tokenizer = Tokenizer::from_gguf(gguf).ok();
    let say = |side: &str, tokens: &[u32]| {
        let text = tokenizer.as_ref().map(|tokenizer| format!("{:?}, ", tokenizer.decode(tokens)));
        let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
        format!("the {side} says {}tokens {}", text.unwrap_or_default(), ids.join(","))
    };
    match (own.is_empty(), own == theirs) {
        (true, _) => vec![say("candidate", behind)],
        (false, true) => vec![say("candidate", &own), "the reference says the same".to_owned()],
        (false, false) => vec![say("candidate", &own), say("reference", &theirs)],
    }
}
