//! Every fuzz target (`fuzz/targets.rs`) on a corpus and on mutations of it, for some seconds each: the smoke run that
//! needs no nightly compiler. `PARITY_FUZZ_SECONDS` makes it longer, `PARITY_FUZZ_SEED` another one; `scripts/fuzz.sh`
//! goes on from the same corpus, which is kept in `target/fuzz/corpus`. An input that makes a parser panic is kept in
//! `target/fuzz/`.

#[path = "../../fuzz/targets.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parity::gguf::{Array, DType, Value};
use parity::random::{GAMMA, mixed};

use crate::support::gguf_writer::GgufWriter;
use crate::support::samples::is_all;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mixed(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at which sizes, counts and offsets overflow.
const EDGES: [u64; 12] =
    [0, 1, 2, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 40, u64::MAX / 2, u64::MAX];
/// Words that mean something in one of the formats.
const WORDS: [&str; 28] = [
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\\u0000",
    "null",
    "-1",
    "1e999",
    "nan",
    "inf",
    "..",
    "/",
    "\n",
    "\t",
    "=",
    "18446744073709551616",
    "blk.0.",
    "f32",
    "q4_K",
    "@",
    "*",
    "\u{1b}[2J",
    "[[case]]",
    "0.0",
    "\u{fffd}",
];

/// One to four small changes.
fn mutate(input: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let len = random.below(16).min(bytes.len() - at);
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 => drop(bytes.drain(at..at + len)),
            2 => bytes.truncate(at),
            3 => {
                let word = WORDS[random.below(WORDS.len())].as_bytes();
                bytes.splice(at..at, word.iter().copied());
            }
            4 => {
                let copied = bytes[at..at + len].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copied);
            }
            5 => {
                let from = random.below(other.len() + 1);
                let taken = &other[from..(from + random.below(64)).min(other.len())];
                bytes.splice(at..at + len, taken.iter().copied());
            }
            6 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                let size = [1, 2, 4, 8][random.below(4)];
                for (to, byte) in bytes.iter_mut().skip(at).zip(&edge[..size]) {
                    *to = *byte;
                }
            }
            _ => bytes.insert(at, random.next() as u8),
        }
    }
    bytes
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files of a folder, the smaller ones first.
fn files(folder: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(root().join(folder)).unwrap().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    paths.sort();
    let mut all: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    all.sort_by_key(Vec::len);
    all.truncate(8);
    all
}

/// Vocabularies of both kinds, as small as they can be.
fn vocabularies() -> Vec<Vec<u8>> {
    let strings = |words: &[&str]| Value::Array(Array::String(words.iter().map(|w| w.to_string()).collect()));
    let words = ["t", "1", "t1", "\u{120}", "2", "<s>", "\u{2581}", "<0x0A>"];
    let model = |kind: &str| {
        GgufWriter::new()
            .with("general.architecture", Value::String("qwen2".into()))
            .with("tokenizer.ggml.model", Value::String(kind.into()))
            .with("tokenizer.ggml.tokens", strings(&words))
            .with("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1, 1, 1, 1, 1, 3, 1, 6])))
            .with("tokenizer.ggml.bos_token_id", Value::U32(5))
            .with("tokenizer.ggml.add_bos_token", Value::Bool(true))
    };
    let bpe = model("gpt2").with("tokenizer.ggml.pre", Value::String("qwen2".into()));
    let bpe = bpe.with("tokenizer.ggml.merges", strings(&["t 1"]));
    let scores = (0..words.len()).map(|i| -(i as f32)).collect();
    let spm = model("llama").with("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    vec![bpe.bytes(), spm.bytes()]
}

/// A file of torch's as it is, its pickle alone, and an array of numpy's: each behind the form that it is tried in.
fn foreign() -> Vec<Vec<u8>> {
    let file = fs::read(root().join("tests/data/foreign/typed.pt")).unwrap();
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(&file)).unwrap();
    let name = archive.file_names().flatten().find(|name| name.ends_with("data.pkl")).unwrap().into_owned();
    let mut pickle = vec![1];
    std::io::copy(&mut archive.by_name(&name).unwrap(), &mut pickle).unwrap();
    let header = "{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }\n";
    let mut array = b"\x02\x93NUMPY\x01\0".to_vec();
    array.extend((header.len() as u16).to_le_bytes());
    array.extend(header.as_bytes());
    array.extend([1; 24]);
    vec![[vec![0], file].concat(), pickle, array]
}

fn logprobs() -> Vec<Vec<u8>> {
    let mut file = b"_logits_".to_vec();
    for number in [6, 6, 1, 0, 1, 2, 3, 4, 5i32] {
        file.extend(number.to_le_bytes());
    }
    for _row in 0..2 {
        [1e-3f32, -9.0].iter().for_each(|number| file.extend(number.to_le_bytes()));
        (0..6u16).for_each(|step| file.extend((step * 999).to_le_bytes()));
    }
    let text = |text: &str| text.as_bytes().to_vec();
    let said = r#"{"id":3,"token":"a","bytes":[97],"logprob":-0.5,"top_logprobs":[{"id":4,"logprob":-1.25},{"token":"token_id:2","logprob":-3}]}"#;
    vec![
        file,
        text(&format!(r#"{{"choices":[{{"logprobs":{{"content":[{said},{said}]}}}}]}}"#)),
        text(&format!(r#"{{"completion_probabilities":[{said}]}}"#)),
        text(
            r#"{"choices":[{"prompt_logprobs":[null,{"1":{"logprob":-0.5}}],"token_ids":[5],"logprobs":{"tokens":["b"],"token_logprobs":[-1],"top_logprobs":[{"token_id:3":-2.5}]}}],"prompt_token_ids":[0,1]}"#,
        ),
    ]
}

fn safetensors() -> Vec<Vec<u8>> {
    let file = |header: &str, n: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend((0..n).map(|i| (i % 3) as u8));
        bytes
    };
    vec![
        file(
            r#"{"tokens":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"embed":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},"blk.0.attn_probs":{"dtype":"F16","shape":[1,2,2],"data_offsets":[32,40]}}"#,
            40,
        ),
        file(
            r#"{"__metadata__":{"producer":"x"},"tokens":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"blk.3.ffn_moe_out":{"dtype":"BF16","shape":[1,4],"data_offsets":[8,16]}}"#,
            16,
        ),
    ]
}

fn report() -> Vec<u8> {
    let run =
        ["run", "--device", "cpu", "-p", "def read_lines(path):", "--layer", "0", "--checkpoint", "blk.0.q*"];
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(root()).args(run).args(["--inject", "rope.base=10000@0", "--format", "json"]);
    command.env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent").output().unwrap().stdout
}

/// What a target begins with: files as they should be.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let text = |text: &str| text.as_bytes().to_vec();
    match target {
        "gguf" => {
            let mut all = vocabularies();
            let mut small = GgufWriter::new().with("general.alignment", Value::U32(32));
            small.tensors.push(("a.weight".into(), DType::F32, vec![2, 2], vec![0; 16]));
            all.push(small.bytes());
            all.push(fs::read(root().join("tests/data/dequant-blocks.gguf")).unwrap());
            all
        }
        "blocks" => (0..=64u8).map(|kind| std::iter::once(kind).chain((0..=255).cycle().take(700)).collect()).collect(),
        "tokenizer" => vocabularies(),
        "manifest" => vec![
            text(r#"{"schema":"parity-dump/1","producer":{"name":"x"},"model":{},"tokens":[1,2],"steps":[{"file":"step-0000.safetensors","positions":[0,1]}],"complete":true}"#),
            text(r#"{"schema":"parity-dump/1","producer":{"name":"x","version":null},"model":{"file":"m"},"tokens":[1,2,3],"prompt":"p","steps":[{"file":"step-0000.safetensors","positions":[1,2]}],"rows":{"embed":[2]},"graphs":[{"file":"manifest.json","steps":[0]}],"complete":false}"#),
        ],
        "safetensors" => safetensors(),
        "graph" => files("crates/parity-graph/tests/graphs").into_iter().chain(files("tests/data/graphs")).collect(),
        "printed" => vec![
            fs::read(root().join("tests/data/eval-callback.txt")).unwrap()[..6000].to_vec(),
            // A view of other rows than what it views: once a panic.
            fs::read(root().join("tests/data/fuzz/printed-rows-of-two-widths.txt")).unwrap(),
        ],
        "maps" => vec![text("\"h\" = \"embed\"\n"), text("prefix = [\"m.\"]\n\"h\" = { id = \"blk.0.ffn_out\", layout = \"TD\", columns = \"0..W/2\", rows = [0], scale = 2.0 }\n\"x.{n}\" = [{ id = \"blk.{n}.q\", transpose = [1, 0], shards = \"sum\" }]\n")],
        "foreign" => foreign(),
        "logprobs" => logprobs(),
        "suites" => files("suites").into_iter().filter(|bytes| bytes.starts_with(b"#") || bytes.starts_with(b"name")).chain([text(
            "name = \"x\"\n[prompts]\np = \"a\"\nt = { tokens = [1, 2] }\n[models]\nm = \"m.gguf\"\n[[case]]\nname = \"a\"\nmodel = [\"m\"]\nprompt = [\"p\", \"t\"]\nchunk = [1, 2]\nretries = 1\nwaive = [{ checkpoint = \"*\", reason = \"r\", until = \"2027-01-01\" }]\ntolerance = [{ checkpoint = \"*\", atol = 1.0 }]\n",
        )]).collect(),
        "tolerances" => vec![text("[[tolerance]]\ncheckpoint = \"blk.*.q_rope\"\nrtol = 1e-3\natol = 0.5\nnmse = 1\n")],
        "reports" => vec![report()],
        "rpc" => [3, 6, 8].map(rpc).to_vec(),
        "imports" => files("crates/parity-imports/tests/data"),
        "words" => vec![text("blk.0.q_rope embed rope.base=10000@0..3 data.zero@blk.3.v 0..3 5.. f32 llama-cpu cuda:1 all 4 f16,kv=f16 blk.3.rms_norm#2")],
        other => panic!("no corpus for {other}"),
    }
}

/// A graph of two tensors on the wire, behind the major version of its protocol: a norm of two rows.
fn rpc(major: u8) -> Vec<u8> {
    let tensor = |id: u8, op: u8, src: u8| {
        let mut bytes = [0; 296];
        bytes[0] = id;
        [
            (20, 4),
            (24, 2),
            (28, 1),
            (32, 1),
            (36, 4),
            (40, 16),
            (44, 32),
            (48, 32),
            (52, op),
            (120, 16),
            (124, src),
        ]
        .into_iter()
        .for_each(|(at, byte)| bytes[at] = byte);
        bytes
    };
    let uid: &[u8] = if major >= 8 { &[9, 0, 0, 0, 0, 0, 0, 0] } else { &[] };
    let head = [&[major, 0, 0, 0, 0][..], uid, &[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]].concat();
    [head, tensor(1, 0, 0).to_vec(), tensor(2, 25, 1).to_vec()].concat()
}

/// Keeps the corpus of a target where `scripts/fuzz.sh` begins.
fn keep(target: &str) {
    let folder = root().join("target/fuzz/corpus").join(target);
    fs::create_dir_all(&folder).unwrap();
    for (index, input) in corpus(target).iter().enumerate() {
        fs::write(folder.join(format!("seed-{index}")), input).unwrap();
    }
}

/// The corpus and its mutations for `time`; what makes the target panic, and the message.
fn run((name, target): targets::Target, time: Duration, seed: u64) -> (usize, Option<Vec<u8>>) {
    let corpus = corpus(name);
    let mut random = Random(seed ^ name.bytes().fold(0, |hash, byte| hash * 31 + u64::from(byte)));
    let started = Instant::now();
    let mut runs = 0;
    let mut pool = corpus.clone();
    while runs <= corpus.len() || started.elapsed() < time {
        let input = match corpus.get(runs) {
            Some(whole) => whole.clone(),
            None => mutate(&pool[random.below(pool.len())], &corpus[random.below(corpus.len())], &mut random),
        };
        runs += 1;
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            return (runs, Some(input));
        }
        // Changes add up, on inputs that stay small.
        if runs % 16 == 0 && input.len() < 4096 {
            let place = random.below(pool.len() + 1);
            if place >= corpus.len() && place < pool.len() {
                pool[place] = input;
            } else if pool.len() < corpus.len() + 64 {
                pool.push(input);
            }
        }
    }
    (runs, None)
}

#[test]
fn no_parser_panics() {
    let number = |variable: &str, otherwise: u64| -> u64 {
        std::env::var(variable).ok().map_or(otherwise, |text| text.parse().unwrap())
    };
    let otherwise = if is_all() { 2000 } else { 300 };
    let time = std::env::var("PARITY_FUZZ_SECONDS")
        .map_or(Duration::from_millis(otherwise), |text| Duration::from_secs(text.parse().unwrap()));
    let (seed, only) = (number("PARITY_FUZZ_SEED", 1), std::env::var("PARITY_FUZZ_TARGET").ok());
    let chosen =
        targets::TARGETS.into_iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name));
    let mut found = Vec::new();
    for target in chosen {
        keep(target.0);
        let (runs, input) = run(target, time, seed);
        println!("{:12} {runs} inputs", target.0);
        assert!(runs > corpus(target.0).len(), "{}: nothing but the corpus was tried", target.0);
        if let Some(input) = input {
            let kept = root().join("target/fuzz");
            fs::create_dir_all(&kept).unwrap();
            let path = kept.join(target.0);
            fs::write(&path, input).unwrap();
            found.push(path);
        }
    }
    targets::clean_up();
    assert!(found.is_empty(), "{found:?}");
}
