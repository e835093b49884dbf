//! `cargo +nightly fuzz run suites fuzz/corpus/suites`: see `targets::suites`.

#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each program runs one of the targets")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::suites(bytes));
