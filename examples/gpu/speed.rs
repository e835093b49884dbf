//! Speed of prefill and decode, with and without every checkpoint read back to the host.

use std::path::Path;
use std::time::Instant;

use parity::checkpoint::Kind;
use parity::engine::{Batch, Engine};
use parity::model::Model;
use serde_json::json;

use crate::common::{Count, GPU_NUMERICS, Outcome, gpu, nothing, prompt_and_steps, tokens, write};

/// Prefill of 512 tokens and decode, with and without every checkpoint read back to the host.
pub fn speed(out: &str, path: &str) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let mut body = json!({});
    let everything: fn(Kind) -> bool = |kind| !kind.is_optional();
    // llama.cpp computes the logits of the last position alone, and so shows no others.
    let all_but_logits: fn(Kind) -> bool = |kind| !kind.is_optional() && kind != Kind::Logits;
    let probes = [
        ("untraced", (|_| false) as fn(Kind) -> bool),
        ("traced", all_but_logits),
        ("traced, all logits", everything),
    ];
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, &model.graph, numerics)?;
        for (name, wants) in probes {
            let (mut entry, mut bytes) = (json!({}), 0);
            for n in [16, 128, 512] {
                let tokens = tokens(n);
                let times = (0..9).map(|_| {
                    engine.reset();
                    let mut probe = Count { wants, bytes: 0 };
                    let start = Instant::now();
                    engine.step(&Batch { tokens: &tokens, first: 0 }, &mut probe)?;
                    bytes = probe.bytes;
                    Ok(start.elapsed().as_secs_f64())
                });
                let seconds = median(times.collect::<Result<_, parity::error::Error>>()?);
                println!(
                    "{numerics} {name} pp{n}: {:.3} ms, {:.0} tok/s, {bytes} bytes",
                    1e3 * seconds,
                    n as f64 / seconds
                );
                entry[format!("pp{n}")] =
                    json!({ "ms": 1e3 * seconds, "tokens_per_second": n as f64 / seconds, "bytes": bytes });
            }
            let mut times = Vec::new();
            for _ in 0..3 {
                engine.reset();
                engine.step(&Batch { tokens: &tokens(8), first: 0 }, &mut nothing())?;
                let start = Instant::now();
                for i in 0..64 {
                    let token = tokens(i + 1)[i];
                    engine.step(&Batch { tokens: &[token], first: 8 + i }, &mut Count { wants, bytes: 0 })?;
                }
                times.push(start.elapsed().as_secs_f64() / 64.0);
            }
            let seconds = median(times);
            println!("{numerics} {name} tg64: {:.3} ms/tok, {:.1} tok/s", 1e3 * seconds, 1.0 / seconds);
            entry["tg64"] = json!({ "ms": 1e3 * seconds, "tokens_per_second": 1.0 / seconds });
            body[numerics][name] = entry;
        }
    }
    write(out, &model, body)
}

/// One untraced prefill of so many tokens and two decode steps, for a profiler.
pub fn once(path: &str, numerics: &str, rows: usize) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let mut engine = gpu(&model, &model.graph, numerics)?;
    let tokens = tokens(rows + 2);
    for step in prompt_and_steps(rows, rows + 2) {
        engine.step(&Batch { tokens: &tokens[step.clone()], first: step.start }, &mut nothing())?;
    }
    Ok(())
}

/// Without the first two, which warm up.
fn median(mut times: Vec<f64>) -> f64 {
    if times.len() > 4 {
        times.drain(..2);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
