//! The tokens of a vocabulary: their texts, what kind of token each is, and which of them have a role.

use std::collections::{BTreeSet, HashMap};

use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// What a token is for: `tokenizer.ggml.token_type`, in GGUF's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Undefined,
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn from_gguf(number: i32) -> Kind {
        match number {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Undefined,
        }
    }

    /// Whether the token is found in a text by its own text, before everything else.
    pub(super) fn is_special(self) -> bool {
        matches!(self, Kind::Unknown | Kind::Control | Kind::UserDefined)
    }
}

/// Texts that llama.cpp takes for the end of a turn where no `eot_token_id` is given, and that end the
/// generation in any case.
const END_OF_TURN: [&str; 11] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Further texts that end the generation.
const END_OF_GENERATION: [&str; 8] =
    ["<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>"];

/// Fill-in-the-middle tokens: key, the texts they are known by, whether they end the generation.
const FILL_IN_THE_MIDDLE: [(&str, &[&str], bool); 6] = [
    (
        "fim_pre",
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        false,
    ),
    (
        "fim_suf",
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        false,
    ),
    (
        "fim_mid",
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        false,
    ),
    ("fim_pad", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"], true),
    ("fim_rep", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"], true),
    ("fim_sep", &["<|file_sep|>"], true),
];

/// Tokens that are part of the text although their names look like control tokens (gpt-oss).
const ALWAYS_USER_DEFINED: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// All tokens, by id and by text.
pub(super) struct Vocabulary {
    texts: Vec<String>,           // (V,)
    kinds: Vec<Kind>,             // (V,)
    ids: HashMap<Box<[u8]>, u32>, // text -> id
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    end_of_generation: BTreeSet<u32>,
}

impl Vocabulary {
    /// Reads the tokens; `bos` and `eos` are what llama.cpp assumes where the file does not say.
    pub(super) fn from_gguf(gguf: &Gguf, bos: u32, eos: u32) -> Result<Vocabulary> {
        let texts: Vec<String> = gguf
            .require_strings("tokenizer.ggml.tokens")?
            .iter()
            .enumerate()
            .map(|(id, text)| if text.is_empty() { format!("[EMPTY_{id}]") } else { text.clone() })
            .collect();
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate() {
            if let Some(twin) = ids.insert(text.as_bytes().into(), id as u32) {
                return Err(Error::file(gguf.path(), format!("tokens {twin} and {id} are both {text:?}"))
                    .expected("every token once in `tokenizer.ggml.tokens`"));
            }
        }
        let kinds = match gguf.i32s("tokenizer.ggml.token_type")? {
            Some(numbers) => per_token(gguf, "tokenizer.ggml.token_type", numbers, texts.len())?
                .into_iter()
                .map(Kind::from_gguf)
                .collect(),
            None => vec![Kind::Normal; texts.len()],
        };
        let mut vocabulary = Vocabulary {
            texts,
            kinds,
            ids,
            bos: None,
            eos: None,
            eot: None,
            end_of_generation: BTreeSet::new(),
        };
        let in_range = |id: u32| Some(id).filter(|&id| (id as usize) < vocabulary.len());
        let (bos, eos) = (in_range(bos), in_range(eos));
        vocabulary.bos = vocabulary.role(gguf, "bos")?.or(bos);
        vocabulary.eos = vocabulary.role(gguf, "eos")?.or(eos);
        vocabulary.find_roles_by_text(gguf)?;
        Ok(vocabulary)
    }

    /// The token that the file names for a role.
    fn role(&self, gguf: &Gguf, role: &str) -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        match gguf.u32(&key)? {
            Some(id) if id as usize >= self.len() => {
                Err(Error::file(gguf.path(), format!("`{key}` is outside the vocabulary"))
                    .expected(format!("below {}", self.len()))
                    .found(id))
            }
            id => Ok(id),
        }
    }

    /// Roles that llama.cpp finds by the text of tokens, because files rarely name them. A token that has
    /// such a text is a control token, whatever the file says.
    fn find_roles_by_text(&mut self, gguf: &Gguf) -> Result<()> {
        self.eot = self.role_or_text(gguf, "eot", &END_OF_TURN)?;
        let eom = self.role_or_text(gguf, "eom", &["<|eom_id|>"])?;
        for (role, texts, ends) in FILL_IN_THE_MIDDLE {
            let token = self.role_or_text(gguf, role, texts)?;
            self.end_of_generation.extend(token.filter(|_| ends));
        }
        for text in END_OF_TURN.iter().chain(&END_OF_GENERATION) {
            let token = self.find_control(&[text]);
            self.end_of_generation.extend(token);
        }
        for id in ALWAYS_USER_DEFINED.iter().filter_map(|text| self.id(text)).collect::<Vec<_>>() {
            self.kinds[id as usize] = Kind::UserDefined;
        }
        self.end_of_generation.extend([self.eos, self.eot, eom].into_iter().flatten());
        Ok(())
    }

    /// The token that the file names for a role, or else the first of these texts that is a token.
    fn role_or_text(&mut self, gguf: &Gguf, role: &str, texts: &[&str]) -> Result<Option<u32>> {
        Ok(self.role(gguf, role)?.or_else(|| self.find_control(texts)))
    }

    /// The first of these texts that is a token, which is made a control token.
    fn find_control(&mut self, texts: &[&str]) -> Option<u32> {
        let id = texts.iter().find_map(|text| self.id(text))?;
        self.kinds[id as usize] = Kind::Control;
        Some(id)
    }

    /// V
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The token with exactly this text, as the file spells it.
    pub(super) fn id(&self, text: impl AsRef<[u8]>) -> Option<u32> {
        self.ids.get(text.as_ref()).copied()
    }

    /// The text of a token, as the file spells it.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(id as usize).map(String::as_str)
    }

    /// What a token is for.
    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Undefined)
    }

    /// All tokens with their texts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        (0..).zip(self.texts.iter().map(String::as_str))
    }

    /// Whether generation stops at a token.
    pub(super) fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.contains(&id)
    }

    /// Whether no text ever gives this token: vocabulary padding and reserved control tokens.
    pub(super) fn is_unused(&self, id: u32) -> bool {
        match self.kind(id) {
            Kind::Unused => true,
            Kind::Control => self.text(id).is_some_and(|text| text.contains("unused")),
            _ => false,
        }
    }
}

/// An array with one element per token: an error where it is shorter, cut where it is longer.
pub(super) fn per_token<T>(gguf: &Gguf, key: &str, mut values: Vec<T>, tokens: usize) -> Result<Vec<T>> {
    if values.len() < tokens {
        return Err(Error::file(gguf.path(), format!("`{key}` is shorter than the vocabulary"))
            .expected(format!("{tokens} elements"))
            .found(values.len()));
    }
    values.truncate(tokens);
    Ok(values)
}
