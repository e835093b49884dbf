//! Loaded into a llama.cpp program, by `LD_PRELOAD` or by ggml itself (`loaded`): stands in for a few of llama.cpp's functions, calls
//! the real ones, and records what is computed in between.
//!
//! Whatever goes wrong in here is said once, and the program goes on as if nothing had been loaded.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod symbols;

mod host;
mod sides;
mod tap;

mod entry;
mod layout;
mod life;
mod limits;
mod rows;
mod states;

mod images;
mod loaded;
