//! Byte-level BPE: a text is cut into words by regular expressions, and the bytes of a word are merged.

use std::collections::HashMap;

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::utils::SysRegex;

use super::vocabulary::Vocabulary;
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// What to do about a vocabulary that parity does not read.
pub(super) const HAND_OVER_TOKENS: &str = "let llama.cpp tokenize (`llama-tokenize -m MODEL -p PROMPT --ids`) and hand over the ids (`--tokens 1,2,3`)";

// The expressions are those of llama.cpp (src/llama-vocab.cpp, llm_tokenizer_bpe), with `|\s+` added to
// that of GPT-2, as its hand-written matcher has it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";

/// The version of Unicode that llama.cpp's character classes are of.
const UNICODE: &str = "15.1";

/// White space in a row that the regular expressions can cut, with a factor of two to spare.
const WHITE_SPACE_MAX: usize = 500_000;

/// How a text is cut into words.
pub(super) struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre` that mean the same.
    names: &'static [&'static str],
    /// Each cuts the pieces that the one before it left.
    expressions: &'static [&'static str],
    /// Whether a word that is a token stays whole.
    ignore_merges: bool,
    /// Whether a text begins with BOS where the file does not say.
    pub(super) add_bos: bool,
}

pub(super) const PRE_TOKENIZERS: [PreTokenizer; 6] = [
    PreTokenizer {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
        ],
        expressions: &[QWEN2],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer { names: &["qwen35"], expressions: &[QWEN35], ignore_merges: false, add_bos: false },
    PreTokenizer {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        expressions: &[DIGIT, GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        expressions: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["smaug-bpe", "dbrx"],
        expressions: &[LLAMA3],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        expressions: &[GPT2],
        ignore_merges: false,
        add_bos: false,
    },
];

impl PreTokenizer {
    /// What files call it.
    pub(super) fn name(&self) -> &'static str {
        self.names.first().copied().unwrap_or_default()
    }

    /// The one that the file names.
    pub(super) fn from_gguf(gguf: &Gguf) -> Result<&'static PreTokenizer> {
        let name = gguf.str("tokenizer.ggml.pre")?.unwrap_or("default");
        PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
            let known: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied().collect();
            Error::file(gguf.path(), "has a pre-tokenizer that parity does not know")
                .expected(format!("`tokenizer.ggml.pre` one of {}", known.join(", ")))
                .found(format!("{name:?}"))
                .hint(HAND_OVER_TOKENS)
        })
    }
}

/// Merges and pre-tokenizer of one vocabulary.
pub(super) struct Bpe {
    expressions: Vec<SysRegex>,
    ignore_merges: bool,
    model: BPE,
    alphabet: [char; 256],    // byte -> the character that stands for it in tokens
    has_token: [bool; 256],   // byte -> whether that character is a token
    bytes: HashMap<char, u8>, // the reverse of the alphabet
}

impl Bpe {
    /// Reads the merges.
    pub(super) fn from_gguf(gguf: &Gguf, pre: &PreTokenizer, vocabulary: &Vocabulary) -> Result<Bpe> {
        let merges = read_merges(gguf, vocabulary)?;
        let ids: Vocab = vocabulary.iter().map(|(id, text)| (text.to_string(), id)).collect();
        // Without a cache: the crate's is per thread and never freed.
        let builder = BPE::builder().vocab_and_merges(ids, merges).cache_capacity(0);
        let alphabet = alphabet();
        let regex = |&expression: &&str| {
            // Letters that Unicode has got since are none to llama.cpp.
            let expression = ["L", "M", "N"].into_iter().fold(expression.to_string(), |expression, class| {
                let class = format!(r"\p{{{class}}}");
                expression.replace(&class, &format!(r"[{class}&&\p{{Age={UNICODE}}}]"))
            });
            SysRegex::new(&expression).map_err(|error| Error::file(gguf.path(), error))
        };
        Ok(Bpe {
            expressions: pre.expressions.iter().map(regex).collect::<Result<_>>()?,
            ignore_merges: pre.ignore_merges,
            model: builder.build().map_err(|error| Error::file(gguf.path(), error))?,
            alphabet,
            has_token: alphabet.map(|c| vocabulary.id(c.encode_utf8(&mut [0; 4])).is_some()),
            bytes: (0..=255).map(|byte| (alphabet[usize::from(byte)], byte)).collect(),
        })
    }

    /// Appends the tokens of a text.
    pub(super) fn encode(&self, text: &str, vocabulary: &Vocabulary, tokens: &mut Vec<u32>) -> Result<()> {
        check_white_space(text)?;
        let mut words = vec![text];
        for expression in &self.expressions {
            words = words.into_iter().flat_map(|word| cut(expression, word)).collect();
        }
        for word in words {
            self.encode_word(word, vocabulary, tokens)?;
        }
        Ok(())
    }

    fn encode_word(&self, word: &str, vocabulary: &Vocabulary, tokens: &mut Vec<u32>) -> Result<()> {
        let spell =
            |bytes: &[u8]| -> String { bytes.iter().map(|&b| self.alphabet[usize::from(b)]).collect() };
        if self.ignore_merges
            && let Some(token) = vocabulary.id(spell(word.as_bytes()))
        {
            tokens.push(token);
            return Ok(());
        }
        // llama.cpp drops a byte that no token stands for, and merges nothing across it.
        for part in word.as_bytes().split(|&byte| !self.has_token[usize::from(byte)]) {
            let merged = self.model.tokenize(&spell(part)).map_err(|error| Error::new(word, error))?;
            tokens.extend(merged.into_iter().map(|token| token.id));
        }
        Ok(())
    }

    /// What a token's text stands for; characters outside the alphabet stand for themselves.
    pub(super) fn decode(&self, text: &str) -> Vec<u8> {
        let mut decoded = Vec::with_capacity(text.len());
        for c in text.chars() {
            match self.bytes.get(&c) {
                Some(&byte) => decoded.push(byte),
                None => decoded.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        decoded
    }
}

/// The merges as pairs of tokens. Every pair and what it gives have to be tokens.
fn read_merges(gguf: &Gguf, vocabulary: &Vocabulary) -> Result<Merges> {
    let lines = gguf.require_strings("tokenizer.ggml.merges")?;
    let mut merged = String::new();
    let mut pairs = Vec::with_capacity(lines.len());
    for (rank, line) in lines.iter().enumerate() {
        // A token is never empty but may begin with a space.
        let gap = line.bytes().skip(1).position(|byte| byte == b' ').map(|before| before + 1);
        let (left, right) = gap.map_or((line.as_str(), ""), |gap| (&line[..gap], &line[gap + 1..]));
        merged.clear();
        merged.extend([left, right]);
        if let Some(unknown) = [left, right, &merged].into_iter().find(|&text| vocabulary.id(text).is_none())
        {
            return Err(Error::file(gguf.path(), format!("merge {rank} names a token that does not exist"))
                .expected("two tokens with a space between them, which together are a token")
                .found(format!("{line:?}, and no token {unknown:?}"))
                .hint("convert the model anew with llama.cpp's convert_hf_to_gguf.py"));
        }
        pairs.push((left.to_string(), right.to_string()));
    }
    Ok(pairs)
}

/// The regular expressions step back once per character in a run of white space, and give up in silence
/// after a million steps (`backtrack_limit` of fancy-regex): such a text is refused instead.
fn check_white_space(text: &str) -> Result<()> {
    let longest = text.split(|c: char| !c.is_whitespace()).map(|run| run.chars().count()).max();
    if longest.is_some_and(|run| run > WHITE_SPACE_MAX) {
        return Err(Error::new("prompt", "has a run of white space that is too long to be cut into words")
            .expected(format!("at most {WHITE_SPACE_MAX} characters of it in a row"))
            .found(longest.unwrap_or_default()));
    }
    Ok(())
}

/// The matches of an expression and what lies between them, in order.
fn cut<'t>(expression: &SysRegex, text: &'t str) -> Vec<&'t str> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for (start, end) in expression.find_iter(text) {
        pieces.extend([&text[done..start], &text[start..end]]);
        done = end;
    }
    pieces.push(&text[done..]);
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

/// GPT-2's printable character for every byte: Latin-1 stands for itself where it is visible, the other
/// bytes are counted up from U+0100.
fn alphabet() -> [char; 256] {
    let mut hidden = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        visible @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(visible),
        _ => hidden.next().unwrap_or_default(),
    })
}
