//! The kernel that chooses the next token.

use super::{Address, Call};

/// Threads of a block, and blocks: a few logits for each thread.
const THREADS: u32 = 1024;
const BLOCKS: usize = 64;
/// Bytes of a block's candidate: a logit and its token.
const CANDIDATE: usize = 8;
/// Bytes in which the blocks of [`next_token`] leave what they found; zero at first.
pub const NEXT_ROOM: usize = CANDIDATE * (BLOCKS + 1);

#[repr(C)]
#[derive(Clone, Copy)]
struct NextArgs {
    logits: Address,
    step: Address,
    tokens: Address,
    best: Address,
    arrived: Address,
    vocab: i32,
}

/// The token of the largest of `logits` (V,) in f32 becomes that of the next step: at `step` (2,), position and token, and
/// at its position in `tokens` (S,). `room` is [`NEXT_ROOM`] bytes.
pub fn next_token(logits: Address, step: Address, tokens: Address, room: Address, vocab: usize) -> Call {
    let arrived = room + (CANDIDATE * BLOCKS) as Address;
    let args = NextArgs { logits, step, tokens, best: room, arrived, vocab: vocab as i32 };
    Call::new("next_token".into(), [BLOCKS, 1, 1], THREADS, args)
}
