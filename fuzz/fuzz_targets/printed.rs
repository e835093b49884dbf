//! The reader of printed tensors on arbitrary text: nodes whose values lie within them, never a panic; and a
//! graph made of them that can be mapped, whatever it says.
//!
//! `cargo +nightly fuzz run printed fuzz/corpus/printed tests/data`

#![no_main]

use libfuzzer_sys::fuzz_target;
use parity::record::import::text::parse;
use parity::record::import::{Printed, seen};

/// Rows are as many as the prompt has tokens, which a text cannot make up.
const MOST_TOKENS: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let printout = parse(&text);
    for node in &printout.nodes {
        assert!(node.values.iter().all(|(index, _)| *index < node.elements()));
    }
    for tokens in 1..MOST_TOKENS {
        let Some(Printed { parts, .. }) = seen(&printout, tokens) else { continue };
        for (checkpoint, part) in parts.iter().flat_map(|(id, parts)| parts.iter().map(move |part| (id, part))) {
            for row in &part.rows {
                let width = part.width(*checkpoint, row.position);
                assert!(row.columns.iter().all(|&column| width.is_some_and(|width| (column as usize) < width)));
            }
        }
    }
});
