//! The flags of `parity record -m MODEL`, which records with the llama.cpp that is built in.

use std::path::PathBuf;

use parity_record::filter::Filter;

use super::shared::at_least_one;
use crate::error::Result;
use crate::record::Summary;

/// Flags that only the built-in llama.cpp has.
#[derive(clap::Args)]
#[command(next_help_heading = "Built-in llama.cpp (cargo feature llama-cpp), in place of a command")]
pub struct Args {
    /// Decode steps
    ///
    /// Greedy after a prompt, or the last N of --tokens.
    #[arg(short, long, value_name = "N", default_value_t = 0, conflicts_with = "command",
          value_parser = clap::value_parser!(u32).range(..=i64::from(i32::MAX)))]
    n_predict: u32,
    /// Threads [default: all cores]
    #[arg(short, long, value_name = "N", conflicts_with = "command", value_parser = at_least_one())]
    threads: Option<usize>,
    /// Keys and values in f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", conflicts_with = "command")]
    cache_type: String,
    /// Use flash attention
    #[arg(long, conflicts_with = "command")]
    flash_attn: bool,
    /// Let llama.cpp repack weights for speed
    #[arg(long, conflicts_with = "command")]
    repack: bool,
    /// Layers on the GPU
    ///
    /// Needs one of the cargo features llama-cpp-cuda, llama-cpp-vulkan and llama-cpp-rocm.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "command")]
    gpu_layers: u32,
}

/// One recording.
#[cfg_attr(not(feature = "llama-cpp"), expect(dead_code, reason = "read by the built-in llama.cpp alone"))]
pub struct Job<'a> {
    /// Folder of the dump.
    pub dir: PathBuf,
    /// GGUF model.
    pub model: PathBuf,
    /// Text of the prompt.
    pub prompt: Option<String>,
    /// Its tokens, where there is no text.
    pub tokens: Vec<u32>,
    /// Which checkpoints.
    pub filter: Filter,
    /// Whether to run once more with no node asked for.
    pub verify: bool,
    /// The other flags.
    pub args: &'a Args,
}

/// Records with the built-in llama.cpp.
#[cfg(feature = "llama-cpp")]
pub fn record(job: Job<'_>) -> Result<Summary> {
    use crate::error::Error;
    use crate::record::builtin::{self, BuiltinOptions, CacheType};

    let Job { dir, model, prompt, tokens, filter, verify, args } = job;
    let types = [("f32", CacheType::F32), ("f16", CacheType::F16), ("bf16", CacheType::Bf16)];
    let cache_type = types.iter().find(|(name, _)| *name == args.cache_type).ok_or_else(|| {
        Error::new("--cache-type", "is no type of a cache that parity knows")
            .expected("f32, f16 or bf16")
            .found(&args.cache_type)
    })?;
    builtin::record(&BuiltinOptions {
        dir,
        model,
        prompt,
        tokens,
        n_predict: args.n_predict as usize,
        filter,
        threads: args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        flash: args.flash_attn,
        cache_type: cache_type.1,
        repack: args.repack,
        gpu_layers: args.gpu_layers,
        verify,
    })
}

/// Says what to do without the built-in llama.cpp.
#[cfg(not(feature = "llama-cpp"))]
pub fn record(job: Job<'_>) -> Result<Summary> {
    let model = job.model.display();
    Err(crate::error::Error::new(format!("parity record -m {model}"), "this build has no llama.cpp in it")
        .expected("a llama.cpp program behind `--`, or a build with the feature llama-cpp")
        .found("neither")
        .hint(format!(
            "with a llama.cpp of yours: parity record -- llama-completion -m {model} -p PROMPT -n 8\n  {:<10}\
             with one built in: cargo install --path . --features llama-cpp (needs cmake, a C++ compiler, libclang)",
            ""
        )))
}
