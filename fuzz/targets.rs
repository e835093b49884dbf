//! What each parser must do with arbitrary bytes: an error, or something that is as it says. Never a panic.
//!
//! `fuzz_targets/` hand these functions to cargo-fuzz; `tests/files/fuzz.rs` runs them over a corpus and mutations of it.

use std::fs;
use std::path::{Path, PathBuf};

use parity::checkpoint::Checkpoint;
use parity::compare::Tolerances;
use parity::engine::fused::Model;
use parity::gate::suite::Suite;
use parity::gguf::{DType, Gguf, decode, parse};
use parity::numerics::Numerics;
use parity::record::import::{Printed, seen, text};
use parity::record::rpc::wire::{Version, WireGraph, shape};
use parity::select::Layers;
use parity::tokenizer::Tokenizer;
use parity_dump::Dump;
use parity_graph::fault::Wanted;
use parity_imports::{Machine, imports as imports_of};

/// A parser by name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 16] = [
    ("gguf", gguf),
    ("blocks", blocks),
    ("tokenizer", tokenizer),
    ("manifest", manifest),
    ("safetensors", safetensors),
    ("graph", graph),
    ("printed", printed),
    ("maps", maps),
    ("foreign", foreign),
    ("logprobs", logprobs),
    ("suites", suites),
    ("tolerances", tolerances),
    ("reports", reports),
    ("rpc", rpc),
    ("imports", imports),
    ("words", words),
];

/// Decoding is linear and tested elsewhere: only small tensors, so that the parsers get the time.
const MOST_VALUES: usize = 1 << 16;

/// A file of this process, with these bytes; in memory where there is such a folder.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    fs::write(&path, bytes).expect("the folder for trials can be written to");
    path
}

fn folder() -> PathBuf {
    let shared = Path::new("/dev/shm");
    let root = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "-");
    let dir = root.join(format!("parity-fuzz-{}-{thread}", std::process::id()));
    fs::create_dir_all(&dir).expect("a folder for trials");
    dir
}

/// Removes what the trials of this thread wrote.
pub fn clean_up() {
    let _ = fs::remove_dir_all(folder());
}

/// The GGUF parser: every tensor of its table lies within the file and can be decoded; a model of it can be built
/// or is refused.
pub fn gguf(bytes: &[u8]) {
    if let Ok(parsed) = parse("fuzz", bytes) {
        for info in &parsed.tensors {
            let data = &bytes[info.offset..info.offset + info.byte_len];
            assert_eq!(info.rows() * info.cols(), info.elements());
            if info.dtype.is_decodable() && info.elements() <= MOST_VALUES {
                decode(info.dtype, data, &mut vec![0f32; info.elements()]);
                decode(info.dtype, data, &mut vec![0f64; info.elements()]);
            }
        }
        let _ = Model::open(&file("model.gguf", bytes));
    }
}

/// The decoders of all block types: as many values as the blocks hold, and what is finite in f64 is in f32 too,
/// unless it is too large.
pub fn blocks(bytes: &[u8]) {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    let types: Vec<DType> = (0..=255).filter_map(DType::from_number).filter(|t| t.is_decodable()).collect();
    let dtype = types[usize::from(choice) % types.len()];
    let blocks = bytes.len() / dtype.block_bytes();
    let n = blocks * dtype.block_len();
    let data = &bytes[..blocks * dtype.block_bytes()];
    let (mut narrow, mut wide) = (vec![0f32; n], vec![0f64; n]);
    decode(dtype, data, &mut narrow);
    decode(dtype, data, &mut wide);
    for (a, b) in narrow.iter().zip(&wide) {
        let large = b.abs() > f64::from(f32::MAX);
        assert!(large || a.is_finite() == b.is_finite(), "{dtype}: {a} and {b}");
    }
}

/// A vocabulary from metadata, and texts in its tokens: what is encoded has ids of the vocabulary.
pub fn tokenizer(bytes: &[u8]) {
    if parse("fuzz", bytes).is_err() {
        return;
    }
    let Ok(gguf) = Gguf::open(&file("tokenizer.gguf", bytes)) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) else { return };
    for text in ["", "t1 t2", "  a\n\tb\u{e9}\u{1f600}", "<|im_start|>"] {
        if let Ok(tokens) = tokenizer.encode(text) {
            assert!(tokens.len() <= 8 * (text.len() + 8), "{} tokens", tokens.len());
        }
    }
}

/// Reads every row of a dump.
fn read_all(dump: &Dump) {
    let mut row = Vec::new();
    for checkpoint in dump.checkpoints().collect::<Vec<Checkpoint>>() {
        let Some(recorded) = dump.get(checkpoint) else { continue };
        for index in 0..recorded.len().min(64) {
            dump.row(recorded, index, &mut row);
            assert_eq!(row.len(), recorded.width_of(index));
        }
        let positions: Vec<u32> = recorded.positions().collect();
        assert!(positions.is_sorted());
        let shape = recorded.row_shape();
        assert!(!shape.contains(&0), "{checkpoint}: {shape:?}");
    }
    for index in 0..dump.manifest().graphs.len().min(4) {
        let _ = dump.graph_text(index);
    }
}

/// Values of a step file that fits the manifest of the corpus.
fn step_file() -> Vec<u8> {
    let header = r#"{"embed":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 24]);
    bytes
}

/// The manifest of a dump with one step.
pub fn manifest(bytes: &[u8]) {
    let dir = folder().join("dump");
    fs::create_dir_all(&dir).expect("a folder for trials");
    fs::write(dir.join("step-0000.safetensors"), step_file()).expect("the folder can be written to");
    fs::write(dir.join("manifest.json"), bytes).expect("the folder can be written to");
    if let Ok(dump) = Dump::open(&dir) {
        read_all(&dump);
    }
}

/// A dump in one file.
pub fn safetensors(bytes: &[u8]) {
    if let Ok(dump) = Dump::open(&file("one.safetensors", bytes)) {
        read_all(&dump);
    }
}

/// The text of a recorded graph: what is read can be written, and read again as the same.
pub fn graph(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(graphs) = parity_graph::text::read(&text) else { return };
    for graph in graphs {
        let again = parity_graph::text::read(&parity_graph::text::write(&graph)).expect("what was written");
        assert_eq!(again.len(), 1);
        for id in 0..graph.tensors.len() {
            assert!(graph.sources(id).all(|source| source < graph.tensors.len()));
        }
    }
}

/// Rows are as many as the prompt has tokens, which a text cannot make up.
const MOST_TOKENS: usize = 64;

/// What another program printed: nodes whose values lie within them, and parts that lie within rows.
pub fn printed(bytes: &[u8]) {
    let printout = text::parse(&String::from_utf8_lossy(bytes));
    for node in &printout.nodes {
        assert!(node.values.iter().all(|(index, _)| *index < node.elements()));
    }
    for tokens in 1..MOST_TOKENS {
        let Some(Printed { parts, .. }) = seen(&printout, tokens) else { continue };
        for (checkpoint, part) in
            parts.iter().flat_map(|(id, parts)| parts.iter().map(move |part| (id, part)))
        {
            for row in &part.rows {
                let width = part.width(*checkpoint, row.position);
                assert!(
                    row.columns.iter().all(|&column| width.is_some_and(|width| (column as usize) < width))
                );
            }
        }
    }
}

/// A map of names for a dump in one file.
pub fn maps(bytes: &[u8]) {
    let header = r#"{"tokens":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"h":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]}}"#;
    let mut dump = (header.len() as u64).to_le_bytes().to_vec();
    dump.extend(header.as_bytes());
    dump.extend([0; 12]);
    let (dump, names) = (file("mapped.safetensors", &dump), file("names.toml", bytes));
    let options = parity::foreign::Options { names: Some(names), ..Default::default() };
    if let Ok(dump) = parity::foreign::open(&dump, &options) {
        read_all(&dump);
    }
}

/// Log-probabilities: what is read of them is compared with a recording, or refused.
pub fn logprobs(bytes: &[u8]) {
    let path = file("logprobs", bytes);
    let Ok(Some(said)) = parity::foreign::logprobs::read(&path) else { return };
    let reference = folder().join("reference");
    if !reference.exists() {
        let logits: Vec<f32> = (0..36).map(|i| (i % 7) as f32).collect();
        let mut writer = parity_dump::Writer::create(&reference, Default::default(), Default::default())
            .expect("a folder for trials");
        writer.begin_step(&[0, 1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 5], 1).expect("a step");
        writer.tensor_f32("logits".parse().expect("an id"), &[6, 6], &logits).expect("its tensor");
        writer.end_step().expect("its end");
        writer.finish().expect("a dump");
    }
    let reference = Dump::open(&reference).expect("what was just written");
    let how = parity::jobs::logprobs::Options { tokens: Some(vec![0, 1]), ..Default::default() };
    if let Ok(report) = parity::jobs::logprobs::judge(
        &said,
        Some(parity::jobs::logprobs::Beside::Recording(&reference)),
        &how,
    ) {
        assert!(report.coverage.elements_compared <= 36);
    }
}

/// Dumps of other engines: as a file; as the pickle of a file of torch's; as an array of numpy's. Every array that is
/// found lies within its data.
pub fn foreign(bytes: &[u8]) {
    use std::io::Write;
    let Some((&form, bytes)) = bytes.split_first() else { return };
    let wrapped = |entries: &[(&str, &[u8])]| {
        let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let stored =
            zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        for (name, bytes) in entries {
            zip.start_file(*name, stored).expect("an entry");
            zip.write_all(bytes).expect("memory");
        }
        zip.finish().expect("memory").into_inner()
    };
    let path = match form % 3 {
        0 => file("foreign.bin", bytes),
        1 => file("foreign.pt", &wrapped(&[("a/data.pkl", bytes), ("a/data/0", &[7; 256])])),
        _ => file("foreign.npz", &wrapped(&[("tokens.npy", bytes)])),
    };
    let Ok(found) = parity::foreign::read::file(&path) else { return };
    for array in found.passes.iter().flat_map(|pass| &pass.arrays) {
        let (element, data) = array.to_dump();
        assert_eq!(data.len(), array.len() * element.size());
        assert!(array.integers().is_none_or(|numbers| numbers.len() == array.len()));
    }
    if let Ok(dump) = parity::foreign::open(&path, &parity::foreign::Options::default()) {
        read_all(&dump);
    }
}

/// A suite of cases: every case that it counts can be made.
pub fn suites(bytes: &[u8]) {
    // Suites name files: those of an empty folder.
    let Ok(suite) = Suite::parse(&String::from_utf8_lossy(bytes), &folder().join("none")) else { return };
    assert_eq!(suite.ids().count(), suite.n_cases());
    for index in (0..suite.n_cases()).take(64) {
        assert!(!suite.case(index).id.is_empty());
    }
}

/// A file of tolerances: none that bounds nothing.
pub fn tolerances(bytes: &[u8]) {
    let Ok(found) = Tolerances::default().with_file(&file("tolerances.toml", bytes)) else { return };
    let of = found.of("blk.0.q_rope".parse().expect("an id"));
    assert!([of.rtol, of.atol, of.nmse].into_iter().flatten().all(|value| value >= 0.0));
}

/// A report: what is read can be shown in every format.
pub fn reports(bytes: &[u8]) {
    use parity::report::{csv, html, json, junit, markdown};
    let Ok(report) = json::read(&file("report.json", bytes)) else { return };
    let again = json::render(&report).expect("a report");
    assert!(json::read(&file("again.json", again.as_bytes())).is_ok());
    let shown =
        [csv::render(&report), html::render(&report), junit::render(&report), Ok(markdown::render(&report))];
    assert!(shown.iter().all(Result::is_ok));
}

/// A message of ggml's RPC, behind the major version: what is read is written as it was.
pub fn rpc(bytes: &[u8]) {
    let Some((&major, bytes)) = bytes.split_first() else { return };
    let version = Version { major, minor: 0, patch: 0 };
    let _ = bytes.first().map(|&command| shape(command, version));
    let Ok(graph) = WireGraph::parse(bytes, version) else { return };
    assert_eq!(graph.write(version), bytes);
    assert!(graph.tensors.iter().all(|tensor| tensor.bytes().is_ok()));
}

/// The imports of a program or library, for either processor: never more than the file has words, with names that C has.
pub fn imports(bytes: &[u8]) {
    for machine in [Machine::X86_64, Machine::Aarch64] {
        if let Ok(found) = imports_of(bytes, machine) {
            assert!(found.slots.len() <= bytes.len() / 8, "{} slots", found.slots.len());
            assert!(found.slots.iter().all(|slot| !slot.name.contains('\0')));
        }
    }
}

/// What is typed: ids, faults, layers, arithmetic. What is understood reads back as the same.
pub fn words(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for word in text.split_whitespace() {
        if let Ok(checkpoint) = word.parse::<Checkpoint>() {
            assert_eq!(checkpoint.to_string().parse::<Checkpoint>(), Ok(checkpoint));
        }
        if let Ok(numerics) = word.parse::<Numerics>() {
            assert_eq!(numerics.to_string().parse::<Numerics>(), Ok(numerics));
        }
        let _ = word.parse::<Layers>().map(|layers| assert!(layers.first <= layers.last));
        let _ = word.parse::<Wanted>();
        let _ = word.parse::<parity::engine::device::Device>();
        let _ = word.parse::<parity::audit::AuditRows>();
    }
}
