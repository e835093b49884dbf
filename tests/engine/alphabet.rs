//! Parameters of the engines' nodes are plain numbers: what rows see and which positions they are rotated by, in the
//! first step of a sequence and in those after it.

use std::ops::Range;
use std::path::Path;

use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::fused::Model;
use parity::engine::fused::graph::{
    Anchor, Attention, BySteps, Edge, Mask, Node, Op, Pairing, Position, Rope, ScoreLimit,
};
use parity::engine::fused::{Inputs, Rows, execute};
use parity::numerics::Numerics;
use parity::tensor::Matrix;

/// Positions of a prefill of three tokens, and of a second step of two.
const STEPS: [Range<u32>; 2] = [0..3, 3..5];

fn model() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf");
    Model::open(&path).unwrap()
}

/// What a node of one input gives in a step.
fn output(kind: Kind, op: Op, step: &Range<u32>, input: Matrix<f64>) -> Matrix<f64> {
    let positions: Vec<u32> = step.clone().collect();
    let tokens = vec![7; positions.len()];
    let steps = vec![step.clone(); positions.len()];
    let rows = Rows { tokens: &tokens, positions: &positions, steps: &steps };
    let checkpoint = Checkpoint::layer(kind, 0);
    let node = Node { checkpoint, op, inputs: vec![checkpoint] };
    let inputs = Inputs { rows, values: &[input.view()] };
    execute(&node, &model().gguf, inputs, &Numerics::default()).unwrap()
}

/// The positions that each row of both steps sees.
fn seen(mask: BySteps<Mask>) -> Vec<Vec<usize>> {
    let op = Attention {
        heads: 1,
        kv_heads: 1,
        head_width: 1,
        scale: 1.0,
        group: 1,
        mask,
        softmax: false,
        limit: ScoreLimit::None,
    };
    let of_step = |step: &Range<u32>| {
        let cached = step.end as usize;
        let ones = Matrix::new(step.len(), cached, vec![1.0; step.len() * cached]);
        let out = output(Kind::AttnProbs, Op::Softmax(op.clone()), step, ones);
        (0..out.rows)
            .map(|t| (0..cached).filter(|s| out.row(t)[*s] == 1.0).collect())
            .collect::<Vec<Vec<usize>>>()
    };
    STEPS.iter().flat_map(of_step).collect()
}

#[test]
fn what_a_row_sees_is_counted_from_its_step_from_itself_or_from_the_ends() {
    let all = |mask: Mask| seen(BySteps::all(mask));
    let until = |from, offset| Mask { behind: Edge::new(from, offset), ..Mask::CAUSAL };
    let since = |from, offset| Mask { first: Edge::new(from, offset), ..Mask::CAUSAL };
    let rows = |rows: [Range<usize>; 5]| rows.map(|row| row.collect::<Vec<usize>>()).to_vec();
    assert_eq!(all(Mask::CAUSAL), rows([0..1, 0..2, 0..3, 0..4, 0..5]));
    assert_eq!(all(until(Anchor::End, 0)), rows([0..3, 0..3, 0..3, 0..5, 0..5]));
    assert_eq!(all(until(Anchor::Row, 2)), rows([0..2, 0..3, 0..3, 0..5, 0..5]));
    assert_eq!(all(until(Anchor::Row, -1)), rows([0..0, 0..0, 0..1, 0..2, 0..3]));
    assert_eq!(all(since(Anchor::Step, 0)), rows([0..1, 0..2, 0..3, 3..4, 3..5]));
    assert_eq!(all(since(Anchor::Row, -1)), rows([0..1, 0..2, 1..3, 2..4, 3..5]), "a window of two");
    let before = BySteps { first: Mask::CAUSAL, later: until(Anchor::Step, 0) };
    assert_eq!(seen(before), rows([0..1, 0..2, 0..3, 0..3, 0..3]));
    assert_eq!(before.same(), None);
    assert_eq!(BySteps::all(Mask::CAUSAL).same(), Some(Mask::CAUSAL));
}

/// The angles by which a pair of columns is rotated, in units of a position, in each row of both steps.
fn angles(position: BySteps<Position>) -> Vec<f64> {
    // One pair, whose rate is 1.
    let rope = Rope {
        base: 1e4,
        head_width: 2,
        dims: 2,
        pairing: Pairing::Half,
        freqs: None,
        position,
        sign: 1,
        times: 1,
    };
    let of_step = |step: &Range<u32>| {
        let input = Matrix::new(step.len(), 2, [1.0, 0.0].repeat(step.len()));
        let out = output(Kind::QRope, Op::Rope(rope.clone()), step, input);
        (0..out.rows).map(|t| out.row(t)[1].atan2(out.row(t)[0])).collect::<Vec<f64>>()
    };
    STEPS.iter().flat_map(of_step).collect()
}

#[test]
fn the_position_of_a_rotation_is_counted_from_the_start_or_from_the_step() {
    let near = |found: Vec<f64>, expected: [f64; 5]| {
        // Angles beyond π come back as what is left of a turn.
        let turned = |angle: f64| angle.sin().atan2(angle.cos());
        let apart = found.iter().zip(expected).map(|(a, b)| (a - turned(b)).abs()).fold(0.0, f64::max);
        // A sine, a cosine and an arc tangent in f64, of a few units each.
        assert!(apart <= 8.0 * f64::EPSILON * std::f64::consts::PI, "{found:?}, expected {expected:?}");
    };
    let moved = |offset| Position { offset, ..Position::OWN };
    near(angles(BySteps::all(Position::OWN)), [0.0, 1.0, 2.0, 3.0, 4.0]);
    near(angles(BySteps::all(moved(-1))), [-1.0, 0.0, 1.0, 2.0, 3.0]);
    near(angles(BySteps { first: Position::OWN, later: moved(2) }), [0.0, 1.0, 2.0, 5.0, 6.0]);
    let scaled = |times| BySteps::all(Position { times, ..Position::OWN });
    near(angles(scaled((1, 4))), [0.0, 0.25, 0.5, 0.75, 1.0]);
    near(angles(scaled((0, 1))), [0.0; 5]);
    let in_step = Position { from: Anchor::Step, ..Position::OWN };
    near(angles(BySteps::all(in_step)), [0.0, 1.0, 2.0, 0.0, 1.0]);
}
