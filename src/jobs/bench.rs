//! Speed of an engine: prefill and decode, nobody looking and every checkpoint handed over, by turns with the shared
//! libraries of a llama.cpp.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde::Serialize;

use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::device::{self, Device};
use crate::engine::fused::Model;
use crate::engine::{Batch, Engine, Probe, Values};
use crate::error::{Error, Result};
use crate::numerics::Numerics;

/// Measures the shared libraries of any llama.cpp; compiled where it is asked for.
const LLAMA_BENCH: &str = include_str!("../../scripts/gpu/llama_bench_min.c");
/// Steps of one measurement of decode.
const STEPS: usize = 32;
/// Steps before the clock starts: in them is planned and allocated what a first step needs.
const WARM: usize = 2;
/// Tokens of a batch at most before the first measured step: as many as llama.cpp is given at once.
const BATCH: usize = 2048;
/// Tokens before the first measured step where no context is asked for.
const SHORT: usize = 8;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where.
    pub device: Device,
    /// In which arithmetic.
    pub numerics: Numerics,
    /// Tokens of each prefill.
    pub prompts: Vec<usize>,
    /// Positions before each measurement of decode.
    pub contexts: Vec<usize>,
    /// How often.
    pub repeats: usize,
    /// Folder with the shared libraries of a llama.cpp, measured by turns with the engine.
    pub llama: Option<PathBuf>,
}

/// What came out. Nothing is null but what was not measured.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// `parity-bench/1`
    pub schema: &'static str,
    /// File name of the model.
    pub model: String,
    /// Name of the device, or of what computes.
    pub device: String,
    /// Arithmetic.
    pub numerics: String,
    /// Bytes of weights that one step reads.
    pub weight_bytes: usize,
    /// Bytes a second that the device reads and writes when it copies.
    pub bandwidth: f64,
    /// Memory of the GPUs; not measured on the CPU.
    pub memory: Option<Memory>,
    /// In the order of the options: prefills, then decode.
    pub rows: Vec<BenchRow>,
}

/// Memory of the GPUs that is taken behind the longest text, untraced: weights, caches, and room for the largest step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Tokens of the longest text that was measured.
    pub positions: usize,
    /// Bytes that the engine has.
    pub bytes: u64,
    /// Bytes that a llama.cpp has when it has measured the same; `None` if it has no GPU.
    pub llama: Option<u64>,
}

/// One thing that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    /// `prefill` or `decode`.
    pub what: &'static str,
    /// Tokens of the prefill, or positions before the first decoded token.
    pub tokens: usize,
    /// Nobody looks.
    pub untraced: Speed,
    /// Every checkpoint is handed over.
    pub traced: Speed,
    /// llama.cpp as it is, and with every node asked for, where it measures the same.
    pub llama: Option<[Speed; 2]>,
    /// Share of the device's bandwidth that reading each weight once takes, untraced.
    pub bandwidth_share: f64,
}

/// Tokens a second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    /// Of all measurements.
    pub median: f64,
    /// The slowest.
    pub min: f64,
    /// The fastest.
    pub max: f64,
}

impl Speed {
    /// Of measurements, of which there is at least one.
    fn of(mut all: Vec<f64>) -> Speed {
        all.sort_by(f64::total_cmp);
        Speed { median: all[all.len() / 2], min: all[0], max: all[all.len() - 1] }
    }
}

/// Takes every checkpoint or none, and looks at each value's bytes.
struct Taking(bool);

impl Probe for Taking {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.0 && !checkpoint.kind().is_optional() && checkpoint.kind() != Kind::Logits
    }

    fn record(&mut self, _: Checkpoint, _: &Batch<'_>, _: &[usize], values: Values<'_>) -> Result<()> {
        std::hint::black_box(values);
        Ok(())
    }

    fn first_logits(&self, batch: &Batch<'_>) -> usize {
        batch.tokens.len() - 1
    }
}

/// Measures; `progress` hears how many of all measurements are done, a round of llama.cpp's being one.
///
/// # Errors
/// The device, or a llama.cpp that does not run.
pub fn bench(model: &Model, options: &Options, progress: &dyn Fn(usize, usize)) -> Result<Bench> {
    let free = device::free_memory(&options.device)?;
    let mut engine = device::open(&options.device, model, model.graph.clone(), options.numerics)?;
    let llama = options.llama.as_deref().map(Llama::build).transpose()?;
    let tests = (options.prompts.iter().map(|n| ("prefill", *n)))
        .chain(options.contexts.iter().map(|n| ("decode", *n)))
        .collect::<Vec<_>>();
    // Before anything is traced, whose room the engine keeps; and while no other program's memory comes and goes.
    let longest = tests.iter().map(|(what, n)| (longest(what, *n), *what, *n)).max();
    let mut taken = None;
    if let (Some(before), Some((_, what, n))) = (free, longest) {
        measure(engine.as_mut(), model, what, n, false)?;
        taken = device::free_memory(&options.device)?.map(|now| before.saturating_sub(now));
    }
    let rounds = rounds(engine.as_mut(), model, &tests, llama.as_ref(), options, progress)?;
    let memory = taken.zip(longest).map(|(bytes, (positions, ..))| Memory {
        positions,
        bytes,
        llama: rounds.memory_of_llama,
    });
    let (weight_bytes, bandwidth) = (weight_bytes(model), device::bandwidth(&options.device)?);
    let producer = engine.producer();
    let rows = (tests.into_iter().zip(rounds.own).zip(rounds.theirs)).map(
        |(((what, tokens), [untraced, traced]), llama)| {
            let untraced = Speed::of(untraced);
            let steps = if what == "prefill" { untraced.median / tokens as f64 } else { untraced.median };
            BenchRow {
                what,
                tokens,
                untraced,
                traced: Speed::of(traced),
                llama: llama.iter().all(|all| !all.is_empty()).then(|| llama.map(Speed::of)),
                bandwidth_share: steps * weight_bytes as f64 / bandwidth,
            }
        },
    );
    let file = model.gguf.path().file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(Bench {
        schema: "parity-bench/1",
        model: file.unwrap_or_default(),
        rows: rows.collect(),
        device: producer.device.or(producer.backend).unwrap_or_default(),
        numerics: producer.numerics.unwrap_or_default(),
        weight_bytes,
        bandwidth,
        memory,
    })
}

/// Tokens a second of each test, as often as it was measured.
struct Rounds {
    /// Untraced, traced.
    own: Vec<[Vec<f64>; 2]>,
    /// llama.cpp as it is, with every node asked for; empty where it was not measured.
    theirs: Vec<[Vec<f64>; 2]>,
    /// See [`Memory::llama`].
    memory_of_llama: Option<u64>,
}

/// Every test in turn, then a llama.cpp's, so many times.
fn rounds(
    engine: &mut dyn Engine,
    model: &Model,
    tests: &[(&str, usize)],
    llama: Option<&Llama>,
    options: &Options,
    progress: &dyn Fn(usize, usize),
) -> Result<Rounds> {
    let none = vec![[Vec::new(), Vec::new()]; tests.len()];
    let mut found = Rounds { own: none.clone(), theirs: none, memory_of_llama: None };
    let all = options.repeats * (2 * tests.len() + usize::from(llama.is_some()));
    let mut done = 0;
    let mut one_more = || {
        done += 1;
        progress(done, all);
    };
    for _ in 0..options.repeats {
        for ((what, n), own) in tests.iter().zip(&mut found.own) {
            for (traced, own) in own.iter_mut().enumerate() {
                own.push(measure(engine, model, what, *n, traced == 1)?);
                one_more();
            }
        }
        let Some(llama) = llama else { continue };
        let (figures, memory) = llama.measure(model.gguf.path(), options)?;
        one_more();
        found.memory_of_llama = memory;
        for ((what, n), theirs) in tests.iter().zip(&mut found.theirs) {
            for (tapped, theirs) in theirs.iter_mut().enumerate() {
                theirs.extend(figures.iter().filter(|f| f.is(what, *n, tapped == 1)).map(|f| f.speed));
            }
        }
    }
    Ok(found)
}

/// Positions in the cache at the end of one measurement.
fn longest(what: &str, n: usize) -> usize {
    if what == "prefill" { n } else { n.max(SHORT) + WARM + STEPS }
}

/// Tokens that depend on nothing.
fn tokens(model: &Model, n: usize) -> Vec<u32> {
    let vocab = model.graph.dims.vocab as u32;
    (0..n as u32).map(|i| (i.wrapping_mul(7919) % 3000 + 100) % vocab).collect()
}

/// Tokens a second of one prefill, or of decode after so many positions. What is planned and allocated at a first
/// time is done before the clock starts.
fn measure(engine: &mut dyn Engine, model: &Model, what: &str, n: usize, traced: bool) -> Result<f64> {
    let mut probe = Taking(traced);
    let all = tokens(model, longest(what, n));
    if what == "prefill" {
        let batch = Batch { tokens: &all[..n], first: 0 };
        for _ in 0..2 {
            engine.reset();
            engine.step(&batch, &mut probe)?;
        }
        engine.reset();
        let start = Instant::now();
        engine.step(&batch, &mut probe)?;
        return Ok(n as f64 / start.elapsed().as_secs_f64());
    }
    engine.reset();
    let before = n.max(SHORT);
    for first in (0..before).step_by(BATCH) {
        let tokens = &all[first..before.min(first + BATCH)];
        engine.step(&Batch { tokens, first }, &mut Taking(false))?;
    }
    let mut start = Instant::now();
    for i in 0..WARM + STEPS {
        if i == WARM {
            start = Instant::now();
        }
        engine.step(&Batch { tokens: &all[i..i + 1], first: before + i }, &mut probe)?;
    }
    Ok(STEPS as f64 / start.elapsed().as_secs_f64())
}

/// Bytes of the matrices that a step multiplies with.
fn weight_bytes(model: &Model) -> usize {
    let mut names: Vec<&str> = (model.graph.nodes.iter())
        .filter_map(|node| match &node.op {
            crate::engine::fused::graph::Op::Linear { weight, .. } => Some(weight.as_str()),
            _ => None,
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names.iter().filter_map(|name| model.gguf.tensor(name)).map(|tensor| tensor.bytes.len()).sum()
}

/// A program that measures a llama.cpp's shared libraries.
struct Llama {
    folder: PathBuf,
    program: tempfile::TempDir,
}

/// One figure of it.
struct Figure {
    tapped: bool,
    test: String,
    speed: f64,
}

impl Figure {
    fn is(&self, what: &str, n: usize, tapped: bool) -> bool {
        let same = match what {
            "prefill" => self.test == format!("pp{n}"),
            _ => self.test == format!("tg@{}", n.max(SHORT)),
        };
        same && self.tapped == tapped
    }

    /// `tap=1 pp512 median 111.7 ms 4586 tok/s …`
    fn parse(line: &str) -> Option<Figure> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "tok/s")?;
        let tapped = words.first()?.strip_prefix("tap=")? == "1";
        let speed = words.get(at.checked_sub(1)?)?.parse().ok()?;
        Some(Figure { tapped, test: (*words.get(1)?).to_owned(), speed })
    }

    /// `memory 1234 bytes`
    fn memory(line: &str) -> Option<u64> {
        line.strip_prefix("memory ")?.strip_suffix(" bytes")?.parse().ok()
    }
}

impl Llama {
    fn build(folder: &Path) -> Result<Llama> {
        let folder =
            folder.canonicalize().map_err(|e| Error::file(folder, format!("cannot be read: {e}")))?;
        for library in ["libggml.so", "libllama.so"] {
            if !folder.join(library).is_file() {
                return Err(Error::file(&folder, "holds no llama.cpp").expected(library));
            }
        }
        let failed = |e: std::io::Error| Error::new("--llama", format!("cannot be measured: {e}"));
        let program = tempfile::tempdir().map_err(failed)?;
        let source = program.path().join("bench.c");
        std::fs::write(&source, LLAMA_BENCH).map_err(failed)?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-rdynamic", "-o"]).arg(program.path().join("bench")).arg(&source).arg("-ldl");
        let built = cc.output().map_err(|e| failed(e).hint("a C compiler, `cc`, is needed"))?;
        if !built.status.success() {
            return Err(Error::new("--llama", "the program that measures it does not compile")
                .found(String::from_utf8_lossy(&built.stderr)));
        }
        Ok(Llama { folder, program })
    }

    /// What it printed: speeds, and the bytes of GPU memory that it took if it has a GPU.
    fn measure(&self, model: &Path, options: &Options) -> Result<(Vec<Figure>, Option<u64>)> {
        let failed = |e: &dyn std::fmt::Display| Error::new("--llama", format!("cannot be measured: {e}"));
        let model = model.canonicalize().map_err(|e| failed(&e))?;
        let mut bench = Command::new(self.program.path().join("bench"));
        bench.current_dir(&self.folder).env("LD_LIBRARY_PATH", &self.folder);
        let list = |lengths: &mut dyn Iterator<Item = usize>| {
            lengths.map(|n| n.to_string()).collect::<Vec<_>>().join(",")
        };
        bench.args(["./libggml.so", "./libllama.so"]).arg(model);
        bench.arg(list(&mut options.prompts.iter().copied()));
        bench.arg(list(&mut options.contexts.iter().map(|n| (*n).max(SHORT))));
        // It is called as often as there are repeats.
        bench.arg("1");
        let out = bench.output().map_err(|e| failed(&e))?;
        if !out.status.success() {
            let said = String::from_utf8_lossy(&out.stderr);
            return Err(failed(&"it failed").found(said.lines().last().unwrap_or_default().to_owned()));
        }
        let said = String::from_utf8_lossy(&out.stdout);
        Ok((said.lines().filter_map(Figure::parse).collect(), said.lines().find_map(Figure::memory)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_llama_cpp_are_read() {
        let line = "tap=1 pp512 median 111.700 ms 4586 tok/s (min 1.0 max 2.0) nodes=3 bytes=4";
        let figure = Figure::parse(line).unwrap();
        assert!(figure.is("prefill", 512, true) && !figure.is("prefill", 128, true));
        assert_eq!(figure.speed, 4586.0);
        let decode = Figure::parse("tap=0 tg@8 median 1.283 ms/tok 779.0 tok/s").unwrap();
        assert!(decode.is("decode", 0, false) && !decode.is("decode", 1024, false));
        assert!(Figure::parse("no figure").is_none());
        assert_eq!(Figure::memory("memory 2345 bytes"), Some(2345));
        assert!(Figure::memory(line).is_none() && Figure::memory("memory none").is_none());
    }

    #[test]
    fn a_median_lies_between_the_extremes() {
        let speed = Speed::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((speed.min, speed.median, speed.max), (1.0, 2.0, 3.0));
    }
}
