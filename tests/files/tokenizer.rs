//! Tokens against llama.cpp's: a recorded list for the tiny model, and more texts and models against a
//! `llama-tokenize` binary where one is given (`scripts/check-tokenizer.sh`).

mod vocabulary;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use parity::gguf::{Gguf, Value};
use parity::tokenizer::Tokenizer;
use vocabulary::{Vocabulary, bpe, spm};

/// Texts with the tokens that `llama-tokenize --stdin --ids --no-escape` 0.5.0 gives for the tiny model.
fn recorded() -> Vec<(String, Vec<u32>)> {
    serde_json::from_str(include_str!("tokenizer/qwen2-tiny-py.json")).unwrap()
}

fn open(model: &Path) -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::open(model).unwrap()).unwrap()
}

#[test]
fn the_tiny_model_gives_the_recorded_tokens() {
    let tokenizer = open(Path::new("reference-dumps/models/qwen2-tiny-py-F16.gguf"));
    for (text, tokens) in recorded() {
        assert_eq!(tokenizer.encode(&text).unwrap(), tokens, "{text:?}");
        assert_eq!(tokenizer.decode(&tokens), text);
    }
    assert_eq!(tokenizer.n_tokens(), 4096);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.eot()), (Some(3997), Some(3997), Some(3999)));
    assert!([3997, 3999].iter().all(|&token| tokenizer.is_end_of_generation(token)));
    assert!(!tokenizer.is_end_of_generation(3998), "<|im_start|>");
    assert_eq!((0..4096).filter(|&token| tokenizer.is_unused(token)).count(), 96);
}

#[test]
fn special_tokens_are_found_longest_first() {
    let tokenizer = bpe(&["<a", "a>b", "<a>b", "x"], &[(0, 3), (1, 4), (2, 3)]).tokenizer().unwrap();
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3]), "<aa>b<a>bx");
    assert_eq!(tokenizer.encode("x<a>bx<ax").unwrap(), [3, 2, 3, 0, 3]);
    assert_eq!(tokenizer.encode("<a>").unwrap(), [0], "the vocabulary has no token for `>`");
}

#[test]
fn nothing_merges_across_a_byte_without_a_token() {
    let tokenizer = bpe(&["a", "b", "ab"], &[]).with_strings("merges", &["a b"]).tokenizer().unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [2]);
    assert_eq!(tokenizer.encode("a\u{1}b").unwrap(), [0, 1]);
}

#[test]
fn bytes_that_are_not_utf8_become_replacement_characters() {
    let tokenizer = bpe(&["a", "ï", "¿", "½"], &[]).tokenizer().unwrap();
    assert_eq!(tokenizer.encode(b"a\xffa\xe4\xb8a").unwrap(), [0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 0]);
    assert_eq!(tokenizer.encode(b"\xc1\xa1").unwrap(), [0], "an overlong `a`");
    assert_eq!(tokenizer.decode(&[1, 2]), "\u{fffd}");
    assert_eq!(tokenizer.piece(1).unwrap(), r"\xef");
}

#[test]
fn sentence_pieces_merge_by_score_and_fall_back_to_bytes() {
    let mut tokens = vec!["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "<0xC3>", "<0xA9>"];
    let kinds = [(0, 2), (1, 3), (2, 3), (8, 6), (9, 6)];
    let mut scores = [0.0, 0.0, 0.0, -3.0, -3.0, -3.0, -2.0, -1.0, 0.0, 0.0];
    let tokenizer = spm(&tokens, &kinds, &scores).tokenizer().unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [1, 3, 7]);
    assert_eq!(tokenizer.encode("a é").unwrap(), [1, 6, 3, 8, 9]);
    assert_eq!(tokenizer.encode_without_bos("a<s>a").unwrap(), [6, 1, 6], "a space after a special token");
    assert_eq!(tokenizer.decode(&[6, 3, 8, 9]), "a é");
    assert_eq!(tokenizer.encode(b"\xc3").unwrap(), [1, 3, 8], "bytes that are not UTF-8 stay bytes");
    let error = tokenizer.encode("\u{e9}\u{e8}").unwrap_err().to_string();
    assert!(error.contains("0xA8"), "{error}");

    scores[6] = -0.5; // now "▁a" is merged before "ab"
    assert_eq!(spm(&tokens, &kinds, &scores).tokenizer().unwrap().encode("ab").unwrap(), [1, 6, 5]);
    tokens[7] = "ba";
    let no_prefix = spm(&tokens, &kinds, &scores)
        .with("add_space_prefix", Value::Bool(false))
        .with("add_eos_token", Value::Bool(true));
    assert_eq!(no_prefix.tokenizer().unwrap().encode("ba").unwrap(), [1, 7, 2]);
}

#[test]
fn white_space_after_a_token_is_stripped_for_phi3() {
    let phi3 = |name: &str| {
        let file = spm(&["<unk>", "<s>", "</s>", "<|user|>", "▁", "<0x0A>"], &[(3, 4), (5, 6)], &[0.0; 6]);
        file.named(name).tokenizer().unwrap().encode_without_bos("<|user|> \n ").unwrap()
    };
    assert_eq!(phi3("Phi-3-mini"), [3]);
    assert_eq!(phi3("Other"), [3, 4, 4, 5, 4]);
}

#[test]
fn pieces_show_what_cannot_be_seen() {
    let tokenizer = bpe(&["Ċ", "Ġthe", "<|x|>", "pad"], &[(2, 3), (3, 5)]).tokenizer().unwrap();
    let pieces: Vec<_> = (0..4).map(|token| tokenizer.piece(token).unwrap()).collect();
    assert_eq!(pieces, [r"\n", " the", "<|x|>", ""]);
    assert_eq!(tokenizer.piece(4), None);
    assert_eq!(tokenizer.decode(&[4]), "\u{fffd}");
}

#[test]
fn a_damaged_vocabulary_is_an_error_that_names_the_file() {
    let good = || bpe(&["a", "b", "ab"], &[]);
    let sentences = || spm(&["<unk>", "<s>", "</s>"], &[], &[0.0; 3]);
    let cases: Vec<(Vocabulary, &str)> = vec![
        (good().without("model"), "tokenizer.ggml.model"),
        (good().with_str("model", "bert"), "\"bert\""),
        (good().without("pre"), "\"default\""),
        (good().with_str("pre", "tekken"), "\"tekken\""),
        (good().without("tokens"), "tokenizer.ggml.tokens"),
        (good().with_ints("tokens", &[1, 2, 3]), "tokenizer.ggml.tokens"),
        (good().with_strings("tokens", &["a", "b", "a"]), "tokens 0 and 2 are both \"a\""),
        (good().with_ints("token_type", &[1, 1]), "tokenizer.ggml.token_type"),
        (good().without("merges"), "tokenizer.ggml.merges"),
        (good().with_strings("merges", &["a b", "a c"]), "merge 1"),
        (good().with_strings("merges", &["b a"]), "no token \"ba\""),
        (good().with_strings("merges", &["ab"]), "merge 0"),
        (good().with_strings("merges", &[""]), "merge 0"),
        (good().with_strings("merges", &["é"]), "merge 0"),
        (good().with("bos_token_id", Value::U32(3)), "tokenizer.ggml.bos_token_id"),
        (good().with("eot_token_id", Value::U32(u32::MAX)), "tokenizer.ggml.eot_token_id"),
        (good().with("add_bos_token", Value::Bool(true)), "tokenizer.ggml.bos_token_id"),
        (good().with("add_eos_token", Value::Bool(true)), "tokenizer.ggml.eos_token_id"),
        (good().with_str("pre", "llama-bpe"), "tokenizer.ggml.bos_token_id"),
        (sentences().without("scores"), "tokenizer.ggml.scores"),
        (spm(&["<unk>", "<s>", "</s>"], &[], &[0.0; 2]), "tokenizer.ggml.scores"),
    ];
    for (file, says) in cases {
        let (path, result) = file.open();
        let Err(error) = result else { panic!("no error that says {says}") };
        assert_eq!(error.subject(), path.display().to_string());
        assert!(error.to_string().contains(says), "{error}\n  does not say {says}");
    }
    good().tokenizer().unwrap();
    sentences().tokenizer().unwrap();
}

#[test]
fn a_run_of_white_space_that_cannot_be_cut_is_refused() {
    let tokenizer = bpe(&["Ġ"], &[]).tokenizer().unwrap();
    assert_eq!(tokenizer.encode(" ".repeat(500_000)).unwrap().len(), 500_000);
    assert!(tokenizer.encode(" ".repeat(500_001)).unwrap_err().to_string().contains("500001"));
}

/// Tokens of a text by `llama-tokenize`.
fn llama_tokenize(binary: &str, model: &Path, text: &[u8]) -> Vec<u32> {
    let mut child = Command::new(binary)
        .args(["--stdin", "--ids", "--no-escape", "-m"])
        .arg(model)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(text).unwrap());
        serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap()
    })
}

/// The recorded texts, source code, every assigned character in four neighbourhoods, and bytes that are
/// not UTF-8.
fn texts() -> Vec<Vec<u8>> {
    let mut texts: Vec<Vec<u8>> = recorded().into_iter().map(|(text, _)| text.into_bytes()).collect();
    texts.push(include_bytes!("tokenizer.rs").to_vec());
    let characters = (1..0x3_2400).chain(0xE_0000..0xE_0200).chain([0x10_FFFF]).filter_map(char::from_u32);
    let neighbourhoods = |c| ['a', c, '1', c, ' ', c, '!', c, '\n'];
    texts.push(characters.flat_map(neighbourhoods).collect::<String>().into_bytes());
    // Without what llama.cpp takes for surrogates or for more than U+10FFFF: it ends there.
    texts.push((0..=255).chain((0..=0xF3).rev()).collect());
    texts
}

/// Where two lists of tokens part, with what stands there.
fn difference(text: &[u8], ours: &[u32], theirs: &[u32], tokenizer: &Tokenizer) -> Option<String> {
    if ours == theirs {
        return None;
    }
    let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let near = |tokens: &[u32]| {
        let near = tokens.iter().skip(at.saturating_sub(3)).take(8);
        near.map(|&token| format!("{token}:{}", tokenizer.piece(token).unwrap_or_default()))
            .collect::<Vec<_>>()
    };
    let text: String = String::from_utf8_lossy(text).chars().take(60).collect();
    Some(format!("{text:?} at token {at}\n  ours   {:?}\n  theirs {:?}", near(ours), near(theirs)))
}

#[test]
#[ignore = "needs llama-tokenize and models: scripts/check-tokenizer.sh"]
fn equals_llama_tokenize() {
    let binary = std::env::var("PARITY_LLAMA_TOKENIZE").expect("the path of llama-tokenize");
    let models = std::env::var("PARITY_TOKENIZER_MODELS").expect("one model per line");
    let mut differences = 0;
    for model in models.lines().map(Path::new) {
        let start = Instant::now();
        let tokenizer = open(model);
        let opened = start.elapsed();
        let (mut n_texts, mut n_tokens, mut encoding) = (0, 0, Duration::ZERO);
        for text in texts() {
            let start = Instant::now();
            let ours = tokenizer.encode(&text).unwrap();
            encoding += start.elapsed();
            (n_texts, n_tokens) = (n_texts + 1, n_tokens + ours.len());
            let theirs = llama_tokenize(&binary, model, &text);
            if let Some(difference) = difference(&text, &ours, &theirs, &tokenizer) {
                differences += 1;
                println!("{}: {difference}", model.display());
            }
        }
        println!(
            "{}: {n_texts} texts, {n_tokens} tokens, opened in {opened:.0?}, encoded in {encoding:.0?}",
            model.display()
        );
    }
    assert_eq!(differences, 0);
}

/// llama.cpp's own vectors: `NAME.gguf.inp` and `NAME.gguf.out` beside `NAME.gguf`.
#[test]
#[ignore = "needs llama.cpp's models/ggml-vocab-*.gguf: scripts/check-tokenizer.sh"]
fn equals_llama_cpp_vectors() {
    let models = std::env::var("PARITY_TOKENIZER_MODELS").expect("one model per line");
    let mut compared = 0;
    for model in models.lines() {
        let (Ok(texts), Ok(tokens)) = (
            std::fs::read_to_string(format!("{model}.inp")),
            std::fs::read_to_string(format!("{model}.out")),
        ) else {
            continue;
        };
        let tokenizer = open(Path::new(model));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        let lines: Vec<&str> = tokens.split('\n').collect();
        assert_eq!(texts.len(), lines.len(), "{model}");
        for (text, line) in texts.iter().zip(&lines) {
            let tokens: Vec<u32> = line.split_whitespace().map(|token| token.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode_without_bos(text).unwrap(), tokens, "{model}: {text:?}");
        }
        println!("{model}: {} texts", texts.len());
        compared += 1;
    }
    assert!(compared > 0, "no model has vectors beside it");
}
