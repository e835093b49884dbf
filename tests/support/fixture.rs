//! A report as an injected `rope.base` leaves it, made of seeded numbers: for tests that need no model.

use parity::checkpoint::{Checkpoint, Kind};
use parity::random;
use parity::report::detail::{GRID, Sketch};
use parity::report::{
    CheckpointVerdict, Coverage, Diagnosis, DifferenceParts, Entry, FirstDivergence, Flip, Local, LocalError,
    Nonfinite, Numbers, Report, Side, TokenReport, ToleranceNeeded, TopToken, Tried, Verdict, Worst,
};
use parity_dump::manifest::{ModelInfo, Producer};

/// Sizes of the made-up model.
#[derive(Clone, Copy)]
pub struct Shape {
    pub layers: u32,
    pub tokens: usize,
    pub width: usize,
    pub ffn: usize,
}

/// The shape of the shipped tiny model.
pub const TINY: Shape = Shape { layers: 4, tokens: 15, width: 256, ffn: 512 };

/// Small enough for snapshots.
pub const SMALL: Shape = Shape { layers: 2, tokens: 3, width: 64, ffn: 96 };

/// Numbers between 0 and 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(random::GAMMA);
        (random::mixed(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn kinds() -> impl Iterator<Item = Kind> {
    let absent = [Kind::QNorm, Kind::KNorm, Kind::AttnScores, Kind::AttnProbs];
    Kind::all().filter(move |kind| kind.in_layer() && !absent.contains(kind))
}

fn checkpoints(layers: u32) -> Vec<Checkpoint> {
    let mut ids = vec![Checkpoint::global(Kind::Embed)];
    ids.extend((0..layers).flat_map(|layer| kinds().map(move |kind| Checkpoint::layer(kind, layer))));
    ids.extend([Checkpoint::global(Kind::FinalNorm), Checkpoint::global(Kind::Logits)]);
    ids
}

/// Whether the injected fault at `origin` reaches `id`, which does not stand before it.
fn reached(id: Checkpoint, origin: Checkpoint) -> bool {
    let beside = matches!(id.kind(), Kind::KProj | Kind::K | Kind::VProj | Kind::V | Kind::KRope);
    !(beside && id.layer_index() == origin.layer_index())
}

/// A clean pair of dumps.
pub fn clean(shape: Shape) -> Report {
    report(shape, None)
}

/// The same with a RoPE of base 10000 at layer `layer`.
pub fn injected(shape: Shape, layer: u32) -> Report {
    report(shape, Some(Checkpoint::layer(Kind::QRope, layer)))
}

fn report(shape: Shape, origin: Option<Checkpoint>) -> Report {
    let ids = checkpoints(shape.layers);
    let mut random = Random(7);
    let mut distance = 4e-7;
    let mut entries = Vec::new();
    let mut details = Vec::new();
    let place = origin.and_then(|origin| ids.iter().position(|id| *id == origin)).unwrap_or(ids.len());
    for (at, &id) in ids.iter().enumerate() {
        let wrong = origin.is_some_and(|origin| at >= place && reached(id, origin));
        distance = match origin {
            Some(origin) if id == origin => 0.41,
            _ if wrong => (distance * (0.8 + 0.5 * random.next())).clamp(0.02, 0.6),
            _ => distance * (1.0 + 0.03 * random.next()),
        };
        let shown = if wrong || at < place { distance } else { 3e-6 };
        let verdict = match origin {
            Some(origin) if id == origin => CheckpointVerdict::Origin,
            _ if wrong => CheckpointVerdict::Inherited,
            _ => CheckpointVerdict::Match,
        };
        entries.push(entry(
            id,
            verdict,
            if id.kind() == Kind::Embed { 0.0 } else { shown },
            shape,
            &mut random,
        ));
        details.extend(detail(id, shown, shape, &mut random));
    }
    let verdict = if origin.is_some() { Verdict::Divergence } else { Verdict::Parity };
    let elements = entries.iter().filter_map(|entry| entry.numbers.as_ref()).map(|n| n.n).sum();
    let rows = (ids.len() * shape.tokens) as u64;
    Report {
        verdict,
        first_divergence: origin.map(first_divergence),
        origins: origin.into_iter().collect(),
        coverage: Coverage {
            checkpoints_compared: ids.len(),
            checkpoints_missing: 0,
            elements_compared: elements,
            rows_compared: rows,
            rows_expected: rows,
            rows_audited: Some(rows),
            seen: None,
            rows_screened: Some(0),
        },
        tokens: Some(tokens(shape, origin.is_some(), &mut random)),
        candidate: side("parity", "0.1.0", "f32", shape),
        reference: Some(side("llama.cpp", "0.5.0", "llama-cpu kv=f16 flash=on", shape)),
        command: Some("parity run --inject rope.base@2 --report out".to_owned()),
        next: vec!["parity run --isolate --checkpoint 'blk.2.*' --report out".to_owned()],
        created: Some("2026-11-21T06:00:00Z".to_owned()),
        checkpoints: entries,
        details,
        ..Report::default()
    }
}

fn first_divergence(origin: Checkpoint) -> FirstDivergence {
    FirstDivergence {
        checkpoint: origin,
        layer: origin.layer_index(),
        verdict: CheckpointVerdict::Origin,
        inputs: vec![origin.sibling(Kind::Q)],
        diagnosis: vec![Diagnosis {
            fault: "rope.base".to_owned(),
            explains: 0.999_999_9,
            text: "RoPE base is 10000, the model says 1000000".to_owned(),
            fix: Some("read `qwen2.rope.freq_base` from the metadata instead of the default".to_owned()),
        }],
        residual: None,
        tried: [("rope.interleaved", 0.31), ("rope.position_shift", 0.04), ("rope.none", -0.6)]
            .map(|(fault, explains)| Tried { fault: fault.to_owned(), explains })
            .into(),
        reproduce: Some(format!("parity audit out/candidate -m model.gguf --checkpoint {origin}")),
    }
}

fn width(id: Checkpoint, shape: Shape) -> usize {
    match id.kind() {
        Kind::FfnGate | Kind::FfnUp | Kind::FfnAct => shape.ffn,
        Kind::KProj | Kind::K | Kind::KRope | Kind::VProj | Kind::V => shape.width / 4,
        Kind::Logits => 4096,
        _ => shape.width,
    }
}

fn entry(
    id: Checkpoint,
    verdict: CheckpointVerdict,
    distance: f64,
    shape: Shape,
    random: &mut Random,
) -> Entry {
    let faulty = verdict == CheckpointVerdict::Origin;
    let own = if faulty { 0.41 } else { 4e-7 * (0.7 + random.next()) };
    let bound = 1.6e-6 * (0.8 + 0.4 * random.next());
    let local = |rel_l2: f64| LocalError {
        rel_l2,
        over_bound: rel_l2 / bound,
        bound_rel_l2: Some(bound),
        worst: vec![6, 1, 12],
        worst_recorded: Some(1.25 + rel_l2),
        worst_exact: Some(1.25),
        rows: shape.tokens as u64,
        ..LocalError::default()
    };
    let width = width(id, shape);
    Entry {
        bits: None,
        op: None,
        inputs: Vec::new(),
        diagnosis: Vec::new(),
        id,
        layer: id.layer_index(),
        verdict,
        evidence: faulty.then(|| "local error is 2.6e5 times what rounding explains".to_owned()),
        numbers: Some(Numbers {
            n: (shape.tokens * width) as u64,
            abs_err_max: distance * 7.0,
            abs_err_mean: distance * 0.6,
            rmse: distance,
            rel_l2: distance,
            nmse: distance * distance,
            cosine: Some(1.0 - distance * distance / 2.0),
            sign_positive: (distance > 0.0).then_some(0.5),
            worst: Worst {
                index: vec![shape.tokens - 1, width / 3],
                candidate: Some(1.5 + distance),
                reference: Some(1.5),
            },
            nonfinite: Nonfinite::default(),
            tolerance_needed: ToleranceNeeded { rtol: Some(distance * 4.0), atol: distance * 7.0 },
            row_rel_l2: (0..shape.tokens as u32).map(|position| (position, distance)).collect(),
        }),
        local: Local { candidate: Some(local(own)), reference: Some(local(5e-7 * (0.7 + random.next()))) },
        parts: Some(DifferenceParts {
            candidate: own,
            reference: 5e-7,
            inherited: (distance - own).max(0.0),
            amplification: Some(1.1),
        }),
        shape: vec![shape.tokens, width],
        seen: None,
    }
}

fn detail(
    id: Checkpoint,
    distance: f64,
    shape: Shape,
    random: &mut Random,
) -> Option<parity::report::detail::Detail> {
    let width = width(id, shape);
    let mut sketch = Sketch::new(id, shape.tokens, &[width], GRID)?;
    for position in 0..shape.tokens {
        let b: Vec<f32> = (0..width).map(|_| (random.next() * 4.0 - 2.0) as f32).collect();
        let grow = position as f64 / shape.tokens as f64;
        let a: Vec<f32> = b
            .iter()
            .enumerate()
            .map(|(i, b)| {
                b + (distance * grow * (random.next() - 0.5) * (1.0 + (i % 64) as f64 / 8.0)) as f32
            })
            .collect();
        sketch.row(position as u32, &a, &b);
    }
    Some(sketch.finish())
}

fn tokens(shape: Shape, wrong: bool, random: &mut Random) -> TokenReport {
    let shift = if wrong { 1.4 } else { 1e-6 };
    TokenReport {
        top1_agree: if wrong { 0.8 } else { 1.0 },
        kl_mean: if wrong { 0.052 } else { 3.1e-12 },
        kl_max: if wrong { 0.31 } else { 8e-12 },
        top_k_agree: if wrong { 0.7 } else { 1.0 },
        top_k: 5,
        first_flip: wrong.then_some(Flip {
            position: 9,
            candidate: 284,
            reference: 369,
            margin: 0.9,
            logit_error: 2.4,
            explained_by_error: true,
        }),
        chosen: Vec::new(),
        top: [(369, " for"), (284, " ="), (421, " return"), (262, "   "), (2, "<|\"&>")]
            .iter()
            .enumerate()
            .map(|(rank, &(token, text))| TopToken {
                token,
                text: Some(text.to_owned()),
                candidate: 18.0 - rank as f64 * 1.1 + shift * (random.next() - 0.5),
                reference: 18.0 - rank as f64 * 1.1,
            })
            .collect(),
        kl_rows: (0..shape.tokens as u32)
            .map(|position| (position, if wrong { 0.1 * random.next() } else { 1e-11 * random.next() }))
            .collect(),
    }
}

fn side(name: &str, version: &str, numerics: &str, shape: Shape) -> Side {
    let prefill = shape.tokens / 2;
    let mut steps = vec![prefill];
    steps.resize(1 + shape.tokens - prefill, 1);
    Side {
        path: Some(format!("out/{name}")),
        producer: Producer {
            name: name.to_owned(),
            version: Some(version.to_owned()),
            backend: Some("cpu".to_owned()),
            device: Some("made-up 8-core".to_owned()),
            numerics: Some(numerics.to_owned()),
        },
        model: ModelInfo {
            file: Some("qwen2-tiny-py-F16.gguf".to_owned()),
            fingerprint: Some("sha256:0f0f".to_owned()),
            architecture: Some("qwen2".to_owned()),
            name: Some("qwen2 tiny py".to_owned()),
        },
        tokens: shape.tokens,
        steps,
        provenance: [("threads".to_owned(), "2".to_owned())].into(),
    }
}
