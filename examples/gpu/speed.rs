//! Speed of prefill and decode, with and without every checkpoint read back to the host.

use std::path::Path;
use std::time::Instant;

use parity::checkpoint::Kind;
use parity::engine::{Batch, Engine};
use parity::model::Model;
use serde_json::{Value, json};

use crate::common::{Count, GPU_NUMERICS, Outcome, gpu, nothing, prompt_and_steps, tokens, write};

/// How much faster than llama.cpp the instrumented engine must be, each with every node asked for.
const PREFILL_TIMES: f64 = 10.0;
const DECODE_TIMES: f64 = 8.0;

/// Prefill and decode, with and without every checkpoint read back to the host; beside what the output of
/// `llama_bench_min` says of llama.cpp on the same machine.
pub fn speed(out: &str, path: &str, llama: Option<&str>) -> Outcome {
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
    let mut missed = Vec::new();
    if let Some(llama) = llama {
        let theirs = llama_figures(&std::fs::read_to_string(llama)?);
        let of =
            |tokens: &str, test: &str, figures: &Value| figures[tokens][test]["tokens_per_second"].as_f64();
        for (test, tapped, limit) in [("pp512", "pp512", PREFILL_TIMES), ("tg64", "tg16", DECODE_TIMES)] {
            let times = of("traced", test, &body["f16"]).zip(of("every node asked for", tapped, &theirs));
            let times = times.map(|(ours, theirs)| ours / theirs);
            println!(
                "f16 traced {test}: {times:.2?} times llama.cpp with every node asked for, at least {limit}"
            );
            body["times_llama.cpp"][test] = json!({ "times": times, "at_least": limit });
            if !times.is_some_and(|times| times >= limit) {
                missed.push(test);
            }
        }
        body["llama.cpp"] = theirs;
    }
    write(out, &model, body)?;
    if missed.is_empty() { Ok(()) } else { Err(format!("too slow: {}", missed.join(", ")).into()) }
}

/// The figures that `llama_bench_min` prints: `tap=1 pp512 median 111.7 ms 4586 tok/s …`.
fn llama_figures(text: &str) -> Value {
    let mut figures = json!({});
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let tapped = match words.first() {
            Some(&"tap=0") => "untapped",
            Some(&"tap=1") => "every node asked for",
            _ => continue,
        };
        let number = |unit: &str| {
            let at = words.iter().position(|word| *word == unit)?;
            words.get(at.checked_sub(1)?)?.parse::<f64>().ok()
        };
        let ms = number("ms").or_else(|| number("ms/tok"));
        if let Some(test) = words.get(1) {
            figures[tapped][*test] = json!({ "ms": ms, "tokens_per_second": number("tok/s") });
        }
    }
    figures
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
