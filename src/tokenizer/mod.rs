//! Text to tokens and back, from the metadata of a GGUF file alone; the tokens are llama.cpp's.
//!
//! Mirrors `llama_vocab` (src/llama-vocab.cpp) with `parse_special = true`: the texts of control and
//! user-defined tokens are found first, longest first, and what lies between them is cut and merged.

mod bpe;
mod spm;
mod vocabulary;

use std::borrow::Cow;
use std::path::PathBuf;

use self::bpe::{Bpe, PreTokenizer};
use self::spm::Spm;
use self::vocabulary::{Kind, Vocabulary, per_token};
use crate::error::{Error, Result};
use crate::gguf::Gguf;

const SCORES: &str = "tokenizer.ggml.scores";

/// Text to tokens and back, for one model file.
pub struct Tokenizer {
    path: PathBuf,
    vocabulary: Vocabulary,
    /// Longest text first.
    special: Vec<Special>,
    model: Model,
    add_bos: bool,
    add_eos: bool,
    /// Whether text at the start, or after a special token, begins with a space.
    add_space_prefix: bool,
}

enum Model {
    Bpe(Box<Bpe>),
    Spm(Spm),
}

/// A token that is found in a text by its own text.
struct Special {
    id: u32,
    text: Vec<u8>,
    /// Whether white space after it belongs to it.
    strips_right: bool,
}

/// A special token, or a stretch of text between them.
#[derive(Clone, Copy)]
enum Fragment<'t> {
    Text(&'t [u8]),
    Token(u32),
}

impl Tokenizer {
    /// Reads `tokenizer.ggml.*`. BOS and EOS where the file names none, and whether BOS and a leading space
    /// are added where it does not say, are llama.cpp's defaults.
    pub fn from_gguf(gguf: &Gguf) -> Result<Tokenizer> {
        match gguf.require_str("tokenizer.ggml.model")? {
            "gpt2" => Tokenizer::split_by(gguf, PreTokenizer::from_gguf(gguf)?),
            "llama" => {
                let vocabulary = Vocabulary::from_gguf(gguf, 1, 2)?;
                let scores = gguf.require_f32s(SCORES)?;
                let scores = per_token(gguf, SCORES, scores, vocabulary.len())?;
                let model = Model::Spm(Spm::new(&vocabulary, scores));
                Tokenizer::new(gguf, vocabulary, model, true, true)
            }
            other => Err(Error::file(gguf.path(), "has a kind of vocabulary that parity does not know")
                .expected("`tokenizer.ggml.model` gpt2 (byte-level BPE) or llama (SentencePiece)")
                .found(format!("{other:?}"))
                .hint(bpe::HAND_OVER_TOKENS)),
        }
    }

    fn split_by(gguf: &Gguf, pre: &PreTokenizer) -> Result<Tokenizer> {
        let vocabulary = Vocabulary::from_gguf(gguf, 11, 11)?;
        let model = Model::Bpe(Box::new(Bpe::from_gguf(gguf, pre, &vocabulary)?));
        Tokenizer::new(gguf, vocabulary, model, pre.add_bos, false)
    }

    /// Tokens of a text, without BOS, as every other pre-tokenizer splits it that parity knows, by its name; of byte-level
    /// vocabularies alone.
    ///
    /// # Errors
    /// A vocabulary that cannot be read, a text that has no tokens.
    pub fn split_otherwise(gguf: &Gguf, text: &str) -> Result<Vec<(&'static str, Vec<u32>)>> {
        let Ok(own) = PreTokenizer::from_gguf(gguf) else { return Ok(Vec::new()) };
        let others = bpe::PRE_TOKENIZERS.iter().filter(|pre| pre.name() != own.name());
        let of = |pre: &PreTokenizer| Tokenizer::split_by(gguf, pre)?.encode_without_bos(text);
        let is_bytes = gguf.require_str("tokenizer.ggml.model")? == "gpt2";
        others.filter(|_| is_bytes).map(|pre| Ok((pre.name(), of(pre)?))).collect()
    }

    fn new(
        gguf: &Gguf,
        vocabulary: Vocabulary,
        model: Model,
        add_bos: bool,
        add_space_prefix: bool,
    ) -> Result<Tokenizer> {
        let add = |what: &str, default: bool, token: Option<u32>| -> Result<bool> {
            let key = format!("tokenizer.ggml.add_{what}_token");
            let add = gguf.bool(&key)?.unwrap_or(default);
            if add && token.is_none() {
                return Err(Error::file(gguf.path(), format!("`{key}` is set and there is no such token"))
                    .expected(format!("`tokenizer.ggml.{what}_token_id`")));
            }
            Ok(add)
        };
        Ok(Tokenizer {
            path: gguf.path().to_owned(),
            add_bos: add("bos", add_bos, vocabulary.bos)?,
            add_eos: add("eos", false, vocabulary.eos)?,
            add_space_prefix: gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(add_space_prefix),
            special: special_tokens(gguf, &vocabulary)?,
            vocabulary,
            model,
        })
    }

    /// Tokens of a text, special tokens parsed, with BOS and EOS where the file asks for them.
    /// Bytes that are not UTF-8 are taken as llama.cpp takes them.
    pub fn encode(&self, text: impl AsRef<[u8]>) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        tokens.extend(self.first());
        self.append(text.as_ref(), &mut tokens)?;
        tokens.extend(self.vocabulary.eos.filter(|_| self.add_eos));
        Ok(tokens)
    }

    /// Tokens of a text, special tokens parsed, with neither BOS nor EOS.
    pub fn encode_without_bos(&self, text: impl AsRef<[u8]>) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        self.append(text.as_ref(), &mut tokens)?;
        Ok(tokens)
    }

    /// The same, with special tokens taken for text like any other.
    pub fn encode_as_text(&self, text: impl AsRef<[u8]>) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        self.append_fragments(vec![Fragment::Text(text.as_ref())], &mut tokens)?;
        Ok(tokens)
    }

    fn append(&self, text: &[u8], tokens: &mut Vec<u32>) -> Result<()> {
        self.append_fragments(self.fragments(text), tokens)
    }

    fn append_fragments(&self, fragments: Vec<Fragment<'_>>, tokens: &mut Vec<u32>) -> Result<()> {
        let mut after_special = true;
        for fragment in fragments {
            match (fragment, &self.model) {
                (Fragment::Token(id), _) => tokens.push(id),
                (Fragment::Text(text), Model::Bpe(bpe)) => {
                    bpe.encode(&repaired(text), &self.vocabulary, tokens)?
                }
                (Fragment::Text(text), Model::Spm(spm)) => {
                    let space: &[u8] = if self.add_space_prefix && after_special { b" " } else { b"" };
                    spm.encode(&[space, text].concat(), &self.vocabulary, tokens).map_err(|byte| {
                        Error::file(&self.path, format!("has no token for byte 0x{byte:02X}"))
                            .expected(format!("a token `<0x{byte:02X}>`"))
                            .hint(bpe::HAND_OVER_TOKENS)
                    })?;
                }
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        Ok(())
    }

    /// Cuts special tokens out of a text, the longest first.
    fn fragments<'t>(&self, text: &'t [u8]) -> Vec<Fragment<'t>> {
        let mut fragments = vec![Fragment::Text(text)];
        for special in &self.special {
            if find(text, &special.text).is_none() {
                continue;
            }
            fragments = fragments.into_iter().flat_map(|fragment| special.cut(fragment)).collect();
        }
        fragments.retain(|fragment| !matches!(fragment, Fragment::Text([])));
        fragments
    }

    /// The text of tokens, that of special tokens included; what is not UTF-8 becomes U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for (index, &token) in tokens.iter().enumerate() {
            let piece = self.bytes(token).unwrap_or("\u{FFFD}".as_bytes().into());
            let prefixed = index == 0 && self.add_space_prefix;
            bytes.extend(piece.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(&piece));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The text of one token for display: control characters and bytes that are not UTF-8 are escaped.
    pub fn piece(&self, token: u32) -> Option<Cow<'_, str>> {
        let bytes = self.bytes(token)?;
        let mut shown = String::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c.is_control() {
                    true => shown.extend(c.escape_default()),
                    false => shown.push(c),
                }
            }
            shown.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
        }
        Some(shown.into())
    }

    /// What a token stands for; nothing for unused ones.
    pub fn bytes(&self, token: u32) -> Option<Cow<'_, [u8]>> {
        let text = self.vocabulary.text(token)?;
        Some(match self.vocabulary.kind(token) {
            kind if kind.is_special() => text.as_bytes().into(),
            Kind::Normal => match &self.model {
                Model::Bpe(bpe) => bpe.decode(text).into(),
                Model::Spm(_) => spm::decode(text).into(),
            },
            Kind::Byte => {
                let hex = text.strip_prefix("<0x").and_then(|hex| hex.strip_suffix('>'));
                match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(byte) => vec![byte].into(),
                    None => text.as_bytes().into(),
                }
            }
            _ => Cow::Borrowed(&[]),
        })
    }

    /// A token as the file spells it, which is how some programs print unused ones.
    pub fn spelt(&self, token: u32) -> Option<&str> {
        self.vocabulary.text(token)
    }

    /// V
    pub fn n_tokens(&self) -> usize {
        self.vocabulary.len()
    }

    /// What stands in front of every text, where something does.
    pub fn first(&self) -> Option<u32> {
        self.vocabulary.bos.filter(|_| self.add_bos)
    }

    /// Beginning of text.
    pub fn bos(&self) -> Option<u32> {
        self.vocabulary.bos
    }

    /// End of text.
    pub fn eos(&self) -> Option<u32> {
        self.vocabulary.eos
    }

    /// Whether EOS stands behind every text.
    pub fn adds_eos(&self) -> bool {
        self.add_eos && self.vocabulary.eos.is_some()
    }

    /// End of turn.
    pub fn eot(&self) -> Option<u32> {
        self.vocabulary.eot
    }

    /// Whether llama.cpp stops generating at this token.
    pub fn is_end_of_generation(&self, token: u32) -> bool {
        self.vocabulary.is_end_of_generation(token)
    }

    /// Whether no text ever gives this token: vocabulary padding and reserved control tokens.
    pub fn is_unused(&self, token: u32) -> bool {
        self.vocabulary.is_unused(token)
    }
}

impl Special {
    /// A fragment with all occurrences of this token cut out.
    fn cut<'t>(&self, fragment: Fragment<'t>) -> Vec<Fragment<'t>> {
        let Fragment::Text(mut rest) = fragment else { return vec![fragment] };
        let mut fragments = Vec::new();
        while let Some(at) = find(rest, &self.text) {
            fragments.extend([Fragment::Text(&rest[..at]), Fragment::Token(self.id)]);
            rest = &rest[at + self.text.len()..];
            if self.strips_right {
                let space =
                    rest.iter().take_while(|byte| byte.is_ascii_whitespace() || **byte == 0x0B).count();
                rest = &rest[space..];
            }
        }
        fragments.push(Fragment::Text(rest));
        fragments
    }
}

/// Special tokens, longest first. White space after a token belongs to it in Phi-3 only, which llama.cpp
/// tells by the name of the model.
fn special_tokens(gguf: &Gguf, vocabulary: &Vocabulary) -> Result<Vec<Special>> {
    let name = gguf.str("general.name")?.unwrap_or_default().to_lowercase();
    let phi3 = name.contains("phi-3") || name.contains("phi3");
    let mut special: Vec<Special> = vocabulary
        .iter()
        .filter(|(id, _)| vocabulary.kind(*id).is_special())
        .map(|(id, text)| Special {
            id,
            text: text.as_bytes().to_vec(),
            strips_right: phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&text),
        })
        .collect();
    special.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
    Ok(special)
}

/// Where a non-empty text first occurs.
fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    let (first, last) = (wanted.first()?, text.len().checked_sub(wanted.len())?);
    let mut from = 0;
    while let Some(found) = text[from..=last].iter().position(|byte| byte == first) {
        from += found;
        if text[from..].starts_with(wanted) {
            return Some(from);
        }
        from += 1;
        if from > last {
            break;
        }
    }
    None
}

/// As UTF-8, with U+FFFD for every byte that is not. Read as loosely as llama.cpp reads it: a character may
/// be spelt with more bytes than it needs.
fn repaired(text: &[u8]) -> Cow<'_, str> {
    let mut rest = match str::from_utf8(text) {
        Ok(text) => return text.into(),
        Err(_) => text,
    };
    let mut repaired = String::with_capacity(rest.len());
    while !rest.is_empty() {
        let (c, len) = first_character(rest).unwrap_or((char::REPLACEMENT_CHARACTER, 1));
        repaired.push(c);
        rest = &rest[len..];
    }
    repaired.into()
}

/// The character that bytes begin with, and how many bytes it takes.
fn first_character(bytes: &[u8]) -> Option<(char, usize)> {
    let lead = *bytes.first()?;
    let (len, high) = match lead {
        0x00..=0x7F => (1, lead),
        0xC0..=0xDF => (2, lead & 0x1F),
        0xE0..=0xEF => (3, lead & 0x0F),
        0xF0..=0xF7 => (4, lead & 0x07),
        _ => return None,
    };
    let code = bytes.get(1..len)?.iter().try_fold(u32::from(high), |code, byte| {
        (byte & 0xC0 == 0x80).then_some(code << 6 | u32::from(byte & 0x3F))
    })?;
    Some((char::from_u32(code)?, len))
}
