//! Answers of servers in OpenAI's form (`"logprobs": true, "top_logprobs": 20`, or `"logprobs": 5` of completions), as
//! vLLM, SGLang and llama-server give them, with what these add: token ids, `prompt_logprobs`, `completion_probabilities`.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Columns, LogProbs, Row, Start, Token};
use crate::error::{Error, Result};
use crate::files;

/// Logarithm of the smallest probability that has all its digits in f32 (2^-126): below it a server has rounded.
const FLOOR: f64 = -126.0 * std::f64::consts::LN_2;
/// What vLLM spells a token as with `return_tokens_as_token_ids`.
const BY_ID: &str = "token_id:";

/// How servers compute, in whichever engine.
const ARITHMETICS: [&str; 4] =
    ["f32", "llama-cpu kv=f16", "f16 storage=f16 kv=f16", "bf16 storage=bf16 kv=bf16"];

/// One token, and the likeliest ones in its place.
#[derive(Clone, Default)]
struct Place {
    token: Option<Token>,
    known: Vec<(Token, f64)>,
}

/// The log-probabilities of an answer; `None` where it is no answer of a server.
///
/// # Errors
/// An answer without log-probabilities, with what asks for them; several answers in one file.
pub fn read(path: &Path) -> Result<Option<LogProbs>> {
    let text = files::read(path, files::TEXT_BYTES_MAX)?;
    let Ok(json) = serde_json::from_str::<Value>(&text) else { return Ok(None) };
    let choices = json.get("choices").and_then(Value::as_array);
    let native = json.get("completion_probabilities").and_then(Value::as_array);
    let choice = match (choices.map(Vec::as_slice), native) {
        (Some([choice]), _) => Some(choice),
        (Some(several), _) => {
            return Err(Error::file(path, "holds no single answer")
                .expected("one choice")
                .found(several.len())
                .hint("\"n\": 1, \"stream\": false"));
        }
        (None, Some(_)) => None,
        (None, None) => return Ok(None),
    };
    let said = choice.and_then(|choice| choice.get("logprobs"));
    let listed = native.or_else(|| said?.get("content")?.as_array());
    let generated = match (listed, said.and_then(Value::as_object)) {
        (Some(listed), _) => listed.iter().map(chat).collect(),
        (None, Some(said)) => completion(said),
        (None, None) => Vec::new(),
    };
    let of = |name: &str| choice.and_then(|choice| choice.get(name)).or_else(|| json.get(name));
    let prompt =
        of("prompt_logprobs").and_then(Value::as_array).map(|places| places.iter().map(by_id).collect());
    let ids = |name: &str| {
        of(name).and_then(Value::as_array).map(|ids| ids.iter().filter_map(id).collect::<Vec<Token>>())
    };
    let out =
        arranged(path, prompt.unwrap_or_default(), generated, ids("prompt_token_ids"), ids("token_ids"))?;
    match out.rows.is_empty() {
        false => Ok(Some(out)),
        true => Err(Error::file(path, "is an answer without log-probabilities")
            .expected("`logprobs` of every token")
            .found("none")
            .hint(
                "ask with \"logprobs\": true, \"top_logprobs\": 20 (chat), or \"logprobs\": 5 (completions)",
            )),
    }
}

/// Tokens and rows in one order.
fn arranged(
    path: &Path,
    prompt: Vec<Place>,
    generated: Vec<Place>,
    prompt_ids: Option<Vec<Token>>,
    ids: Option<Vec<Token>>,
) -> Result<LogProbs> {
    // `echo` puts the prompt in front: of its first token nothing can be said.
    let echoed = generated.len() > 1 && generated[0].known.is_empty();
    let start =
        if echoed || !prompt.is_empty() || prompt_ids.is_some() { Start::Text } else { Start::Prompt };
    let behind = prompt_ids.as_ref().map_or(prompt.len(), Vec::len);
    let mut places: Vec<Place> = prompt;
    places.resize(if echoed { 0 } else { behind }, Place::default());
    for (place, id) in places.iter_mut().zip(prompt_ids.unwrap_or_default()) {
        place.token = Some(id);
    }
    let mut generated = generated;
    if let Some(ids) = ids.filter(|ids| ids.len() == generated.len()) {
        generated.iter_mut().zip(ids).for_each(|(place, id)| place.token = Some(id));
    }
    places.append(&mut generated);
    let decimals = Decimals::of(places.iter().flat_map(|place| place.known.iter().map(|(_, value)| *value)));
    let mut rows = Vec::new();
    for (at, place) in places.iter().enumerate() {
        let index = if start == Start::Text { at.checked_sub(1) } else { Some(at) };
        let Some(index) = index.filter(|_| !place.known.is_empty()) else { continue };
        let (columns, values): (Vec<Token>, Vec<f64>) = place.known.iter().cloned().unzip();
        let half_unit = values.iter().map(|value| decimals.half_unit(*value)).fold(0.0, f64::max);
        rows.push(Row { index, columns: Columns::Some(columns), values, half_unit, floor: FLOOR });
    }
    // Nothing was said of what comes after the last.
    places.pop();
    Ok(LogProbs {
        path: path.to_owned(),
        format: "log-probabilities of a server",
        producer: "a server".to_owned(),
        arithmetics: &ARITHMETICS,
        start,
        tokens: places.into_iter().map(|place| place.token).collect(),
        bos: false,
        rows,
        notes: Vec::new(),
    })
}

/// `{"token": …, "id": …, "bytes": …, "logprob": …, "top_logprobs": [...]}`
fn chat(entry: &Value) -> Place {
    let token = token_of(entry);
    let listed = entry.get("top_logprobs").and_then(Value::as_array);
    let own = entry.get("logprob").and_then(Value::as_f64);
    let listed =
        listed.into_iter().flatten().filter_map(|e| Some((token_of(e)?, e.get("logprob")?.as_f64()?)));
    let mut known: Vec<(Token, f64)> = listed.collect();
    add_own(&mut known, token.as_ref(), own);
    Place { token, known }
}

/// `{"tokens": [...], "token_logprobs": [...], "top_logprobs": [{…}, …]}`
fn completion(said: &Map<String, Value>) -> Vec<Place> {
    let list = |name: &str| said.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let (own, top) = (list("token_logprobs"), list("top_logprobs"));
    let place = |(at, text): (usize, &Value)| {
        let token = text.as_str().and_then(spelt);
        let listed = top.get(at).and_then(Value::as_object);
        let listed =
            listed.into_iter().flatten().filter_map(|(text, value)| Some((spelt(text)?, value.as_f64()?)));
        let mut known: Vec<(Token, f64)> = listed.collect();
        add_own(&mut known, token.as_ref(), own.get(at).and_then(Value::as_f64));
        Place { token, known }
    };
    list("tokens").iter().enumerate().map(place).collect()
}

/// `{"123": {"logprob": …}, …}` of vLLM's `prompt_logprobs`; the token itself comes first.
fn by_id(entry: &Value) -> Place {
    let listed = entry.as_object().into_iter().flatten();
    let of =
        |(id, said): (&String, &Value)| Some((Token::Id(id.parse().ok()?), said.get("logprob")?.as_f64()?));
    Place { token: None, known: listed.filter_map(of).collect() }
}

fn add_own(known: &mut Vec<(Token, f64)>, token: Option<&Token>, own: Option<f64>) {
    if let Some((token, own)) = token.zip(own)
        && known.iter().all(|(other, _)| other != token)
    {
        known.push((token.clone(), own));
    }
}

fn id(value: &Value) -> Option<Token> {
    value.as_u64().and_then(|id| u32::try_from(id).ok()).map(Token::Id)
}

/// Which token an entry is of: by number, by bytes, by text.
fn token_of(entry: &Value) -> Option<Token> {
    let byte = |value: &Value| value.as_u64().and_then(|byte| u8::try_from(byte).ok());
    let bytes = || entry.get("bytes")?.as_array()?.iter().map(byte).collect::<Option<Vec<u8>>>();
    let text = || entry.get("token").and_then(Value::as_str).and_then(spelt);
    let numbered = || text().filter(|token| matches!(token, Token::Id(_)));
    entry
        .get("id")
        .and_then(id)
        .or_else(numbered)
        .or_else(|| bytes().filter(|b| !b.is_empty()).map(Token::Bytes))
        .or_else(text)
}

/// A token by its text; `None` where that is cut within a character.
fn spelt(text: &str) -> Option<Token> {
    match text.strip_prefix(BY_ID).and_then(|id| id.parse().ok()) {
        Some(id) => Some(Token::Id(id)),
        None if text.contains('\u{FFFD}') => None,
        None => Some(Token::Bytes(text.as_bytes().to_vec())),
    }
}

/// How numbers of a file are printed: with so many digits behind the point, or so many that mean something. Which of
/// the two a program does shows in none of its numbers, and each is at most as exact as the coarser of the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Decimals {
    behind_point: i32,
    significant: i32,
}

impl Decimals {
    fn of(values: impl Iterator<Item = f64>) -> Decimals {
        let mut out = Decimals::default();
        for value in values.filter(|value| value.is_finite() && *value != 0.0) {
            // The shortest text that reads as this number is what was printed, but for zeros at its end.
            let (digits, exponent) = shortest(value);
            out.significant = out.significant.max(digits);
            out.behind_point = out.behind_point.max(digits - 1 - exponent);
        }
        out
    }

    fn half_unit(&self, value: f64) -> f64 {
        let half = |last: i32| 0.5 * 10f64.powi(last);
        let of_point = half(-self.behind_point);
        match value.is_finite() && value != 0.0 {
            true => of_point.max(half(shortest(value).1 + 1 - self.significant)),
            false => of_point,
        }
    }
}

/// How many digits a number has, and its exponent of ten.
fn shortest(value: f64) -> (i32, i32) {
    let text = format!("{:e}", value.abs());
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (digits.bytes().filter(u8::is_ascii_digit).count() as i32, exponent.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_printing_hides_follows_from_the_digits_of_all_numbers() {
        let fixed = Decimals::of([-0.5, -12.3456, -0.0012].into_iter());
        assert_eq!(fixed, Decimals { behind_point: 4, significant: 6 });
        approx::assert_relative_eq!(fixed.half_unit(-0.0012), 0.5e-4);
        let floating = Decimals::of([-1.234567, -0.00001234567].into_iter());
        approx::assert_relative_eq!(floating.half_unit(-9.5), 0.5e-6, max_relative = 1e-9);
    }

    #[test]
    fn tokens_are_known_by_number_bytes_or_text() {
        let of = |json: &str| token_of(&serde_json::from_str(json).unwrap());
        assert_eq!(of(r#"{"token": "a", "id": 7, "bytes": [97]}"#), Some(Token::Id(7)));
        assert_eq!(of(r#"{"token": "token_id:9", "bytes": [116]}"#), Some(Token::Id(9)));
        assert_eq!(of(r#"{"token": "\uFFFD", "bytes": [226, 130]}"#), Some(Token::Bytes(vec![226, 130])));
        assert_eq!(of(r#"{"token": "b", "bytes": null}"#), Some(Token::Bytes(b"b".to_vec())));
        assert_eq!(of(r#"{"token": "\uFFFD"}"#), None);
    }
}
