//! Measures the GPU engine: recordings of llama.cpp, exact arithmetic, injected faults, reproducibility, speed.
//!
//! `scripts/gpu-suite.sh` runs it. Every command writes one JSON file.
#![allow(missing_docs)]

#[cfg(not(feature = "cuda"))]
fn main() {}

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["against", out, model, ref references @ ..] => against::against(out, model, references),
        ["steps", out, model, runs] => steps::steps(out, model, runs.parse()?),
        ["faults", out, model] => faults::faults(out, model),
        ["speed", out, model] => speed::speed(out, model, 0, &[]),
        ["speed", out, model, pairs, ref command @ ..] => speed::speed(out, model, pairs.parse()?, command),
        ["compared", out, model] => compared::compared(out, model),
        ["split", out, model] => split::split(out, model),
        ["count"] => {
            println!("{}", parity::engine::cuda::count());
            Ok(())
        }
        ["once", model, numerics, rows] => speed::once(model, numerics, rows.parse()?),
        ["synth", out, size] => synth::write(out, size),
        _ => Err("gpu against OUT MODEL DUMP… | steps OUT MODEL RUNS | faults OUT MODEL | \
                  speed OUT MODEL [PAIRS LLAMA_BENCH…] | compared OUT MODEL | split OUT MODEL | count | once MODEL NUMERICS ROWS | \
                  synth OUT 0.5B|1.5B|0.5B-F16|1.5B-F16"
            .into()),
    }
}

#[cfg(feature = "cuda")]
mod against;
#[cfg(feature = "cuda")]
mod common;
#[cfg(feature = "cuda")]
mod compared;
#[cfg(feature = "cuda")]
mod faults;
#[cfg(feature = "cuda")]
mod speed;
#[cfg(feature = "cuda")]
mod split;
#[cfg(feature = "cuda")]
mod steps;
#[cfg(feature = "cuda")]
mod synth;
