//! `cargo +nightly fuzz run printed fuzz/corpus/printed`: see `targets::printed`.

#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each program runs one of the targets")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::printed(bytes));
