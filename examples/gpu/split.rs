//! A model whose layers are split over two GPUs, compared with the same model on one: bits and speed.

use std::path::Path;

use parity::checkpoint::Kind;
use parity::engine::cuda::{Cards, count, supported};
use parity::engine::fused::Model;
use parity::engine::{Batch, Engine};
use parity::numerics::Numerics;
use serde_json::{Value, json};

use crate::common::{Outcome, gpu, nothing, prompt_and_steps, tokens, write};
use crate::speed::{ALL_BUT_LOGITS, decode, prefill};

/// How often both are measured, by turns.
const PAIRS: usize = 7;
/// The smallest speed of two GPUs, as a share of one's: at most 3 % are for handing over.
const SHARE_MIN: f64 = 1.0 - 0.03;
/// Tokens of the prefill.
const PROMPT: usize = 512;
/// Decode steps whose logits are compared.
const STEPS: usize = 8;

/// Both, exact and fast; an error where bits differ or two are slower than they may be.
pub fn split(out: &str, path: &str) -> Outcome {
    if count() < 2 {
        return Err(format!("two GPUs are needed, and there are {}", count()).into());
    }
    let model = Model::open(Path::new(path))?;
    let (mut body, mut failures) = (json!({}), Vec::new());
    for numerics in ["f32", "f16"] {
        let mut one = gpu(&model, &model.graph, numerics)?;
        let arithmetic = supported(numerics.parse::<Numerics>()?)?;
        let mut two = Cards::new(&model.gguf, model.graph.clone(), &[0, 1], arithmetic)?;
        body["devices"] = json!(two.producer().device);
        body["layers"] = json!(two.layers());
        let same = logits(&mut one)? == logits(&mut two)?;
        body[numerics]["same_logits_bits"] = json!(same);
        if !same {
            failures.push(format!("{numerics}: logits have other bits"));
        }
        let looks = [("untraced", (|_| false) as fn(Kind) -> bool), ("traced", ALL_BUT_LOGITS)];
        for (name, wants) in looks {
            let entry = by_turns(&mut one, &mut two, wants)?;
            for test in ["pp512", "tg64"] {
                let share = entry[test]["median_share"].as_f64().ok_or("no median")?;
                println!("{numerics} {name} {test}: {share:.3} of one GPU's speed");
                if !(share >= SHARE_MIN) {
                    failures.push(format!("{numerics} {name} {test}: {share:.3} of one GPU's speed"));
                }
            }
            body[numerics][name] = entry;
        }
    }
    body["share_at_least"] = json!(SHARE_MIN);
    body["failures"] = json!(failures);
    write(out, &model, body)?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

/// Bits of the logits of a prefill and of the decode steps behind it.
fn logits(engine: &mut dyn Engine) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
    let (tokens, mut bits) = (tokens(PROMPT + STEPS), Vec::new());
    engine.reset();
    for step in prompt_and_steps(PROMPT, PROMPT + STEPS) {
        let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
        let logits = engine.step(&batch, &mut nothing())?.ok_or("no logits")?;
        bits.extend(logits.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

/// Prefill and decode of both by turns, who is first changing: what was measured, and the shares of one GPU's speed.
fn by_turns(
    one: &mut dyn Engine,
    two: &mut dyn Engine,
    wants: fn(Kind) -> bool,
) -> Result<Value, Box<dyn std::error::Error>> {
    let mut body = json!({});
    for (test, is_prefill) in [("pp512", true), ("tg64", false)] {
        let mut measured: [Vec<Value>; 2] = Default::default();
        for pair in 0..PAIRS {
            for turn in 0..2 {
                let which = (pair + turn) % 2;
                let engine: &mut dyn Engine = if which == 0 { &mut *one } else { &mut *two };
                let found = if is_prefill { prefill(engine, wants, PROMPT)? } else { decode(engine, wants)? };
                measured[which].push(found);
            }
        }
        let speed = |entry: &Value| entry["tokens_per_second"].as_f64().unwrap_or(f64::NAN);
        let mut shares: Vec<f64> =
            measured[0].iter().zip(&measured[1]).map(|(one, two)| speed(two) / speed(one)).collect();
        let in_order = shares.clone();
        shares.sort_by(f64::total_cmp);
        let [one, two] = measured;
        body[test] = json!({
            "one": one, "two": two, "shares": in_order, "median_share": shares[PAIRS / 2],
            "smallest": shares[0], "largest": shares[PAIRS - 1],
        });
    }
    Ok(body)
}
