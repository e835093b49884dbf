//! Measures the GPU engine: distance from exact arithmetic, reproducibility, decode against prefill, speed.
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
        ["accuracy", out, model, rows] => suite::accuracy(out, model, rows.parse()?),
        ["steps", out, model, runs] => suite::steps(out, model, runs.parse()?),
        ["speed", out, model] => suite::speed(out, model),
        ["synth", out] => synth::write(out),
        _ => Err("gpu accuracy OUT MODEL ROWS | steps OUT MODEL RUNS | speed OUT MODEL | synth OUT".into()),
    }
}

#[cfg(feature = "cuda")]
mod suite;
#[cfg(feature = "cuda")]
mod synth;
