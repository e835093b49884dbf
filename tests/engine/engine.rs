//! The engine: the same values however it is asked, traced or not, whole or in pieces, in f32 or f64.

use std::collections::BTreeMap;

use std::path::Path;

use indexmap::IndexMap;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::fused::Model;
use parity::engine::fused::cpu::{AsValues, CpuEngine};
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::numerics::Numerics;

const TOKENS: [u32; 9] = [312, 863, 2039, 1444, 1518, 285, 314, 511, 435];

/// Collects every checkpoint's values over all steps, in f64.
#[derive(Default)]
struct Collect {
    optional: bool,
    values: IndexMap<Checkpoint, Vec<f64>>,
}

impl Probe for Collect {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.optional || !checkpoint.kind().is_optional()
    }

    fn record(&mut self, c: Checkpoint, _: &Batch<'_>, shape: &[usize], values: Values<'_>) -> Result<()> {
        let values: Vec<f64> = match values {
            Values::F32(values) => values.iter().map(|&v| f64::from(v)).collect(),
            Values::F16(values) => values.iter().map(|&v| v.to_f64()).collect(),
            Values::F64(values) => values.to_vec(),
        };
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{c} has the shape it says");
        self.values.entry(c).or_default().extend(values);
        Ok(())
    }
}

/// Sees nothing.
struct Blind;

impl Probe for Blind {
    fn wants(&self, _: Checkpoint) -> bool {
        false
    }

    fn record(&mut self, c: Checkpoint, _: &Batch<'_>, _: &[usize], _: Values<'_>) -> Result<()> {
        panic!("{c} was not asked for")
    }
}

fn tiny(quantisation: &str) -> Model {
    let file = format!("reference-dumps/models/qwen2-tiny-py-{quantisation}.gguf");
    Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// Runs `TOKENS` in steps of these lengths; the last step's logits.
fn steps<S: AsValues>(model: &Model, lengths: &[usize], probe: &mut dyn Probe) -> Vec<f32> {
    let mut engine = CpuEngine::<S>::new(&model.gguf, model.graph.clone(), Numerics::default());
    let mut first = 0;
    let mut logits = None;
    for length in lengths {
        let batch = Batch { tokens: &TOKENS[first..first + length], first };
        logits = engine.step(&batch, probe).unwrap();
        first += length;
    }
    logits.unwrap()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().copied().map(square).sum::<f64>()).sqrt()
}

#[test]
fn asking_changes_nothing() {
    for quantisation in ["F16", "Q4_K_M"] {
        let model = tiny(quantisation);
        for lengths in [&[9][..], &[5, 1, 1, 1, 1]] {
            let untraced = steps::<f32>(&model, lengths, &mut Blind);
            let traced = steps::<f32>(&model, lengths, &mut Collect::default());
            let with_matrices =
                steps::<f32>(&model, lengths, &mut Collect { optional: true, ..Collect::default() });
            let bits = |logits: &[f32]| logits.iter().map(|l| l.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&untraced), bits(&traced), "{quantisation} {lengths:?}");
            assert_eq!(
                bits(&untraced),
                bits(&with_matrices),
                "{quantisation} {lengths:?}, attention matrices too"
            );
        }
    }
}

/// Sees the logits from one row on.
struct From(usize, BTreeMap<u32, Vec<f32>>);

impl Probe for From {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        checkpoint.kind() == Kind::Logits
    }

    fn record(
        &mut self,
        _: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let Values::F32(values) = values else { panic!("the engine computes in f32") };
        assert_eq!(shape[0], batch.tokens.len());
        self.1.extend(batch.positions().into_iter().zip(values.chunks(shape[1]).map(<[f32]>::to_vec)));
        Ok(())
    }

    fn first_logits(&self, _: &Batch<'_>) -> usize {
        self.0
    }
}

#[test]
fn logits_that_nobody_asks_for_are_left_out_and_the_others_keep_their_bits() {
    let model = tiny("Q4_K_M");
    let tokens: Vec<u32> = (0..200).map(|i| (i * 37 + 11) % 1500).collect();
    let seen = |first: usize| {
        let mut probe = From(first, BTreeMap::new());
        let mut engine = CpuEngine::<f32>::new(&model.gguf, model.graph.clone(), Numerics::default());
        let last = engine.step(&Batch { tokens: &tokens, first: 0 }, &mut probe).unwrap().unwrap();
        assert_eq!(probe.1[&199], last);
        probe.1
    };
    let all = seen(0);
    assert_eq!(all.len(), 200);
    for (first, rows) in [(199, 8), (150, 72), (64, 136), (1000, 8)] {
        let some = seen(first);
        assert_eq!(some.len(), rows, "from {first}");
        assert!(some.iter().all(|(position, row)| all[position] == *row), "from {first}");
    }
}

/// The bits of everything that some threads compute.
fn bits_of(threads: usize, model: &Model) -> IndexMap<Checkpoint, Vec<u64>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let mut seen = Collect::default();
    pool.install(|| steps::<f32>(model, &[9], &mut seen));
    let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect();
    seen.values.into_iter().map(|(checkpoint, values)| (checkpoint, bits(values))).collect()
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let model = tiny("Q4_K_M");
    let one = bits_of(1, &model);
    for threads in [2, 3, 7] {
        assert!(bits_of(threads, &model) == one, "{threads} threads");
    }
}

#[test]
fn every_checkpoint_of_the_model_is_shown() {
    let model = tiny("F16");
    let mut seen = Collect { optional: true, ..Collect::default() };
    steps::<f32>(&model, &[9], &mut seen);
    let expected: Vec<Checkpoint> = model.graph.checkpoints().collect();
    assert_eq!(seen.values.keys().copied().collect::<Vec<_>>(), expected, "in the order of the graph");
}

#[test]
fn a_position_is_the_same_row_in_prefill_chunk_and_decode() {
    let model = tiny("F16");
    let mut whole = Collect::default();
    steps::<f64>(&model, &[9], &mut whole);
    for lengths in [&[4, 4, 1][..], &[5, 1, 1, 1, 1]] {
        let mut pieces = Collect::default();
        steps::<f64>(&model, lengths, &mut pieces);
        for (checkpoint, values) in &whole.values {
            let error = distance(&pieces.values[checkpoint], values);
            // Only the order of f64 sums differs: n·u for the longest sum of the model, F = 768, times a
            // hundred nodes in sequence.
            let bound = 100.0 * 768.0 * f64::EPSILON;
            assert!(error <= bound, "{checkpoint} in steps of {lengths:?}: {error:e}");
        }
    }
}

#[test]
fn single_precision_is_the_same_model() {
    let model = tiny("Q4_K_M");
    let (mut single, mut double) = (Collect::default(), Collect::default());
    steps::<f32>(&model, &[5, 1, 1, 1, 1], &mut single);
    steps::<f64>(&model, &[5, 1, 1, 1, 1], &mut double);
    for (checkpoint, values) in &double.values {
        let error = distance(&single.values[checkpoint], values);
        // sqrt(n)·u of the longest sum, times a hundred nodes in sequence.
        let bound = 100.0 * 768f64.sqrt() * f64::from(f32::EPSILON);
        assert!(error <= bound, "{checkpoint}: {error:e} > {bound:e}");
    }
}

#[test]
fn the_graph_can_end_early() {
    let model = tiny("F16");
    let last = Checkpoint::layer(Kind::LayerOut, 0);
    let mut engine = CpuEngine::<f32>::new(&model.gguf, model.graph.until(last), Numerics::default());
    let mut seen = Collect::default();
    let batch = Batch { tokens: &TOKENS, first: 0 };
    assert_eq!(engine.step(&batch, &mut seen).unwrap(), None);
    assert_eq!(seen.values.keys().last(), Some(&last));
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error() {
    let model = tiny("F16");
    let mut engine = CpuEngine::<f32>::new(&model.gguf, model.graph.clone(), Numerics::default());
    let error = engine.step(&Batch { tokens: &[4096], first: 0 }, &mut Blind).unwrap_err();
    assert!(error.to_string().contains("beyond the vocabulary"), "{error}");
}
