//! Speed of prefill and decode, with and without every checkpoint read back to the host or compared on the GPU.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use parity::checkpoint::Kind;
use parity::engine::cuda::CudaEngine;
use parity::engine::fused::Model;
use parity::engine::{Batch, Engine};
use parity::error::Error;
use serde_json::{Value, json};

use crate::common::{Count, GPU_NUMERICS, Outcome, gpu, median, nothing, prompt_and_steps, tokens, write};
use crate::compared;

/// How much faster than llama.cpp the instrumented engine must be, each with every node asked for.
const PREFILL_TIMES: f64 = 10.0;
const DECODE_TIMES: f64 = 8.0;

/// llama.cpp computes the logits of the last position alone, and so shows no others.
pub const ALL_BUT_LOGITS: fn(Kind) -> bool = |kind| !kind.is_optional() && kind != Kind::Logits;

/// Prefill and decode, with and without every checkpoint read back to the host; and as often as `pairs` says beside
/// llama.cpp on the same machine, which `command`, a call of `llama_bench_min`, measures. A prefill compared on the GPU is
/// measured too: see [`compared`].
pub fn speed(out: &str, path: &str, pairs: usize, command: &[&str]) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let (mut body, mut missed) = (json!({}), Vec::new());
    let everything: fn(Kind) -> bool = |kind| !kind.is_optional();
    let probes = [
        ("untraced", (|_| false) as fn(Kind) -> bool),
        ("traced", ALL_BUT_LOGITS),
        ("traced, all logits", everything),
    ];
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, &model.graph, numerics)?;
        for (name, wants) in probes {
            let mut entry = json!({});
            for n in [16, 128, 512] {
                entry[format!("pp{n}")] = prefill(&mut engine, wants, n)?;
                println!("{numerics} {name} pp{n}: {}", entry[format!("pp{n}")]);
            }
            entry["tg64"] = decode(&mut engine, wants)?;
            println!("{numerics} {name} tg64: {}", entry["tg64"]);
            entry["greedy64"] = greedy(&mut engine, wants)?;
            println!("{numerics} {name} greedy64: {}", entry["greedy64"]);
            body[numerics][name] = entry;
        }
        drop(engine);
        match compared::measure(&model, numerics, &mut missed)? {
            Value::Null => (),
            entry => body[numerics]["compared"] = entry,
        }
    }
    if pairs > 0 {
        let mut engine = gpu(&model, &model.graph, "f16")?;
        body["beside_llama.cpp"] = beside(&mut engine, pairs, command, &mut missed)?;
    }
    write(out, &model, body)?;
    if missed.is_empty() { Ok(()) } else { Err(format!("too slow, or wrong: {}", missed.join(", ")).into()) }
}

/// The median of seven prefills of `n` tokens.
pub fn prefill(engine: &mut dyn Engine, wants: fn(Kind) -> bool, n: usize) -> Result<Value, Error> {
    let (tokens, mut bytes) = (tokens(n), 0);
    let times = (0..9).map(|_| {
        engine.reset();
        let mut probe = Count { wants, bytes: 0 };
        let start = Instant::now();
        engine.step(&Batch { tokens: &tokens, first: 0 }, &mut probe)?;
        bytes = probe.bytes;
        Ok(start.elapsed().as_secs_f64())
    });
    let seconds = warm(times.collect::<Result<_, Error>>()?);
    Ok(json!({ "ms": 1e3 * seconds, "tokens_per_second": n as f64 / seconds, "bytes": bytes }))
}

/// The median of three times 64 steps after 8 tokens.
pub fn decode(engine: &mut dyn Engine, wants: fn(Kind) -> bool) -> Result<Value, Error> {
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
    let seconds = warm(times);
    Ok(json!({ "ms": 1e3 * seconds, "tokens_per_second": 1.0 / seconds }))
}

/// The same where the GPU chooses the tokens, and no step waits for the host.
fn greedy(engine: &mut CudaEngine<'_>, wants: fn(Kind) -> bool) -> Result<Value, Error> {
    let (mut times, mut bytes) = (Vec::new(), 0);
    for _ in 0..5 {
        engine.reset();
        engine.step(&Batch { tokens: &tokens(8), first: 0 }, &mut nothing())?;
        let mut probe = Count { wants, bytes: 0 };
        let start = Instant::now();
        engine.greedy(tokens(1)[0], 64, &mut probe)?;
        times.push(start.elapsed().as_secs_f64() / 64.0);
        bytes = probe.bytes / 64;
    }
    let seconds = warm(times);
    Ok(json!({ "ms": 1e3 * seconds, "tokens_per_second": 1.0 / seconds, "bytes": bytes }))
}

/// llama.cpp and the instrumented engine by turns, each with every node asked for: all pairs, and the median and
/// the smallest of how many times faster the engine is. The median has to reach the limit.
fn beside(
    engine: &mut CudaEngine<'_>,
    pairs: usize,
    command: &[&str],
    missed: &mut Vec<String>,
) -> Result<Value, Box<dyn std::error::Error>> {
    let (program, args) = command.split_first().ok_or("no llama_bench_min to measure beside")?;
    let mut measured = Vec::new();
    for _ in 0..pairs {
        let bench = Command::new(program).args(args).output()?;
        if !bench.status.success() {
            return Err(String::from_utf8_lossy(&bench.stderr).into());
        }
        let llama = llama_figures(&String::from_utf8_lossy(&bench.stdout));
        let own = json!({ "pp512": prefill(engine, ALL_BUT_LOGITS, 512)?, "tg64": decode(engine, ALL_BUT_LOGITS)? });
        measured.push(json!({ "llama.cpp": llama, "f16 traced": own }));
    }
    let mut body = json!({});
    for (test, tapped, limit) in [("pp512", "pp512", PREFILL_TIMES), ("tg64", "tg@8", DECODE_TIMES)] {
        let times = measured.iter().map(|pair| {
            let own = pair["f16 traced"][test]["tokens_per_second"].as_f64()?;
            Some(own / pair["llama.cpp"]["every node asked for"][tapped]["tokens_per_second"].as_f64()?)
        });
        let mut times = times.collect::<Option<Vec<f64>>>().ok_or("llama_bench_min printed no figure")?;
        let in_order = times.clone();
        times.sort_by(f64::total_cmp);
        let middle = [times[(times.len() - 1) / 2], times[times.len() / 2]];
        let median = (middle[0] + middle[1]) / 2.0;
        println!(
            "f16 traced {test} beside llama.cpp with every node asked for: {in_order:.2?} times, median {median:.2}"
        );
        body[test] = json!({
            "times": in_order, "median": median, "smallest": times[0], "largest": times[times.len() - 1],
            "median_at_least": limit,
        });
        if !(median >= limit) {
            missed.push(test.to_owned());
        }
    }
    body["pairs"] = json!(measured);
    Ok(body)
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

/// The median without the first two, which warm up.
fn warm(mut times: Vec<f64>) -> f64 {
    if times.len() > 4 {
        times.drain(..2);
    }
    median(times)
}
