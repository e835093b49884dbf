//! Models of llama.cpp's own architecture test and the graphs that llama.cpp 0.5.0 computed them with.

pub mod foreign;
pub mod record;

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use parity::gguf::Gguf;
use parity_graph::{Graph, text};

/// Every architecture with a builder; one of them with and without experts.
pub const MODELS: [&str; 7] =
    ["qwen2-dense", "llama-dense", "llama-moe", "qwen3-dense", "qwen3moe-moe", "gemma3-dense", "gpt-oss-moe"];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/graphs").join(name)
}

/// A recorded graph: `""` is a prefill of 12 tokens with flash attention and an f16 cache, `"-plain-decode"` a step of
/// one token without, with an f32 cache.
pub fn recorded(model: &str, kind: &str) -> Graph {
    let text = fs::read_to_string(data(&format!("{model}{kind}.txt"))).unwrap();
    text::read(&text).unwrap().remove(0)
}

/// The header of a model file.
pub fn head(model: &str) -> Vec<u8> {
    fs::read(data(&format!("{model}.gguf.head"))).unwrap()
}

/// Bytes behind a header: more than the data of any of these models.
const DATA_MAX: u64 = 1 << 26;

/// A model file whose data are holes: zeros.
pub fn hollow(head: &[u8]) -> Gguf {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.as_file().write_all_at_start(head);
    file.as_file().set_len(head.len() as u64 + DATA_MAX).unwrap();
    Gguf::open(file.path()).unwrap()
}

/// A model file with seeded random weights of a standard deviation of about 0.1, norms about 1.
pub fn filled(model: &str) -> Gguf {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    fill(&head(model), file.path());
    Gguf::open(file.path()).unwrap()
}

/// Writes a model file with the weights of [`filled`] behind a header.
pub fn fill(head: &[u8], path: &Path) {
    fill_with(head, path, |x| x);
}

/// As [`fill`], every weight rounded.
pub fn fill_with(head: &[u8], path: &Path, round: fn(f32) -> f32) {
    let layout = hollow(head);
    let mut out = File::create(path).unwrap();
    out.write_all_at_start(head);
    out.set_len(head.len() as u64 + DATA_MAX).unwrap();
    for info in layout.tensors() {
        out.seek(SeekFrom::Start(info.offset as u64)).unwrap();
        out.write_all(&rounded(&info.name, info.elements(), round)).unwrap();
    }
}

/// Values of a tensor in F32, by its name.
pub fn values(name: &str, count: usize) -> Vec<u8> {
    rounded(name, count, |x| x)
}

fn rounded(name: &str, count: usize, round: fn(f32) -> f32) -> Vec<u8> {
    let mut state = name.bytes().fold(0x9E37_79B9_7F4A_7C15_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    let middle = if name.contains("norm") || name.ends_with("scale") { 1.0 } else { 0.0 };
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = (state >> 40) as f32 / (1u64 << 24) as f32;
        round(middle + (uniform - 0.5) * 0.35).to_le_bytes()
    };
    (0..count).flat_map(next).collect()
}

trait WriteAtStart {
    fn write_all_at_start(&self, bytes: &[u8]);
}

impl WriteAtStart for File {
    fn write_all_at_start(&self, bytes: &[u8]) {
        let mut file = self;
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(bytes).unwrap();
    }
}

/// A header with the f32 behind a metadata key changed.
pub fn with_f32(mut head: Vec<u8>, key: &str, value: f32) -> Vec<u8> {
    let at = value_of(&head, key);
    head[at..at + 4].copy_from_slice(&value.to_le_bytes());
    head
}

/// A header with the u32 behind a metadata key changed.
pub fn with_u32(mut head: Vec<u8>, key: &str, value: u32) -> Vec<u8> {
    let at = value_of(&head, key);
    head[at..at + 4].copy_from_slice(&value.to_le_bytes());
    head
}

/// Where the value of a metadata key stands: behind the key's length, its text and the type of the value.
fn value_of(head: &[u8], key: &str) -> usize {
    let mut entry = (key.len() as u64).to_le_bytes().to_vec();
    entry.extend(key.bytes());
    let at = head.windows(entry.len()).position(|window| window == entry).expect(key);
    at + entry.len() + 4
}

/// A header in which a name of the same length stands for another, everywhere.
pub fn renamed(mut head: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let places: Vec<usize> =
        (0..head.len() - from.len()).filter(|&at| &head[at..at + from.len()] == from.as_bytes()).collect();
    assert!(!places.is_empty(), "{from}");
    for at in places {
        head[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    head
}
