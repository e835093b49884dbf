//! Mistakes that are in no catalogue: located at their node, and given no name.

use parity::checkpoint::{Checkpoint, Kind};
use parity::gguf::Gguf;
use parity::ops::Args;

use crate::support::injected::{Made, Ran, run_with};
use crate::support::runs::{Random, gguf, path};
use crate::support::samples::sample;

/// Rows of tokens.
struct Rows {
    cols: usize,
    rows: usize,
    data: Vec<f32>,
}

impl Rows {
    fn of(data: &[f32], cols: usize) -> Rows {
        Rows { cols, rows: data.len() / cols, data: data.to_vec() }
    }

    fn row(&self, t: usize) -> &[f32] {
        &self.data[t * self.cols..(t + 1) * self.cols]
    }

    fn row_mut(&mut self, t: usize) -> &mut [f32] {
        &mut self.data[t * self.cols..(t + 1) * self.cols]
    }
}

/// What a mistake is made with.
struct Given<'a> {
    args: &'a Args<'a, f32>,
    gguf: &'a Gguf,
    kind: Kind,
}

impl Given<'_> {
    /// What a slot reads, in rows of tokens.
    fn input(&self, slot: usize) -> Rows {
        let source = self.args.get(slot).unwrap();
        Rows::of(&source.values(), columns(self.kind, source.shape()))
    }

    /// Columns of one head.
    fn head(&self) -> usize {
        self.args.shape[3]
    }
}

/// Columns of a row: (1, 1, T, columns), or by heads (1, T, heads, columns of one).
fn columns(kind: Kind, [.., rows, columns]: [usize; 4]) -> usize {
    if matches!(kind, Kind::QRope | Kind::KRope | Kind::AttnCtx) { rows * columns } else { columns }
}

/// Mistakes of each model in the quick tests.
const QUICK: usize = 8;

type Mistake = fn(&mut Rows, &Given<'_>);

fn each(out: &mut Rows, f: impl Fn(usize, f32) -> f32) {
    let width = out.cols;
    for row in out.data.chunks_exact_mut(width) {
        row.iter_mut().enumerate().for_each(|(c, x)| *x = f(c, *x));
    }
}

const STRANGE: &[(&str, Kind, Mistake)] = &[
    ("an input column of the weight zeroed", Kind::QProj, |out, given| {
        let tensor = given.gguf.tensor("blk.1.attn_q.weight").unwrap();
        let (weight, cols): (Vec<f32>, usize) = (tensor.decode(), tensor.cols());
        let inputs = given.input(1);
        for t in 0..out.rows {
            let x = inputs.row(t)[17];
            out.row_mut(t).iter_mut().enumerate().for_each(|(o, y)| *y -= x * weight[o * cols + 17]);
        }
    }),
    ("two heads averaged", Kind::AttnCtx, |out, given| {
        let width = given.head();
        for t in 0..out.rows {
            for c in 0..width {
                let mean = (out.row(t)[c] + out.row(t)[width + c]) / 2.0;
                out.row_mut(t)[c] = mean;
                out.row_mut(t)[width + c] = mean;
            }
        }
    }),
    ("tanh after the feed-forward part", Kind::FfnOut, |out, _| each(out, |_, x| x.tanh())),
    ("clipped", Kind::FfnAct, |out, _| each(out, |_, x| x.clamp(-0.05, 0.05))),
    ("the first half negated", Kind::K, |out, _| {
        let half = out.cols / 2;
        each(out, |c, x| if c < half { -x } else { x });
    }),
    ("every third column zero", Kind::V, |out, _| each(out, |c, x| if c % 3 == 0 { 0.0 } else { x })),
    ("divided by the largest and not by the root mean square", Kind::AttnNorm, |out, _| {
        for t in 0..out.rows {
            let max = out.row(t).iter().fold(0.0f32, |max, x| max.max(x.abs()));
            out.row_mut(t).iter_mut().for_each(|x| *x /= max);
        }
    }),
    ("the mean subtracted", Kind::AttnOut, |out, _| {
        for t in 0..out.rows {
            let mean = out.row(t).iter().sum::<f32>() / out.cols as f32;
            out.row_mut(t).iter_mut().for_each(|x| *x -= mean);
        }
    }),
    ("a tenth of the neighbour added", Kind::FfnUp, |out, _| {
        for t in 0..out.rows {
            let old = out.row(t).to_vec();
            let n = old.len();
            out.row_mut(t).iter_mut().enumerate().for_each(|(c, x)| *x += 0.1 * old[(c + 1) % n]);
        }
    }),
    ("x·|x|", Kind::LayerOut, |out, _| each(out, |_, x| x * x.abs())),
    ("soft cap", Kind::Logits, |out, _| each(out, |_, x| 5.0 * (x / 5.0).tanh())),
    ("every other head not turned", Kind::QRope, |out, given| {
        let (width, inputs) = (given.head(), given.input(0));
        for t in 0..out.rows {
            let x = inputs.row(t);
            out.row_mut(t)
                .iter_mut()
                .enumerate()
                .filter(|(c, _)| c / width % 2 == 1)
                .for_each(|(c, y)| *y = x[c]);
        }
    }),
    ("every other column not turned", Kind::KRope, |out, given| {
        let inputs = given.input(0);
        for t in 0..out.rows {
            let x = inputs.row(t);
            out.row_mut(t).iter_mut().enumerate().filter(|(c, _)| c % 2 == 1).for_each(|(c, y)| *y = x[c]);
        }
    }),
    ("0.9 of the branch and 1.1 of the residual", Kind::AttnResidual, |out, given| {
        let [branch, residual] = [given.input(0), given.input(1)];
        let sums = branch.data.iter().zip(&residual.data);
        out.data.iter_mut().zip(sums).for_each(|(y, (a, b))| *y = 0.9 * a + 1.1 * b);
    }),
    ("rounded to sixteenths", Kind::FfnGate, |out, _| each(out, |_, x| (x * 16.0).round() / 16.0)),
    ("half of the row before added", Kind::VProj, |out, _| {
        for t in (1..out.rows).rev() {
            let before = out.row(t - 1).to_vec();
            out.row_mut(t).iter_mut().zip(before).for_each(|(x, b)| *x += 0.5 * b);
        }
        // A step of one row has none before: the first column stands for it.
        out.row_mut(0)[0] += 1.0;
    }),
    ("one percent more in the upper half", Kind::FinalNorm, |out, _| {
        let half = out.cols / 2;
        each(out, |c, x| if c < half { x } else { 1.01 * x });
    }),
    ("noise", Kind::KProj, |out, _| {
        let mut random = Random(9);
        out.data.iter_mut().for_each(|x| *x *= 0.99 + 0.02 * random.below(1000) as f32 / 1000.0);
    }),
    ("absolute values", Kind::Embed, |out, _| each(out, |_, x| x.abs())),
    ("the gate squared", Kind::FfnAct, |out, given| {
        out.data.iter_mut().zip(given.input(0).data).for_each(|(y, g)| *y *= g);
    }),
    ("a step of the cube", Kind::FfnNorm, |out, _| each(out, |_, x| x + 0.05 * x * x * x)),
];

#[test]
fn strange_mistakes_are_located_and_not_named() {
    assert!(STRANGE.len() >= 20);
    let mut failures = Vec::new();
    let mut random = Random(11);
    for name in ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"] {
        let Some(path) = path(name) else { return eprintln!("SKIP: {name} is not there") };
        let file = Gguf::open(&path).unwrap();
        for (what, kind, mistake) in sample("strange mistakes", QUICK, STRANGE) {
            let at = if kind.in_layer() { Checkpoint::layer(*kind, 1) } else { Checkpoint::global(*kind) };
            let tokens = random.tokens(9, 4000);
            let strange = |id: Checkpoint, args: &Args<'_, f32>, values: &[f32]| {
                let mut out = Rows::of(values, columns(*kind, args.shape));
                (id == at).then(|| {
                    mistake(&mut out, &Given { args, gguf: &file, kind: *kind });
                    out.data
                })
            };
            let how = Made { tokens: &tokens, prompt: 6, flash: true };
            let (ran, _) = run_with(gguf(name).unwrap(), &how, &[], &strange, &|_| true).unwrap();
            let findings = ran.declaring("f32").audit();
            let origins = Ran::origins(&findings);
            if origins != [at] {
                failures.push(format!("{name}: {what} at {at}: located at {origins:?}"));
                continue;
            }
            let finding = &findings.nodes[&at];
            let ((named, tried), residual) = (finding.diagnosis(), finding.residual());
            println!("{at}: {what}: {}", residual.as_deref().unwrap_or_default());
            if *kind == Kind::QProj {
                let said = residual.unwrap_or_default();
                assert!(said.contains("it grows with column 17 of blk.1.attn_norm"), "{said}");
            }
            if !named.is_empty() {
                failures.push(format!("{name}: {what} at {at}: named {named:?}"));
            }
            assert!(!tried.is_empty(), "{what}");
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
