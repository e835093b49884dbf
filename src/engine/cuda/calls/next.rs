//! The kernel that chooses the next token.

use super::{Address, Call};

/// Threads of the one block.
const THREADS: u32 = 1024;

#[repr(C)]
#[derive(Clone, Copy)]
struct NextArgs {
    logits: Address,
    step: Address,
    tokens: Address,
    vocab: i32,
}

/// The token of the largest of `logits` (V,) in f32 becomes that of the next step: at `step` (2,), position and token, and
/// at its position in `tokens` (S,).
pub fn next_token(logits: Address, step: Address, tokens: Address, vocab: usize) -> Call {
    let args = NextArgs { logits, step, tokens, vocab: vocab as i32 };
    Call::new("next_token".into(), [1, 1, 1], THREADS, args)
}
