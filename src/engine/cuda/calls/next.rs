//! The kernel that chooses the next token.

use super::{Address, Call, THREADS};

/// Blocks: enough that each thread of them has at most four logits of the largest vocabularies.
const BLOCKS: usize = 256;
/// Bytes of a block's candidate: the logit and its token.
const CANDIDATE: usize = size_of::<f32>() + size_of::<i32>();
/// Bytes of room that the launch needs: a count, 0 at first, and behind it what each block has found.
pub const NEXT_ROOM: usize = CANDIDATE * (1 + BLOCKS);

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
/// at its position in `tokens` (S,). `room`: [`NEXT_ROOM`] bytes, which begin with 0.
pub fn next_token(logits: Address, step: Address, tokens: Address, room: Address, vocab: usize) -> Call {
    let best = room + CANDIDATE as Address;
    let args = NextArgs { logits, step, tokens, best, arrived: room, vocab: vocab as i32 };
    let blocks = vocab.div_ceil(THREADS as usize).clamp(1, BLOCKS);
    Call::new("next_token".into(), [blocks, 1, 1], THREADS, args)
}
