//! Prompts that an engine may have computed in place of the one that it was given.

use super::Known;
use super::hypotheses::Hypothesis;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// Key of a model file that holds its template.
const TEMPLATE: &str = "tokenizer.chat_template";

/// What a prompt may have become, where the model file's tokenizer can be read.
///
/// # Errors
/// A text that has no tokens.
pub fn variants(known: &Known<'_>) -> Result<Vec<Hypothesis>> {
    let Ok(tokenizer) = Tokenizer::from_gguf(known.gguf) else { return Ok(Vec::new()) };
    let mut all: Vec<Hypothesis> = Vec::new();
    let mut add = |name: &str, text: String, tokens: Vec<u32>| {
        let is_new = tokens != known.prompt && !tokens.is_empty();
        if is_new && !all.iter().any(|one| matches!(&one.change, super::Change::Tokens(t) if *t == tokens)) {
            all.push(Hypothesis::tokens(name, text, tokens));
        }
    };
    let prompt = &known.prompt;
    if let Some(bos) = tokenizer.bos() {
        let without: Vec<u32> = prompt.iter().copied().skip_while(|token| *token == bos).collect();
        let begins = without.len() < prompt.len();
        if begins {
            add("tokens.bos_missing", format!("the prompt does not begin with token {bos}"), without.clone());
            let text = format!("the prompt begins with token {bos} twice");
            add("tokens.bos_doubled", text, [vec![bos, bos], without].concat());
        } else {
            let text =
                format!("token {bos} stands in front of the prompt, which this model does not ask for");
            add("tokens.bos_added", text, [vec![bos], without].concat());
        }
    }
    if let Some(text) = &known.text {
        let of = |text: &str| -> Result<Vec<u32>> { tokenizer.encode(text) };
        add(
            "tokens.leading_space",
            "a space stands in front of the prompt".to_owned(),
            of(&format!(" {text}"))?,
        );
        add("tokens.line_ends", "a line ends behind the prompt".to_owned(), of(&format!("{text}\n"))?);
        let trimmed = text.trim_end();
        add("tokens.trailing_space", "what is white behind the prompt is cut off".to_owned(), of(trimmed)?);
        let first: Vec<u32> = tokenizer.first().into_iter().collect();
        let plain = [first, tokenizer.encode_as_text(text)?].concat();
        add(
            "tokens.special_as_text",
            "special tokens of the prompt are taken for plain text".to_owned(),
            plain,
        );
        for (name, said, turn) in templated(known.gguf, text) {
            add(name, said.to_owned(), of(&turn)?);
        }
    }
    if prompt.len() > 2 {
        let text = "the last token of the prompt is missing";
        add("tokens.truncated", text.to_owned(), prompt[..prompt.len() - 1].to_vec());
        let text = "the first token of the prompt is missing";
        add("tokens.truncated", text.to_owned(), prompt[1..].to_vec());
    }
    Ok(all)
}

/// The prompt as a turn of a chat, by the file's own template; nothing where it has none that can be rendered.
fn templated(gguf: &Gguf, text: &str) -> Vec<(&'static str, &'static str, String)> {
    let Ok(Some(template)) = gguf.str(TEMPLATE) else { return Vec::new() };
    let said = "the prompt is put into the chat template of the model";
    rendered(template, text).map(|turn| ("tokens.template", said, turn)).into_iter().collect()
}

/// A template with one message of a user, and the beginning of an answer.
fn rendered(template: &str, text: &str) -> Option<String> {
    let mut environment = minijinja::Environment::new();
    environment.add_template("chat", template).ok()?;
    let message = minijinja::context! { role => "user", content => text };
    let values = minijinja::context! {
        messages => vec![message], add_generation_prompt => true, bos_token => "", eos_token => "",
    };
    environment.get_template("chat").ok()?.render(values).ok()
}
