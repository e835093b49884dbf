//! The GGUF parser on arbitrary bytes: an error or a table whose every tensor can be decoded, never a panic.
//!
//! `cargo +nightly fuzz run gguf fuzz/corpus/gguf tests/data`

#![no_main]

use libfuzzer_sys::fuzz_target;
use parity::gguf::{decode, parse};

/// Decoding is linear and tested elsewhere: only small tensors, so that the parser gets the time.
const MOST_VALUES: usize = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let Ok(parsed) = parse("fuzz", bytes) else { return };
    for info in &parsed.tensors {
        let data = &bytes[info.offset..info.offset + info.byte_len];
        assert_eq!(info.rows() * info.cols(), info.elements());
        if info.dtype.is_decodable() && info.elements() <= MOST_VALUES {
            decode(info.dtype, data, &mut vec![0f32; info.elements()]);
            decode(info.dtype, data, &mut vec![0f64; info.elements()]);
        }
    }
});
