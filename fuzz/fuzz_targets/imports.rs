//! `cargo +nightly fuzz run imports fuzz/corpus/imports`: see `targets::imports`.

#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each program runs one of the targets")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::imports(bytes));
