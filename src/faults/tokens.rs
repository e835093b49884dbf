//! The token side: where two runs were not given the same tokens, no tensor needs to be compared.

use crate::gguf::Gguf;
use crate::report::Diagnosis;
use crate::tokenizer::Tokenizer;

/// Text of tokens.
pub type Decode<'a> = &'a dyn Fn(&[u32]) -> String;

/// What is known of a vocabulary; nothing of it is needed, all of it helps.
#[derive(Clone, Copy, Default)]
pub struct Vocabulary<'a> {
    /// Token that opens a sequence.
    pub bos: Option<u32>,
    /// Tokens that close one.
    pub eos: Option<u32>,
    /// Text of tokens.
    pub decode: Option<Decode<'a>>,
}

/// One mistake on the way from text to tokens.
struct Mistake {
    name: &'static str,
    fix: &'static str,
    /// The sentence, where the tokens show the mistake.
    shown: fn(&Pair<'_>) -> Option<String>,
}

struct Pair<'a> {
    candidate: &'a [u32],
    reference: &'a [u32],
    vocabulary: Vocabulary<'a>,
    /// Both as text.
    text: Option<(String, String)>,
}

/// Names what differs between the candidate's and the reference's tokens; empty where they are equal.
pub fn diagnose(candidate: &[u32], reference: &[u32], vocabulary: Vocabulary<'_>) -> Vec<Diagnosis> {
    if candidate == reference {
        return Vec::new();
    }
    let text = vocabulary.decode.map(|decode| (decode(candidate), decode(reference)));
    let pair = Pair { candidate, reference, vocabulary, text };
    let shown = MISTAKES.iter().find_map(|mistake| Some((mistake, (mistake.shown)(&pair)?)));
    let (name, text, fix) = match shown {
        Some((mistake, text)) => (mistake.name, text, Some(mistake.fix.to_owned())),
        None => ("tokens.differ", pair.first_difference(), None),
    };
    vec![Diagnosis { fault: name.to_owned(), explains: 1.0, text, fix }]
}

/// As [`diagnose`], with the model's tokenizer.
pub fn diagnose_with(candidate: &[u32], reference: &[u32], tokenizer: &Tokenizer) -> Vec<Diagnosis> {
    let decode = |tokens: &[u32]| tokenizer.decode(tokens);
    let vocabulary = Vocabulary { bos: tokenizer.bos(), eos: tokenizer.eos(), decode: Some(&decode) };
    diagnose(candidate, reference, vocabulary)
}

/// As [`diagnose`], in sentences, with the tokenizer of a model file where it has one that is understood.
pub fn said(candidate: &[u32], reference: &[u32], gguf: &Gguf) -> Vec<String> {
    sentences(match Tokenizer::from_gguf(gguf) {
        Ok(tokenizer) => diagnose_with(candidate, reference, &tokenizer),
        Err(_) => diagnose(candidate, reference, Vocabulary::default()),
    })
}

/// What a note says of a diagnosis.
pub fn sentences(diagnosis: Vec<Diagnosis>) -> Vec<String> {
    let fix = |fix: Option<String>| fix.map_or(String::new(), |fix| format!("; {fix}"));
    diagnosis.into_iter().map(|item| format!("{} ({}){}", item.text, item.fault, fix(item.fix))).collect()
}

impl Pair<'_> {
    fn first_difference(&self) -> String {
        let (a, b) = (self.candidate, self.reference);
        let at = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
        let shown = |tokens: &[u32]| match tokens.get(at) {
            None => "nothing".to_owned(),
            Some(token) => match self.vocabulary.decode {
                Some(decode) => format!("{token} ({:?})", decode(&[*token])),
                None => token.to_string(),
            },
        };
        format!(
            "the tokens differ from position {at} on: {} in the candidate, {} in the reference",
            shown(a),
            shown(b)
        )
    }
}

/// The mistakes, the most telling first.
const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "tokens.bos_doubled",
        fix: "add the BOS in the template or in the tokenizer, not in both",
        shown: |pair| {
            let bos = pair.vocabulary.bos?;
            let doubled = pair.candidate.starts_with(&[bos, bos]) && &pair.candidate[1..] == pair.reference;
            doubled
                .then(|| format!("the candidate begins with two BOS (token {bos}), the reference with one"))
        },
    },
    Mistake {
        name: "tokens.bos_missing",
        fix: "begin with the BOS where tokenizer.ggml.add_bos_token says so",
        shown: |pair| {
            let (first, rest) = pair.reference.split_first()?;
            let is_bos = pair.vocabulary.bos.is_none_or(|bos| bos == *first);
            (is_bos && rest == pair.candidate)
                .then(|| format!("the candidate lacks the first token of the reference, {first} (BOS)"))
        },
    },
    Mistake {
        name: "tokens.bos_added",
        fix: "add no BOS where tokenizer.ggml.add_bos_token is false, as in Qwen2",
        shown: |pair| {
            let (first, rest) = pair.candidate.split_first()?;
            (rest == pair.reference).then(|| {
                format!("the candidate begins with token {first}, which the reference does not have (BOS)")
            })
        },
    },
    Mistake {
        name: "tokens.eos_added",
        fix: "add no end-of-sequence token to a prompt",
        shown: |pair| {
            let (last, rest) = pair.candidate.split_last()?;
            let is_eos = pair.vocabulary.eos == Some(*last);
            (is_eos && rest == pair.reference)
                .then(|| format!("the candidate ends with token {last} (EOS), the reference does not"))
        },
    },
    Mistake {
        name: "tokens.trailing_space",
        fix: "strip the prompt, or give both sides the same text",
        shown: |pair| {
            let (candidate, reference) = pair.text.as_ref()?;
            let (a, b) = (candidate.trim_end(), reference.trim_end());
            (a == b && candidate != reference).then(|| {
                let side = if candidate.len() > reference.len() { "candidate" } else { "reference" };
                format!("the {side}'s text ends with white space that the other does not have")
            })
        },
    },
    Mistake {
        name: "tokens.leading_space",
        fix: "follow tokenizer.ggml.add_space_prefix",
        shown: |pair| {
            let (candidate, reference) = pair.text.as_ref()?;
            (candidate.trim_start() == reference.trim_start() && candidate != reference).then(|| {
                let side = if candidate.len() > reference.len() { "candidate" } else { "reference" };
                format!("the {side}'s text begins with white space that the other does not have")
            })
        },
    },
    Mistake {
        name: "tokens.line_ends",
        fix: "read the prompt in text mode, or convert \\r\\n to \\n on both sides",
        shown: |pair| {
            let (candidate, reference) = pair.text.as_ref()?;
            let same = candidate.replace("\r\n", "\n") == reference.replace("\r\n", "\n");
            (same && candidate != reference).then(|| "the texts differ in \\r\\n and \\n only".to_owned())
        },
    },
    Mistake {
        name: "tokens.special_as_text",
        fix: "parse special tokens when tokenizing a template (llama_tokenize: parse_special)",
        shown: |pair| {
            let (candidate, reference) = pair.text.as_ref()?;
            let markers =
                candidate.contains("<|") || candidate.contains("<s>") || candidate.contains("[INST]");
            (candidate == reference && markers && pair.candidate.len() != pair.reference.len()).then(|| {
                let side =
                    if pair.candidate.len() > pair.reference.len() { "candidate" } else { "reference" };
                format!("the {side} spells special tokens out as text")
            })
        },
    },
    Mistake {
        name: "tokens.other_split",
        fix: "check the pre-tokenizer's expression (tokenizer.ggml.pre) and the order of the merges",
        shown: |pair| {
            let (candidate, reference) = pair.text.as_ref()?;
            (candidate == reference)
                .then(|| format!("the same text is split into other tokens; {}", pair.first_difference()))
        },
    },
    Mistake {
        name: "tokens.template",
        fix: "apply the chat template (tokenizer.chat_template) on both sides or on neither",
        shown: |pair| {
            let wraps = |outer: &[u32], inner: &[u32]| {
                let longest = outer.len() > inner.len() && !inner.is_empty();
                longest && outer.windows(inner.len()).skip(1).any(|window| window == inner)
            };
            let inside = |outer: &str, inner: &str| {
                let inner = inner.trim();
                outer.len() > inner.len()
                    && !inner.is_empty()
                    && !outer.starts_with(inner)
                    && outer.contains(inner)
            };
            let (a, b) = (pair.candidate, pair.reference);
            let text = pair.text.as_ref();
            let (around_ours, around_theirs) = (
                wraps(b, a) || text.is_some_and(|(a, b)| inside(b, a)),
                wraps(a, b) || text.is_some_and(|(a, b)| inside(a, b)),
            );
            match (around_ours, around_theirs) {
                (true, _) => Some("the reference wraps the candidate's text in a template".to_owned()),
                (_, true) => Some("the candidate wraps the reference's text in a template".to_owned()),
                _ => None,
            }
        },
    },
    Mistake {
        name: "tokens.shifted_ids",
        fix: "use the ids of the model's own vocabulary, without an offset for special tokens",
        shown: |pair| {
            let same_length = pair.candidate.len() == pair.reference.len();
            let shift = |(a, b): (&u32, &u32)| i64::from(*a) - i64::from(*b);
            let mut shifts = pair.candidate.iter().zip(pair.reference).map(shift);
            let first = shifts.next()?;
            (same_length && pair.candidate.len() > 1 && shifts.all(|shift| shift == first))
                .then(|| format!("every token of the candidate is {first:+} from the reference's"))
        },
    },
    Mistake {
        name: "tokens.truncated",
        fix: "give both sides the same number of tokens",
        shown: |pair| {
            let (a, b) = (pair.candidate, pair.reference);
            if b.starts_with(a) {
                Some(format!("the candidate has only the first {} of {} tokens", a.len(), b.len()))
            } else if a.starts_with(b) {
                Some(format!("the candidate goes on after the reference's {} tokens", b.len()))
            } else if !a.is_empty() && b.ends_with(a) {
                Some(format!("the candidate has only the last {} of {} tokens", a.len(), b.len()))
            } else {
                None
            }
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// One letter per token; token 1 opens, token 2 closes.
    fn letters(tokens: &[u32]) -> String {
        tokens
            .iter()
            .filter_map(|token| char::from_u32(*token).filter(|c| *c >= ' ' || *c == '\n' || *c == '\r'))
            .collect()
    }

    fn name(candidate: &str, reference: &str) -> String {
        let ids = |text: &str| -> Vec<u32> { text.chars().map(u32::from).collect() };
        let vocabulary = Vocabulary { bos: Some(1), eos: Some(2), decode: Some(&letters) };
        let found = diagnose(&ids(candidate), &ids(reference), vocabulary);
        found.first().map_or(String::new(), |item| item.fault.clone())
    }

    #[test]
    fn the_token_side_is_named() {
        for (candidate, reference, expected) in [
            ("\u{1}abc", "\u{1}abc", ""),
            ("\u{1}\u{1}abc", "\u{1}abc", "tokens.bos_doubled"),
            ("abc", "\u{1}abc", "tokens.bos_missing"),
            ("\u{1}abc", "abc", "tokens.bos_added"),
            ("abc\u{2}", "abc", "tokens.eos_added"),
            ("abc ", "abc", "tokens.trailing_space"),
            (" abc", "abcd", "tokens.differ"),
            ("x abc", " x abc", "tokens.leading_space"),
            ("a\r\nb", "a\nb", "tokens.line_ends"),
            ("abc", "User: abc\nAnswer:", "tokens.template"),
            ("bcd", "abc", "tokens.shifted_ids"),
            ("abc", "abcdef", "tokens.truncated"),
            ("abc", "axc", "tokens.differ"),
        ] {
            assert_eq!(name(candidate, reference), expected, "{candidate:?} for {reference:?}");
        }
    }

    #[test]
    fn without_a_vocabulary_what_can_be_said_is_said() {
        let found = diagnose(&[5, 6, 7], &[5, 9, 7], Vocabulary::default());
        assert_eq!(found[0].fault, "tokens.differ");
        assert!(found[0].text.contains("from position 1 on: 6 in the candidate, 9 in the reference"));
    }
}
