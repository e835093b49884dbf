//! Mistakes that are in no catalogue: located at their node, and given no name.

use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::fused::Model;
use parity::tensor::{Matrix, View};

use crate::support::runs::{Random, audit_all, diagnose_at, model, run_strange};

type Mistake = fn(&mut Matrix<f32>, &[View<'_, f32>], &Model);

fn each(out: &mut Matrix<f32>, f: impl Fn(usize, f32) -> f32) {
    let width = out.cols;
    for row in out.data.chunks_exact_mut(width) {
        row.iter_mut().enumerate().for_each(|(c, x)| *x = f(c, *x));
    }
}

const STRANGE: &[(&str, Kind, Mistake)] = &[
    ("an input column of the weight zeroed", Kind::QProj, |out, inputs, model| {
        let tensor = model.gguf.tensor("blk.1.attn_q.weight").unwrap();
        let (weight, cols): (Vec<f32>, usize) = (tensor.decode(), tensor.cols());
        for t in 0..out.rows {
            let x = inputs[0].row(t)[17];
            out.row_mut(t).iter_mut().enumerate().for_each(|(o, y)| *y -= x * weight[o * cols + 17]);
        }
    }),
    ("two heads averaged", Kind::AttnCtx, |out, _, model| {
        let width = model.config.dims.head_width;
        for t in 0..out.rows {
            for c in 0..width {
                let mean = (out.row(t)[c] + out.row(t)[width + c]) / 2.0;
                out.row_mut(t)[c] = mean;
                out.row_mut(t)[width + c] = mean;
            }
        }
    }),
    ("tanh after the feed-forward part", Kind::FfnOut, |out, _, _| each(out, |_, x| x.tanh())),
    ("clipped", Kind::FfnAct, |out, _, _| each(out, |_, x| x.clamp(-0.05, 0.05))),
    ("the first half negated", Kind::K, |out, _, _| {
        let half = out.cols / 2;
        each(out, |c, x| if c < half { -x } else { x });
    }),
    ("every third column zero", Kind::V, |out, _, _| each(out, |c, x| if c % 3 == 0 { 0.0 } else { x })),
    ("divided by the largest and not by the root mean square", Kind::AttnNorm, |out, _, _| {
        for t in 0..out.rows {
            let max = out.row(t).iter().fold(0.0f32, |max, x| max.max(x.abs()));
            out.row_mut(t).iter_mut().for_each(|x| *x /= max);
        }
    }),
    ("the mean subtracted", Kind::AttnOut, |out, _, _| {
        for t in 0..out.rows {
            let mean = out.row(t).iter().sum::<f32>() / out.cols as f32;
            out.row_mut(t).iter_mut().for_each(|x| *x -= mean);
        }
    }),
    ("a tenth of the neighbour added", Kind::FfnUp, |out, _, _| {
        for t in 0..out.rows {
            let old = out.row(t).to_vec();
            let n = old.len();
            out.row_mut(t).iter_mut().enumerate().for_each(|(c, x)| *x += 0.1 * old[(c + 1) % n]);
        }
    }),
    ("x·|x|", Kind::LayerOut, |out, _, _| each(out, |_, x| x * x.abs())),
    ("soft cap", Kind::Logits, |out, _, _| each(out, |_, x| 5.0 * (x / 5.0).tanh())),
    ("every other head not turned", Kind::QRope, |out, inputs, model| {
        let width = model.config.dims.head_width;
        for t in 0..out.rows {
            let x = inputs[0].row(t);
            out.row_mut(t)
                .iter_mut()
                .enumerate()
                .filter(|(c, _)| c / width % 2 == 1)
                .for_each(|(c, y)| *y = x[c]);
        }
    }),
    ("every other column not turned", Kind::KRope, |out, inputs, _| {
        for t in 0..out.rows {
            let x = inputs[0].row(t);
            out.row_mut(t).iter_mut().enumerate().filter(|(c, _)| c % 2 == 1).for_each(|(c, y)| *y = x[c]);
        }
    }),
    ("0.9 of the branch and 1.1 of the residual", Kind::AttnResidual, |out, inputs, _| {
        let sums = inputs[0].data.iter().zip(inputs[1].data);
        out.data.iter_mut().zip(sums).for_each(|(y, (a, b))| *y = 0.9 * a + 1.1 * b);
    }),
    ("rounded to sixteenths", Kind::FfnGate, |out, _, _| each(out, |_, x| (x * 16.0).round() / 16.0)),
    ("half of the row before added", Kind::VProj, |out, _, _| {
        for t in (1..out.rows).rev() {
            let before = out.row(t - 1).to_vec();
            out.row_mut(t).iter_mut().zip(before).for_each(|(x, b)| *x += 0.5 * b);
        }
        // A step of one row has none before: the first column stands for it.
        out.row_mut(0)[0] += 1.0;
    }),
    ("one percent more in the upper half", Kind::FinalNorm, |out, _, _| {
        let half = out.cols / 2;
        each(out, |c, x| if c < half { x } else { 1.01 * x });
    }),
    ("noise", Kind::KProj, |out, _, _| {
        let mut random = Random(9);
        out.data.iter_mut().for_each(|x| *x *= 0.99 + 0.02 * random.below(1000) as f32 / 1000.0);
    }),
    ("the last head left at zero", Kind::AttnCtx, |out, _, model| {
        let start = out.cols - model.config.dims.head_width;
        each(out, |c, x| if c >= start { 0.0 } else { x });
    }),
    ("absolute values", Kind::Embed, |out, _, _| each(out, |_, x| x.abs())),
    ("the gate squared", Kind::FfnAct, |out, inputs, _| {
        out.data.iter_mut().zip(inputs[0].data).for_each(|(y, g)| *y *= g);
    }),
    ("a step of the cube", Kind::FfnNorm, |out, _, _| each(out, |_, x| x + 0.05 * x * x * x)),
];

#[test]
fn strange_mistakes_are_located_and_not_named() {
    let mut failures = Vec::new();
    let mut random = Random(11);
    for name in ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"] {
        let Some(model) = model(name) else { return eprintln!("SKIP: {name} is not there") };
        for (what, kind, mistake) in STRANGE {
            let at = if kind.in_layer() { Checkpoint::layer(*kind, 1) } else { Checkpoint::global(*kind) };
            let tokens = random.tokens(9, model.config.dims.vocab);
            let kept = run_strange(&model, &tokens, 6, at, mistake);
            let origins: Vec<Checkpoint> = audit_all(&model, &kept).origins().collect();
            if origins != [at] {
                failures.push(format!("{name}: {what} at {at}: located at {origins:?}"));
                continue;
            }
            let found = diagnose_at(&model, &kept, at);
            println!("{at}: {what}: {}", found.residual.as_deref().unwrap_or_default());
            if *kind == Kind::QProj {
                let said = found.residual.unwrap_or_default();
                assert!(said.contains("it grows with column 17 of blk.1.attn_norm"), "{said}");
            }
            if !found.diagnosis.is_empty() {
                failures.push(format!("{name}: {what} at {at}: named {:?}", found.diagnosis));
            }
            assert!(!found.tried.is_empty() || !found.diagnosis.is_empty(), "{what}");
        }
    }
    assert!(STRANGE.len() >= 20);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
