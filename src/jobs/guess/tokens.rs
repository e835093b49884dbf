//! Prompts that an engine may have computed in place of the one that it was given.

use super::Known;
use super::hypotheses::{Change, Hypothesis};
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
        if is_new && !all.iter().any(|one| matches!(&one.change, Change::Tokens(t) if *t == tokens)) {
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
        let first: Vec<u32> = tokenizer.first().into_iter().collect();
        for (name, tokens) in Tokenizer::split_otherwise(known.gguf, text)? {
            let text = format!("the prompt is split as by the pre-tokenizer {name}");
            add("tokens.pre_tokenizer", text, [first.clone(), tokens].concat());
        }
        for (name, said, turn) in templated(known.gguf, text) {
            add(name, said, of(&turn)?);
        }
    }
    if prompt.len() > 2 {
        let text = "the last token of the prompt is missing";
        add("tokens.truncated", text.to_owned(), prompt[..prompt.len() - 1].to_vec());
        let text = "the first token of the prompt is missing";
        add("tokens.truncated", text.to_owned(), prompt[1..].to_vec());
        for n in (4..).map(|power| 1usize << power).take_while(|n| *n < prompt.len()) {
            let of = prompt.len();
            let text = |which: &str| format!("only the {which} {n} of the prompt's {of} tokens are read");
            add("tokens.truncated", text("last"), prompt[of - n..].to_vec());
            add("tokens.truncated", text("first"), prompt[..n].to_vec());
        }
    }
    Ok(all)
}

/// Turns of widespread templates: the family, and what stands around the prompt.
const TURNS: [(&str, &str, &str); 5] = [
    ("ChatML", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    ("Llama 2 and Mistral", "[INST] ", " [/INST]"),
    (
        "Llama 3",
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("Gemma", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    ("Phi", "<|user|>\n", "<|end|>\n<|assistant|>\n"),
];

/// A prompt that cannot stand in a template.
const MARK: &str = "\u{1}prompt\u{1}";

/// The prompt as a turn of a chat, by the file's own template and by others, and without the one that stands around it.
fn templated(gguf: &Gguf, text: &str) -> Vec<(&'static str, String, String)> {
    let template = gguf.str(TEMPLATE).ok().flatten();
    let own = template.and_then(|template| rendered(template, MARK));
    let own = own.as_deref().and_then(|turn| turn.split_once(MARK));
    let others = TURNS.iter().map(|(family, before, behind)| {
        let said = format!("the prompt is put into the chat template of {family}");
        ("tokens.template_of_another", said, format!("{before}{text}{behind}"))
    });
    let by_own = own.into_iter().flat_map(|(before, behind)| {
        let put = "the prompt is put into the chat template of the model".to_owned();
        let bare = text.strip_prefix(before).and_then(|text| text.strip_suffix(behind)).unwrap_or(text);
        let bare_said = "the chat template around the prompt is left out".to_owned();
        [
            ("tokens.template", put, format!("{before}{text}{behind}")),
            ("tokens.no_template", bare_said, bare.to_owned()),
        ]
    });
    by_own.chain(others).collect()
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
