//! The tokenizer: ids, added tokens, merges, how a text is cut, what stands at its beginning and end.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value as Json;

use super::Carried;
use crate::error::Result;
use crate::files::{TEXT_BYTES_MAX, read};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// Texts whose tokens are compared: contractions, numbers, white space, scripts, code, signs.
const TEXTS: [&str; 8] = [
    "Hello world, it's 1234567 o'clock and WE'RE late.",
    "  two spaces\n\n\n   three lines\t\ttabs \r\n end ",
    "def f(x):\n    return {'a': [x**2, 0x1F]}  # ok?!...",
    "Zażółć gęślą jaźń, Äpfel naïve café ÆØÅ",
    "日本語のテキスト 中文文本 한국어 ไทย हिन्दी العربية עברית",
    "🙂👩‍👩‍👧 ½ ² № € — … «»",
    "3.14159 1,000,000 2024-01-02 a1b2c3",
    "camelCase snake_case HTTPServer don't I'LL",
];

const DIFFERENT: &str = "the model reads other tokens";

/// tokenizer_config.json, config.json and generation_config.json.
type Said<'a> = (&'a Json, Option<&'a Json>, Option<&'a Json>);

/// tokenizer.json, as it is and as a tokenizer; nothing where there is none that can be read.
///
/// # Errors
/// A file that cannot be read.
pub fn tokenizer(folder: &Path) -> Result<Option<(Json, tokenizers::Tokenizer)>> {
    let path = folder.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    let text = read(&path, TEXT_BYTES_MAX)?;
    Ok(serde_json::from_str(&text).ok().zip(text.parse().ok()))
}

/// Compares the tokenizer.
///
/// # Errors
/// A tokenizer.json that cannot be read.
pub fn compare(gguf: &Gguf, folder: &Path, said: Said<'_>, out: &mut Carried) -> Result<()> {
    let Some((json, theirs)) = tokenizer(folder)? else {
        let there = folder.join("tokenizer.json").exists();
        let why = if there { "of a form that cannot be read here" } else { "not in the folder" };
        out.not_compared.push(format!("tokenizer.json: {why}"));
        return Ok(());
    };
    let Some(own) = gguf.strings("tokenizer.ggml.tokens")? else {
        let says = (format!("{} tokens", theirs.get_vocab_size(true)), "no token".to_owned());
        out.differs(
            "tokens.ids",
            "tokenizer.json, tokenizer.ggml.tokens".to_owned(),
            says,
            "no text can be read",
        );
        return Ok(());
    };
    if gguf.str("tokenizer.ggml.model")? == Some("bert") {
        out.not_compared.push("tokenizer.json: WordPiece, whose tokens a file spells otherwise".to_owned());
        return Ok(());
    }
    let before = out.differences.len();
    ids(own, &theirs, out);
    added(gguf, &json, own, out)?;
    merges(gguf, &json, out)?;
    let changed = out.differences.len() > before;
    match Tokenizer::from_gguf(gguf) {
        Ok(ours) => {
            if !changed {
                by_result(gguf, &ours, &theirs, out);
            }
            ends(&ours, &theirs, said, out);
        }
        Err(error) => {
            out.not_compared.push(format!("how a text is cut, BOS and EOS: the file {}", error.cause()));
        }
    }
    Ok(())
}

/// As both sides mean it: a space may be spelt as SentencePiece spells it.
fn plain(text: &str) -> String {
    text.replace('\u{2581}', " ")
}

/// Which token each id is.
fn ids(own: &[String], theirs: &tokenizers::Tokenizer, out: &mut Carried) {
    let all: BTreeMap<u32, String> =
        theirs.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
    let special: Vec<u32> = theirs.get_added_tokens_decoder().into_keys().collect();
    let differs = |id: &u32, text: &String| match own.get(*id as usize) {
        Some(own) => plain(own) != plain(text),
        None => true,
    };
    let wrong: Vec<u32> = all
        .iter()
        .filter(|(id, text)| !special.contains(id) && differs(id, text))
        .map(|(id, _)| *id)
        .collect();
    if let Some(first) = wrong.first() {
        let said = own.get(*first as usize).map_or_else(
            || format!("{} tokens in all", own.len()),
            |own| format!("{own:?}; {} of {} ids differ", wrong.len(), all.len()),
        );
        let place = "tokenizer.json model.vocab, tokenizer.ggml.tokens".to_owned();
        out.differs("tokens.ids", place, (format!("id {first} is {:?}", all[first]), said), DIFFERENT);
    }
}

/// Numbers of tokenizer.ggml.token_type that are found in a text by their own text.
const FOUND_BY_TEXT: [i32; 3] = [2, 3, 4];
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// Added tokens: their ids, texts, and whether they are found in a text.
fn added(gguf: &Gguf, json: &Json, own: &[String], out: &mut Carried) -> Result<()> {
    let types = gguf.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    let mut wrong = Vec::new();
    let mut not_special = Vec::new();
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) else { continue };
        let at = usize::try_from(id).unwrap_or(usize::MAX);
        match (own.get(at), types.get(at)) {
            (Some(own), _) if plain(own) != plain(text) => wrong.push((id, text, format!("{own:?}"))),
            (None, _) => wrong.push((id, text, "no such id".to_owned())),
            (_, Some(kind)) if !FOUND_BY_TEXT.contains(kind) && *kind != BYTE => {
                wrong.push((id, text, format!("{text:?} as an ordinary token (type {kind})")));
            }
            (_, Some(kind)) if token["special"] == Json::Bool(true) && *kind != CONTROL && *kind != 2 => {
                not_special.push((id, text));
            }
            _ => {}
        }
    }
    let place = "tokenizer.json added_tokens, tokenizer.ggml.tokens and token_type".to_owned();
    if let Some((id, text, said)) = wrong.first() {
        let more =
            if wrong.len() > 1 { format!("; {} added tokens differ", wrong.len()) } else { String::new() };
        let effect = "the text of such a token is cut into others: templates do not reach the model as they were trained";
        out.differs(
            "tokens.added",
            place.clone(),
            (format!("id {id} is {text:?}"), said.clone() + &more),
            effect,
        );
    }
    if let Some((id, text)) = not_special.first() {
        let says = (format!("{text:?} ({id}) is special"), "user-defined".to_owned());
        out.note("tokens.special", place, says, "its text is printed, and not hidden");
    }
    Ok(())
}

/// Merges in their order.
fn merges(gguf: &Gguf, json: &Json, out: &mut Carried) -> Result<()> {
    let Some(theirs) = json["model"]["merges"].as_array() else { return Ok(()) };
    // SentencePiece's are scores in a file.
    if gguf.str("tokenizer.ggml.model")? == Some("llama") {
        return Ok(());
    }
    let spelt = |part: &str| part.replace(' ', "\u{120}");
    let theirs: Vec<String> = theirs
        .iter()
        .map(|merge| match merge {
            Json::Array(pair) => {
                pair.iter().filter_map(Json::as_str).map(spelt).collect::<Vec<_>>().join(" ")
            }
            other => other.as_str().unwrap_or_default().to_owned(),
        })
        .collect();
    let own = gguf.strings("tokenizer.ggml.merges")?.unwrap_or_default();
    if own != theirs {
        let at = own.iter().zip(&theirs).take_while(|(own, theirs)| own == theirs).count();
        let shown = |merges: &[String]| match merges.get(at) {
            Some(merge) => format!("{merge:?} as merge {at} of {}", merges.len()),
            None => format!("{} merges", merges.len()),
        };
        let place = "tokenizer.json model.merges, tokenizer.ggml.merges".to_owned();
        out.differs("tokens.merges", place, (shown(&theirs), shown(own)), DIFFERENT);
    }
    Ok(())
}

/// The tokens of texts.
fn by_result(gguf: &Gguf, ours: &Tokenizer, theirs: &tokenizers::Tokenizer, out: &mut Carried) {
    for text in TEXTS {
        let (Ok(wanted), Ok(own)) = (theirs.encode(text, false), ours.encode_without_bos(text)) else {
            continue;
        };
        let wanted = wanted.get_ids();
        if own == wanted {
            continue;
        }
        let at = own.iter().zip(wanted).take_while(|(a, b)| a == b).count();
        let shown = |ids: &[u32]| {
            let pieces =
                ids.iter().skip(at).take(4).map(|id| format!("{:?}", ours.piece(*id).unwrap_or_default()));
            format!("{} from token {at} of {}", pieces.collect::<Vec<_>>().join(" "), ids.len())
        };
        let pre = gguf.str("tokenizer.ggml.pre").ok().flatten().unwrap_or("default");
        let place = format!("tokenizer.json pre_tokenizer and normalizer, tokenizer.ggml.pre {pre:?}");
        out.differs("tokens.pre_tokenizer", place, (shown(wanted), shown(&own)), DIFFERENT);
        return;
    }
}

/// Classes of transformers that add what tokenizer_config.json says, whatever tokenizer.json does.
const ADD_AS_SAID: [&str; 5] = ["Llama", "Gemma", "CodeLlama", "Cohere", "DeepseekV2"];

/// BOS and EOS, and whether they are added.
fn ends(ours: &Tokenizer, theirs: &tokenizers::Tokenizer, said: Said<'_>, out: &mut Carried) {
    let (says, config, generation) = said;
    let text = "a";
    let (with, without) = (theirs.encode(text, true), theirs.encode(text, false));
    let ids = |encoded: &tokenizers::Result<tokenizers::Encoding>| {
        encoded.as_ref().map(|encoded| encoded.get_ids().to_vec()).unwrap_or_default()
    };
    let (with, without) = (ids(&with), ids(&without));
    let class = says["tokenizer_class"].as_str().unwrap_or_default();
    let as_said = ADD_AS_SAID.iter().any(|name| class.starts_with(name));
    let tokens = [
        ("bos", ours.bos(), ours.first().is_some(), with.first() != without.first()),
        ("eos", ours.eos(), ours.adds_eos(), with.last() != without.last()),
    ];
    for (what, own, own_adds, adds) in tokens {
        let flag = says[format!("add_{what}_token")].as_bool();
        let adds = flag.filter(|_| as_said).unwrap_or(adds);
        let name_of = |id: Option<u32>| match id {
            Some(id) => format!("{:?} ({id})", ours.piece(id).unwrap_or_default()),
            None => "none".to_owned(),
        };
        if own_adds != adds {
            let word = |adds: bool| if adds { "added to every text" } else { "not added" }.to_owned();
            let place = format!(
                "tokenizer.json post_processor and tokenizer_config.json add_{what}_token, tokenizer.ggml.add_{what}_token"
            );
            out.differs(&format!("tokens.{what}_added"), place, (word(adds), word(own_adds)), DIFFERENT);
        }
        let accepted = accepted(what, theirs, says, &[config, generation]);
        let Some(first) = accepted.first() else { continue };
        if own.is_some_and(|own| accepted.contains(&own)) {
            continue;
        }
        let place = format!("tokenizer_config.json {what}_token, tokenizer.ggml.{what}_token_id");
        let pair = (name_of(Some(*first)), name_of(own));
        match (what, adds || own_adds) {
            ("bos", false) => {
                out.note("tokens.bos", place, pair, "it is added to no text: only templates name it")
            }
            ("bos", true) => out.differs("tokens.bos", place, pair, "every text begins with another token"),
            _ => out.differs(
                "tokens.eos",
                place,
                pair,
                "llama.cpp goes on where the model ended, or ends elsewhere",
            ),
        }
    }
    // Further tokens that end a generation.
    let ends = generation.map(|generation| numbers(&generation["eos_token_id"])).unwrap_or_default();
    let not_known: Vec<u32> = ends.into_iter().filter(|id| !ours.is_end_of_generation(*id)).collect();
    if let Some(first) = not_known.first() {
        let piece = ours.piece(*first).unwrap_or_default();
        let says =
            (format!("{piece:?} ({first}) ends a generation"), "not known to llama.cpp as an end".to_owned());
        let place = "generation_config.json eos_token_id, tokenizer.ggml.eot_token_id".to_owned();
        out.note("generation.eos_token_id", place, says, "llama.cpp goes on where transformers stops");
    }
}

/// Ids that a key gives, one or a list.
fn numbers(json: &Json) -> Vec<u32> {
    let one = |json: &Json| json.as_u64().and_then(|id| u32::try_from(id).ok());
    match json {
        Json::Array(list) => list.iter().filter_map(one).collect(),
        other => one(other).into_iter().collect(),
    }
}

/// The ids that any file of the folder gives for this token, tokenizer_config.json first.
fn accepted(what: &str, theirs: &tokenizers::Tokenizer, says: &Json, others: &[Option<&Json>]) -> Vec<u32> {
    let token = &says[format!("{what}_token")];
    let text = token.as_str().or_else(|| token["content"].as_str());
    let mut out: Vec<u32> = text.and_then(|text| theirs.token_to_id(text)).into_iter().collect();
    for json in others.iter().flatten() {
        out.extend(numbers(&json[format!("{what}_token_id")]));
    }
    out
}
