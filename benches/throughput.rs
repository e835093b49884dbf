//! How fast parity reads: two dumps compared with all numbers, weights decoded, a prompt run with every
//! checkpoint probed. `cargo bench`; ratios against llama.cpp are measured by `scripts/bench-run.sh`.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use parity::checkpoint::{Checkpoint, Kind};
use parity::compare::{Tolerances, dumps};
use parity::engine::fused::Model;
use parity::engine::fused::cpu::CpuEngine;
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::gguf::Gguf;
use parity::numerics::Numerics;
use parity_dump::manifest::{ModelInfo, Producer};
use parity_dump::{Dump, Writer};

const LAYERS: u32 = 28;
/// Rows and columns of the benchmarked tensors: 290 tokens of a model with a feed-forward width of 4096.
const ROWS: usize = 290;
const WIDTH: usize = 4096;

/// Writes a dump of one wide checkpoint in each layer, every value off by up to `noise` of itself.
fn dump(dir: &Path, noise: f32) -> Dump {
    let producer = Producer { name: "bench".to_owned(), ..Producer::default() };
    let mut writer = Writer::create(dir, producer, ModelInfo::default()).unwrap();
    let positions: Vec<u32> = (0..ROWS as u32).collect();
    writer.begin_step(&positions, &positions, LAYERS as usize).unwrap();
    let mut state = 1u32;
    for layer in 0..LAYERS {
        let values: Vec<f32> = (0..ROWS * WIDTH)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let value = ((i * 2_654_435_761) as u32) as f32 / u32::MAX as f32 - 0.5;
                value * (1.0 + noise * (state as f32 / u32::MAX as f32 - 0.5))
            })
            .collect();
        writer.tensor_f32(Checkpoint::layer(Kind::FfnAct, layer), &[ROWS, WIDTH], &values).unwrap();
    }
    writer.end_step().unwrap();
    writer.finish().unwrap();
    Dump::open(dir).unwrap()
}

fn compare_two_dumps(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let candidate = dump(&folder.path().join("candidate"), 1e-3);
    let reference = dump(&folder.path().join("reference"), 0.0);
    let wanted: Vec<Checkpoint> = (0..LAYERS).map(|layer| Checkpoint::layer(Kind::FfnAct, layer)).collect();
    let mut group = c.benchmark_group("compare");
    // Both sides are read.
    group.throughput(Throughput::Bytes(2 * 4 * u64::from(LAYERS) * (ROWS * WIDTH) as u64));
    group.sample_size(10);
    group.bench_function("two dumps, all numbers", |b| {
        b.iter(|| black_box(dumps(&candidate, &reference, &wanted, &Tolerances::default())));
    });
    group.finish();
}

fn shipped(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models").join(name)
}

fn decode_weights(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode");
    for (file, tensor) in [
        ("qwen2-tiny-py-F16.gguf", "blk.0.ffn_up.weight"),
        ("qwen2-tiny-py-Q4_K_M.gguf", "blk.0.ffn_up.weight"),
        ("qwen2-tiny-py-Q4_K_M.gguf", "token_embd.weight"),
    ] {
        let gguf = Gguf::open(&shipped(file)).unwrap();
        let tensor = gguf.tensor(tensor).unwrap();
        let mut values = vec![0f32; tensor.rows() * tensor.cols()];
        group.throughput(Throughput::Elements(values.len() as u64));
        group.bench_function(format!("{:?} to f32", tensor.info.dtype), |b| {
            b.iter(|| tensor.decode_rows(0..tensor.rows(), black_box(&mut values)));
        });
    }
    group.finish();
}

/// Takes everything and keeps nothing.
struct Sink(f32);

impl Probe for Sink {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        !checkpoint.kind().is_optional()
    }

    fn record(&mut self, _: Checkpoint, _: &Batch<'_>, _: &[usize], values: Values<'_>) -> Result<()> {
        if let Values::F32(values) = values {
            self.0 += values[0];
        }
        Ok(())
    }
}

fn run_a_prompt(c: &mut Criterion) {
    let model = Model::open(&shipped("qwen2-tiny-py-Q4_K_M.gguf")).unwrap();
    let tokens: Vec<u32> = (0..256).collect();
    let mut group = c.benchmark_group("engine");
    group.throughput(Throughput::Elements(tokens.len() as u64));
    group.bench_function("tiny Q4_K_M, 256 tokens, every checkpoint probed", |b| {
        b.iter(|| {
            let mut engine = CpuEngine::<f32>::new(&model.gguf, model.graph.clone(), Numerics::default());
            let mut sink = Sink(0.0);
            engine.step(&Batch { tokens: &tokens, first: 0 }, &mut sink).unwrap();
            black_box(sink.0)
        });
    });
    group.finish();
}

criterion_group!(benches, compare_two_dumps, decode_weights, run_a_prompt);
criterion_main!(benches);
