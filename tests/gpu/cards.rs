//! Layers split over several GPUs: the bits of one. Where a machine has a single GPU it holds all parts, which tests
//! everything but the copy from one GPU to another.

use std::collections::HashMap;
use std::ops::Range;

use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::cuda::{Cards, CudaEngine, count, supported};
use parity::engine::device::{self, Device};
use parity::engine::fused::Model;
use parity::engine::fused::graph::{Activation, Glu, Graph, Op};
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::jobs::run::RunOptions;
use parity::report::{Report, Verdict};

use super::emulated::{arithmetics, is_emulated};
use crate::{NUMERICS, has_gpu, judged, of_cpu, tiny, tokens};

/// Whether there are two GPUs; said where not, and an error where `PARITY_REQUIRE_GPUS` asks for as many.
fn has_two_gpus() -> bool {
    let required = std::env::var("PARITY_REQUIRE_GPUS").map_or(0, |n| n.parse().expect("a number of GPUs"));
    assert!(count() >= required, "{} GPUs where PARITY_REQUIRE_GPUS={required}", count());
    if count() < 2 {
        eprintln!(
            "SKIP: two GPUs are needed to hand values from one to the other, and there are {}",
            count()
        );
    }
    count() >= 2
}

/// Bits that a probe was shown, by checkpoint and first position, and logits that were returned.
struct Shown {
    wants: fn(Kind) -> bool,
    values: HashMap<(Checkpoint, usize), (Vec<usize>, Vec<u32>)>,
    logits: Vec<u32>,
}

impl Probe for Shown {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        (self.wants)(checkpoint.kind())
    }

    fn record(
        &mut self,
        c: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let bits = match values {
            Values::F32(values) => values.iter().map(|v| v.to_bits()).collect(),
            Values::F16(values) => values.iter().map(|v| u32::from(v.to_bits())).collect(),
            Values::F64(_) => unreachable!("the GPU computes in f32"),
        };
        let before = self.values.insert((c, batch.first), (shape.to_vec(), bits));
        assert!(before.is_none(), "{c} at {} is shown once", batch.first);
        Ok(())
    }
}

/// Steps of prefill, decode (launched one by one, then as one graph), few rows, and more than the cache first holds.
const STEPS: &[Range<usize>] =
    &[0..70, 70..71, 71..72, 72..73, 73..78, 78..79, 79..1023, 1023..1024, 1024..1025];
/// The same where a launch takes long, within what the cache first holds.
const FEW_STEPS: &[Range<usize>] = &[0..10, 10..11, 11..12, 12..13, 13..18];

/// All steps from position 0, looked at like that.
fn compute(engine: &mut dyn Engine, wants: fn(Kind) -> bool) -> Shown {
    let steps = if is_emulated() { FEW_STEPS } else { STEPS };
    let tokens = tokens(steps[steps.len() - 1].end);
    let mut shown = Shown { wants, values: HashMap::new(), logits: Vec::new() };
    engine.reset();
    for step in steps {
        let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
        let logits = engine.step(&batch, &mut shown).unwrap().unwrap();
        shown.logits.extend(logits.into_iter().map(f32::to_bits));
    }
    shown
}

/// Every value of `graph` on one GPU and on these.
fn same_bits(model: &Model, graph: &Graph, gpus: &[usize], what: &str) {
    let looks: [fn(Kind) -> bool; 4] = [|_| false, |kind| !kind.is_optional(), |_| false, |_| true];
    let looks = if is_emulated() { &looks[..2] } else { &looks };
    for numerics in arithmetics() {
        let numerics = supported(numerics.parse().unwrap()).unwrap();
        let mut one = CudaEngine::new(&model.gguf, graph.clone(), gpus[0], numerics).unwrap();
        let mut several = Cards::new(&model.gguf, graph.clone(), gpus, numerics).unwrap();
        assert_eq!(several.layers().len(), gpus.len());
        assert_eq!(several.layers().iter().sum::<usize>(), graph.dims.layers);
        for &wants in looks {
            let (one, several) = (compute(&mut one, wants), compute(&mut several, wants));
            let differs = one.values.iter().find(|(key, value)| several.values.get(key) != Some(value));
            assert!(differs.is_none(), "{what} in {numerics} on {gpus:?}: {:?}", differs.map(|(key, _)| key));
            assert_eq!(one.values.len(), several.values.len(), "{what} in {numerics} on {gpus:?}");
            assert!(one.logits == several.logits, "{what} in {numerics} on {gpus:?}: logits");
        }
    }
}

/// The same run on one GPU and on these: the same numbers in every report.
fn same_reports(gpus: &[usize]) {
    let folder = tempfile::tempdir().unwrap();
    let options = of_cpu(&folder.path().join("reference"));
    let on = |device: Vec<usize>, numerics: &str, isolated: bool| -> Report {
        let device = Device::Cuda(device);
        let numerics = numerics.parse().unwrap();
        let options = RunOptions { device, numerics, isolated, ..options.clone() };
        judged(&options)
    };
    for numerics in NUMERICS {
        for isolated in [false, true] {
            let one = on(vec![gpus[0]], numerics, isolated);
            let several = on(gpus.to_vec(), numerics, isolated);
            let origins = &one.origins;
            assert_eq!(
                (one.verdict, several.verdict),
                (Verdict::Parity, Verdict::Parity),
                "{numerics}: {origins:?}"
            );
            assert_eq!(one.coverage, several.coverage);
            for (a, b) in one.checkpoints.iter().zip(&several.checkpoints) {
                let (a_numbers, b_numbers) = (a.numbers.as_ref().unwrap(), b.numbers.as_ref().unwrap());
                assert_eq!((a.id, a.verdict), (b.id, b.verdict));
                assert_eq!(a_numbers.abs_err_max, b_numbers.abs_err_max, "{} in {numerics}", a.id);
                assert_eq!(a_numbers.rel_l2, b_numbers.rel_l2, "{} in {numerics}", a.id);
            }
            let name = several.candidate.producer.device.unwrap();
            assert!(name.starts_with(&format!("{} x ", gpus.len())) || name.contains(" + "), "{name}");
        }
    }
}

/// The healthy model, and one of which the host computes a node on either side of the border.
fn check(gpus: &[usize]) {
    let model = tiny();
    same_bits(&model, &model.graph, gpus, "healthy");
    if is_emulated() {
        return;
    }
    let mut graph = model.graph.clone();
    for layer in [0, 3] {
        let act = Checkpoint::layer(Kind::FfnAct, layer);
        let node = graph.nodes.iter_mut().find(|node| node.checkpoint == act).unwrap();
        // Swapped and ungated at once: no kernel has that.
        node.op = Op::Glu(Glu { activation: Activation::GeluTanh, swapped: true, gated: false });
    }
    same_bits(&model, &graph, gpus, "an activation on the host");
    same_reports(gpus);
}

#[test]
fn parts_on_one_gpu_have_the_bits_of_the_whole() {
    if has_gpu() {
        check(&[0, 0]);
        check(&[0, 0, 0, 0]);
    }
}

#[test]
fn two_gpus_have_the_bits_of_one() {
    if has_gpu() && has_two_gpus() {
        check(&[1, 0]);
        if !is_emulated() {
            check(&[0, 1]);
        }
    }
}

#[test]
fn gpus_that_are_not_there_or_too_many_are_said() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let open = |gpus: Vec<usize>| {
        let opened = device::open(&Device::Cuda(gpus), &model, model.graph.clone(), Default::default());
        opened.err().expect("an error").to_string()
    };
    assert!(open(vec![0, count()]).contains(&format!("no GPU number {}", count())));
    let too_many = open(vec![0; model.graph.dims.layers + 1]);
    assert!(too_many.contains("fewer layers than there are GPUs"), "{too_many}");
}

/// A step that one of the parts cannot compute leaves an engine that goes on.
#[test]
fn a_split_engine_goes_on_after_an_error() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let numerics = supported(Default::default()).unwrap();
    let mut whole = CudaEngine::new(&model.gguf, model.graph.clone(), 0, numerics).unwrap();
    let mut parts = Cards::new(&model.gguf, model.graph.clone(), &[0, 0], numerics).unwrap();
    /// Fails when it is shown what the second part has computed.
    struct Last;
    impl Probe for Last {
        fn wants(&self, checkpoint: Checkpoint) -> bool {
            checkpoint == Checkpoint::global(Kind::Logits)
        }

        fn record(&mut self, c: Checkpoint, _: &Batch<'_>, _: &[usize], _: Values<'_>) -> Result<()> {
            Err(parity::error::Error::new(c, "is not to be had"))
        }
    }
    let tokens = tokens(40);
    let batch = Batch { tokens: &tokens, first: 0 };
    assert!(parts.step(&batch, &mut Last).is_err());
    let wants: fn(Kind) -> bool = |kind| !kind.is_optional();
    let [one, several]: [&mut dyn Engine; 2] = [&mut whole, &mut parts];
    let (one, several) = (compute(one, wants), compute(several, wants));
    assert!(one.values == several.values && one.logits == several.logits);
}
