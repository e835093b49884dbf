//! Mistakes in rotary position embedding.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, input, integer, number, output, when};
use crate::checkpoint::Kind;
use crate::faults::spell;
use crate::model::edit::Change;
use crate::model::graph::{Anchor, BySteps, Node, Op, Pairing, Position, Rope};

const HOME: Home = Home::All(&[Kind::QRope, Kind::KRope]);

fn rope(node: &mut Node) -> Option<&mut Rope> {
    match &mut node.op {
        Op::Rope(rope) => Some(rope),
        _ => None,
    }
}

/// Positions that are off by a constant.
pub fn shifted(offset: i64) -> Position {
    Position { offset, ..Position::OWN }
}

fn base_of(node: &Node) -> f64 {
    match &node.op {
        // The file holds an f32: 1000000, not 1000000.0000001.
        Op::Rope(rope) => f64::from(rope.base as f32),
        _ => f64::NAN,
    }
}

/// A factor as a ratio of whole numbers, one of them a power of two where neither is 1.
fn ratio(factor: f64) -> Option<(u32, u32)> {
    const DENOMINATOR: f64 = 1024.0;
    when(factor > 0.0 && factor != 1.0 && factor < 1e6)?;
    if (1.0 / factor).fract() == 0.0 && factor > 1e-6 {
        return Some((1, (1.0 / factor) as u32));
    }
    Some(((factor * DENOMINATOR).round() as u32, DENOMINATOR as u32)).filter(|(n, d)| *n > 0 && n != d)
}

/// Pairs neighbours of rows whose heads lie in halves, where the model's lie in pairs: the rows are laid so, turned and
/// laid back.
fn neighbours_of_halves(site: &Site<'_>, node: &mut Node) -> Option<()> {
    let width = site.model.config.dims.width(node.checkpoint.kind(), 0) as u32;
    let own = rope(node)?;
    let head = own.head_width as u32;
    when(own.pairing == Pairing::Interleaved && head.is_multiple_of(2) && own.dims == own.head_width)?;
    let half = head / 2;
    let laid = (0..width).map(|c| c / head * head + c % head % half * 2 + c % head / half).collect();
    let back = (0..width).map(|c| c / head * head + c % head % 2 * half + c % head / 2).collect();
    input(node, 0, Change::Columns(laid))?;
    output(node, Change::Columns(back))
}

/// Rotates v as the layer's queries are rotated.
fn on_v(site: &Site<'_>, node: &mut Node) -> Option<()> {
    when(node.checkpoint.kind() == Kind::V)?;
    let rope = site.rope(node.checkpoint.layer_index())?;
    output(node, Change::Rope(rope))
}

/// Faults of `q_rope` and `k_rope`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "rope.base",
        summary: "another base than the model's",
        place: "the default 10000 of early Llama where the file says {arch}.rope.freq_base",
        fix: "read {arch}.rope.freq_base from the file",
        parameter: number("base"),
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, argument| {
            let base = argument.number().filter(|base| *base > 0.0)?;
            rope(node)?.base = base;
            Some(())
        },
        default: |_, node| match base_of(node) {
            10_000.0 => Some(Argument::Number(1e6)),
            base if base.is_nan() => None,
            _ => Some(Argument::Number(10_000.0)),
        },
        guess: Some(diagnose::rope_base),
        sentence: |_, node, argument| {
            let base = argument.number().map_or(String::new(), spell);
            format!("RoPE base is {base}, the model says {}", spell(base_of(node)))
        },
    },
    Fault {
        name: "rope.scaled",
        summary: "positions are multiplied by a factor, as in linear RoPE scaling",
        place: "rope.scaling applied to a model that was not trained with it, or a factor inverted",
        fix: "use a factor only where the file has {arch}.rope.scaling",
        parameter: number("factor"),
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, argument| {
            let (numerator, denominator) = ratio(argument.number()?)?;
            rope(node)?.position =
                BySteps::all(Position { times: (numerator, denominator), ..Position::OWN });
            Some(())
        },
        default: |_, node| when(matches!(node.op, Op::Rope(_))).map(|()| Argument::Number(0.25)),
        guess: Some(diagnose::rope_factor),
        sentence: |_, _, argument| format!("positions are multiplied by {argument} before RoPE"),
    },
    Fault {
        name: "rope.interleaved",
        summary: "neighbouring columns are paired where halves should be, or the reverse",
        place: "GPT-J's pairing for NeoX's: llama files pair neighbours (2i, 2i + 1), qwen2 and qwen3 pair halves",
        fix: "pair as llama.cpp's llama_model_rope_type says for the architecture",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |site, node, argument| {
            if let Argument::Tensor(_) = argument {
                return neighbours_of_halves(site, node);
            }
            let rope = rope(node)?;
            rope.pairing = match rope.pairing {
                Pairing::Half => Pairing::Interleaved,
                Pairing::Interleaved => Pairing::Half,
            };
            Some(())
        },
        guess: Some(diagnose::pairings),
        sentence: |_, node, argument| {
            match &node.op {
            _ if matches!(argument, Argument::Tensor(_)) => {
                "RoPE pairs neighbours (2i, 2i + 1) of rows in Hugging Face order, which pair halves (i, i + d/2)"
                    .to_owned()
            }
            Op::Rope(Rope { pairing: Pairing::Half, .. }) => {
                "RoPE pairs neighbours (2i, 2i + 1), the model pairs halves (i, i + d/2)".to_owned()
            }
            _ => "RoPE pairs halves (i, i + d/2), the model pairs neighbours (2i, 2i + 1)".to_owned(),
        }
        },
        ..PLAIN
    },
    Fault {
        name: "rope.position_shift",
        summary: "every row is rotated for the position before or after its own",
        place: "positions counted from 1, or a BOS counted twice",
        fix: "the first token has position 0",
        parameter: integer("positions"),
        home: HOME,
        change: |_, node, argument| {
            let shift = argument.integer().filter(|shift| *shift != 0)?;
            rope(node)?.position = BySteps::all(shifted(shift));
            Some(())
        },
        default: |_, node| when(matches!(node.op, Op::Rope(_))).map(|()| Argument::Number(1.0)),
        guess: Some(diagnose::position_shift),
        sentence: |_, _, argument| {
            format!("rows are rotated for the position {:+} from their own", argument.integer().unwrap_or(0))
        },
        ..PLAIN
    },
    Fault {
        name: "rope.position_zero",
        summary: "every row is rotated for position 0",
        place: "a position that is never advanced, or positions that were not handed to the kernel",
        fix: "hand each row its own position",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, _| {
            rope(node)?.position = BySteps::all(Position { times: (0, 1), ..Position::OWN });
            Some(())
        },
        sentence: |_, _, _| "the position is stuck at 0: no row is rotated".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "rope.position_in_step",
        summary: "positions start at 0 again in every step",
        place: "decode that forgets how many tokens are cached (seqlen_offset, past_length, start_pos)",
        fix: "add the number of cached tokens to the row's index in its step",
        home: HOME,
        silent: Some("in the first step: it shows in decode"),
        change: |_, node, _| {
            rope(node)?.position = BySteps::all(Position { from: Anchor::Step, ..Position::OWN });
            Some(())
        },
        sentence: |_, _, _| {
            "positions start at 0 again in every step: the cached tokens are not counted".to_owned()
        },
        ..PLAIN
    },
    Fault {
        name: "rope.decode_shift",
        summary: "positions are off by a constant in every step after the first",
        place: "a token count that already includes the token about to be computed",
        fix: "the first decoded token's position is the number of tokens before it",
        parameter: integer("positions"),
        home: HOME,
        silent: Some("in the first step: it shows in decode"),
        change: |_, node, argument| {
            let shift = argument.integer().filter(|shift| *shift != 0)?;
            rope(node)?.position.later = shifted(shift);
            Some(())
        },
        default: |_, node| when(matches!(node.op, Op::Rope(_))).map(|()| Argument::Number(1.0)),
        guess: Some(diagnose::decode_shift),
        sentence: |_, _, argument| {
            let shift = argument.integer().unwrap_or(0);
            format!("after the first step, rows are rotated for the position {shift:+} from their own")
        },
    },
    Fault {
        name: "rope.sign",
        summary: "rows are rotated backwards",
        place: "the sign of the sine in the rotation matrix",
        fix: "(a, b) -> (a·cos - b·sin, a·sin + b·cos)",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, _| {
            let rope = rope(node)?;
            rope.sign = -rope.sign;
            Some(())
        },
        sentence: |_, _, _| "RoPE rotates backwards: the sign of the sine is wrong".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "rope.none",
        summary: "RoPE is left out",
        place: "a branch that is skipped for one of Q and K, or in one of prefill and decode",
        fix: "rotate Q and K before the scores",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, _| {
            rope(node)?.times = 0;
            Some(())
        },
        sentence: |_, _, _| "RoPE is left out".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "rope.twice",
        summary: "RoPE is applied twice",
        place: "keys rotated before they enter the cache and again when they are read",
        fix: "rotate once",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, _| {
            rope(node)?.times = 2;
            Some(())
        },
        sentence: |_, _, _| "RoPE is applied twice".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "rope.partial",
        summary: "only some leading columns of a head are rotated",
        place: "a partial rotary factor of another model (Phi, GPT-NeoX)",
        fix: "rotate {arch}.rope.dimension_count columns, or all where the key is absent",
        parameter: integer("columns"),
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, argument| {
            let rope = rope(node)?;
            let dims = usize::try_from(argument.integer()?).ok()?;
            when(dims > 0 && dims.is_multiple_of(2) && dims <= rope.head_width && dims != rope.dims)?;
            rope.dims = dims;
            Some(())
        },
        default: |_, node| match &node.op {
            Op::Rope(rope) if rope.dims >= 4 => Some(Argument::Number((rope.dims / 4 * 2) as f64)),
            _ => None,
        },
        guess: Some(diagnose::rope_dims),
        sentence: |_, node, argument| {
            let dims = if let Op::Rope(rope) = &node.op { rope.dims } else { 0 };
            format!("RoPE rotates {argument} columns of a head, the model says {dims}")
        },
    },
    Fault {
        name: "rope.no_freqs",
        summary: "the file's frequency factors are not used",
        place: "rope_freqs.weight of Llama 3.1 and later is not loaded",
        fix: "divide the angle of pair i by rope_freqs.weight[i]",
        home: HOME,
        silent: Some("at position 0, which is not rotated"),
        change: |_, node, _| rope(node)?.freqs.take().map(|_| ()),
        sentence: |_, _, _| "RoPE does not use rope_freqs.weight".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "rope.on_v",
        summary: "the values are rotated like the keys",
        place: "a fused QKV row that is rotated as a whole",
        fix: "rotate Q and K only",
        home: Home::First(&[Kind::V]),
        silent: Some("at position 0, which is not rotated"),
        change: |site, node, _| on_v(site, node),
        sentence: |_, _, _| "RoPE is applied to the values".to_owned(),
        ..PLAIN
    },
];
