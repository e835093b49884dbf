//! A reference that is held on the device: what is found is what is found without, and what the host finds; and no
//! reference is taken for another.

use std::collections::BTreeMap;

use parity::checkpoint::{Checkpoint, Kind};
use parity::compare::Accumulator;
use parity::engine::cuda::{Cards, supported};
use parity::engine::{Asked, Batch, Engine, Probe, ReferenceId, RowStats, Values};
use parity::error::{Error, Result};

use super::emulated::{arithmetics, few};
use crate::{NUMERICS, engine, has_gpu, tiny, tokens};

type Tensors = BTreeMap<String, Vec<f32>>;

/// What a probe is told of a checkpoint: its numbers, and the rows that it asked to see.
type Found = BTreeMap<String, (Vec<RowStats>, Vec<(usize, Vec<f32>)>)>;

/// Hands over a reference, and collects what is found; what is not compared is collected too.
#[derive(Default)]
struct Given {
    reference: Tensors,
    id: Option<ReferenceId>,
    compares: bool,
    /// Read back, whatever else is compared.
    spared: Option<Kind>,
    fails: bool,
    asked: usize,
    found: Found,
    recorded: Tensors,
}

impl Given {
    /// Compares with `reference`.
    fn new(reference: &Tensors, id: Option<ReferenceId>) -> Given {
        Given { reference: reference.clone(), id, compares: true, ..Given::default() }
    }

    /// One step from position 0 on: what was found, and how many references were asked for.
    fn step(&mut self, engine: &mut dyn Engine, tokens: &[u32]) -> (Found, usize) {
        engine.reset();
        self.asked = 0;
        engine.step(&Batch { tokens, first: 0 }, self).unwrap();
        (std::mem::take(&mut self.found), self.asked)
    }
}

impl Probe for Given {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        !checkpoint.kind().is_optional()
    }

    fn record(&mut self, c: Checkpoint, _: &Batch<'_>, _: &[usize], values: Values<'_>) -> Result<()> {
        let values = match values {
            Values::F32(values) => values.to_vec(),
            Values::F16(values) => values.iter().map(|v| v.to_f32()).collect(),
            Values::F64(_) => unreachable!("the GPU computes in f32"),
        };
        self.recorded.insert(c.to_string(), values);
        Ok(())
    }

    fn compares(&self, checkpoint: Checkpoint, _: &Batch<'_>) -> bool {
        self.compares && self.spared != Some(checkpoint.kind())
    }

    fn reference(&self, _: &Batch<'_>) -> Option<ReferenceId> {
        self.id
    }

    fn asked(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>) -> Asked {
        self.asked += 1;
        let reference = self.reference[&checkpoint.to_string()].clone();
        Asked { reference, rows: vec![0, batch.tokens.len() - 1] }
    }

    fn compared(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        _: &[usize],
        rows: &[RowStats],
        values: &[(usize, Vec<f32>)],
    ) -> Result<()> {
        assert_eq!(rows.len(), batch.tokens.len());
        if self.fails {
            return Err(Error::new("probe", "enough seen"));
        }
        let before = self.found.insert(checkpoint.to_string(), (rows.to_vec(), values.to_vec()));
        assert!(before.is_none(), "{checkpoint} is compared once");
        Ok(())
    }
}

/// The engine's own values.
fn own(engine: &mut dyn Engine, tokens: &[u32]) -> Tensors {
    let mut probe = Given::default();
    probe.step(engine, tokens);
    probe.recorded
}

/// Another reference for each `factor`.
fn changed(values: &Tensors, factor: f32) -> Tensors {
    let change = |values: &Vec<f32>| -> Vec<f32> {
        values.iter().enumerate().map(|(i, v)| v * (1.0 + (i % 7) as f32 * factor)).collect()
    };
    values.iter().map(|(id, values)| (id.clone(), change(values))).collect()
}

/// Holds what was found against the host's comparison.
fn check(found: &Found, own: &Tensors, reference: &Tensors, rows: usize) {
    assert_eq!(found.len(), own.len());
    for (id, (stats, shown)) in found {
        let (ours, theirs) = (&own[id], &reference[id]);
        let width = ours.len() / rows;
        for (t, row) in stats.iter().enumerate() {
            let (mut host, mut device) = (Accumulator::default(), Accumulator::default());
            host.row(0, &ours[t * width..(t + 1) * width], &theirs[t * width..(t + 1) * width]);
            device.compared_row(0, width, row);
            let (host, device) = (host.numbers(&[width]).unwrap(), device.numbers(&[width]).unwrap());
            let exact = |n: &parity::report::Numbers| {
                (n.abs_err_max.to_bits(), n.worst.clone(), n.sign_positive, n.tolerance_needed, n.nonfinite)
            };
            assert_eq!(exact(&device), exact(&host), "{id}, row {t}");
            // Sums in f64 in another order.
            approx::assert_relative_eq!(device.rel_l2, host.rel_l2, max_relative = 1e-12);
            approx::assert_relative_eq!(device.abs_err_mean, host.abs_err_mean, max_relative = 1e-12);
        }
        let row = |t: usize| (t, ours[t * width..(t + 1) * width].to_vec());
        assert_eq!(*shown, [row(0), row(rows - 1)], "{id}");
    }
}

#[test]
fn a_held_reference_is_compared_with_as_any_other() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    for numerics in NUMERICS {
        let mut engine = engine(&model, numerics);
        let tokens = tokens(90);
        let own = own(&mut engine, &tokens);
        let references = [changed(&own, 1e-3), changed(&own, -2e-3)];
        let [one, other] =
            references.each_ref().map(|reference| Given::new(reference, None).step(&mut engine, &tokens).0);
        assert!(one != other);
        check(&one, &own, &references[0], tokens.len());
        check(&other, &own, &references[1], tokens.len());
        let n = own.len();
        let mut held = Given::new(&references[0], Some(ReferenceId::unique()));
        for asked in [n, 0, 0, 0] {
            assert!(held.step(&mut engine, &tokens) == (one.clone(), asked), "{numerics}: {asked} asked for");
        }
        let mut second = Given::new(&references[1], Some(ReferenceId::unique()));
        for asked in [n, 0, 0] {
            assert!(second.step(&mut engine, &tokens) == (other.clone(), asked), "{numerics}");
        }
        // The first has been forgotten, and is so where nothing is held.
        assert!(held.step(&mut engine, &tokens) == (one.clone(), n), "{numerics}");
        assert!(Given::new(&references[1], None).step(&mut engine, &tokens) == (other, n), "{numerics}");
        assert!(held.step(&mut engine, &tokens) == (one, n), "{numerics}");
    }
}

#[test]
fn a_held_reference_is_of_one_step_alone() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let mut engine = engine(&model, "f16");
    let tokens = tokens(60);
    let values = own(&mut engine, &tokens);
    let reference = changed(&values, 1e-3);
    let n = values.len();
    let mut held = Given::new(&reference, Some(ReferenceId::unique()));
    let found = held.step(&mut engine, &tokens);
    assert_eq!(found.1, n);
    // The same number of rows from another position on.
    held.asked = 0;
    engine.step(&Batch { tokens: &tokens, first: tokens.len() }, &mut held).unwrap();
    assert_eq!(std::mem::take(&mut held.asked), n);
    let after = std::mem::take(&mut held.found);
    assert!(after != found.0, "other positions have other values");
    assert!(held.step(&mut engine, &tokens) == found);
    // A step that does not compare in between, of another shape, and one that reads everything back.
    engine.step(&Batch { tokens: &tokens[..1], first: tokens.len() }, &mut Given::default()).unwrap();
    assert!(held.step(&mut engine, &tokens) == found);
    assert!(own(&mut engine, &tokens) == values, "values are computed as ever");
    assert!(held.step(&mut engine, &tokens) == found);
    // One checkpoint has another size: it is recorded, the others are compared.
    let odd = reference.keys().next().unwrap().clone();
    let mut unfit = Given::new(&reference, Some(ReferenceId::unique()));
    unfit.reference.get_mut(&odd).unwrap().pop();
    for asked in [n + 1, 1] {
        let (compared, times) = unfit.step(&mut engine, &tokens);
        assert_eq!((compared.len(), times), (n - 1, asked));
        assert!(compared.iter().all(|(id, row)| found.0[id] == *row));
        assert_eq!(unfit.recorded.remove(&odd).as_ref(), values.get(&odd));
    }
}

/// Some checkpoints are read back while the others are compared, step after step.
#[test]
fn what_is_not_compared_is_read_back_beside() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    for numerics in arithmetics() {
        let mut engine = engine(&model, numerics);
        let tokens = tokens(few(70));
        let values = own(&mut engine, &tokens);
        let reference = changed(&values, 1e-3);
        let mut found = Given::new(&reference, None).step(&mut engine, &tokens).0;
        let is_spared = |id: &str| id.parse::<Checkpoint>().unwrap().kind() == Kind::FfnUp;
        found.retain(|id, _| !is_spared(id));
        let mut held = Given::new(&reference, Some(ReferenceId::unique()));
        held.spared = Some(Kind::FfnUp);
        for asked in [found.len(), 0, 0, 0] {
            assert!(
                held.step(&mut engine, &tokens) == (found.clone(), asked),
                "{numerics}: {asked} asked for"
            );
            let read = std::mem::take(&mut held.recorded);
            assert_eq!(read.len() + found.len(), values.len());
            assert!(read.iter().all(|(id, read)| is_spared(id) && values[id] == *read), "{numerics}");
        }
    }
}

/// A step that is launched as it was recorded finds what is in this step, not in one before; also behind one that failed.
#[test]
fn what_is_found_is_of_the_step() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    for numerics in arithmetics() {
        let mut engine = engine(&model, numerics);
        let texts = [0, 1, 2].map(|text| tokens(few(80) + text).split_off(text));
        let reference = changed(&own(&mut engine, &texts[0]), 1e-3);
        let found = texts.each_ref().map(|text| Given::new(&reference, None).step(&mut engine, text).0);
        assert!(found[0] != found[1] && found[1] != found[2]);
        let mut held = Given::new(&reference, Some(ReferenceId::unique()));
        for (turn, text) in [0, 1, 2, 2, 0, 1, 0, 2].into_iter().enumerate() {
            let asked = if turn == 0 { reference.len() } else { 0 };
            assert!(
                held.step(&mut engine, &texts[text]) == (found[text].clone(), asked),
                "{numerics}, {turn}"
            );
            if turn > 1 {
                held.fails = true;
                engine.reset();
                engine.step(&Batch { tokens: &texts[1], first: 0 }, &mut held).unwrap_err();
                held.fails = false;
            }
        }
    }
}

#[test]
fn every_part_of_a_model_holds_its_own() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let mut whole = engine(&model, "f16");
    let numerics = supported("f16".parse().unwrap()).unwrap();
    let mut parts = Cards::new(&model.gguf, model.graph.clone(), &[0, 0], numerics).unwrap();
    let tokens = tokens(70);
    let reference = changed(&own(&mut whole, &tokens), 1e-3);
    let found = Given::new(&reference, None).step(&mut whole, &tokens).0;
    let mut held = Given::new(&reference, Some(ReferenceId::unique()));
    for asked in [reference.len(), 0, 0] {
        assert!(held.step(&mut parts, &tokens) == (found.clone(), asked));
    }
}
