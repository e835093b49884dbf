//! Loaded into a llama.cpp program, by `LD_PRELOAD` or by ggml itself (`loaded`): stands in for a few of llama.cpp's functions, calls
//! the real ones, and records what is computed in between.
//!
//! Whatever goes wrong in here is said once, and the program goes on as if nothing had been loaded.
#![cfg(all(
    any(target_os = "linux", target_os = "macos"),
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

#[macro_use]
#[cfg(target_arch = "x86_64")]
mod calls;
#[macro_use]
#[cfg(any(target_arch = "aarch64", target_os = "macos"))]
mod elsewhere;

mod symbols;

mod host;
mod sides;
mod tap;

mod batches;
mod entry;
mod layout;
mod life;
mod limits;
mod rows;
mod states;

#[cfg(target_os = "linux")]
mod images;
mod loaded;
#[cfg(target_os = "macos")]
use elsewhere::images;
