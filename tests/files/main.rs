//! Files that parity reads: models, dumps of other engines, printed values, what is damaged on purpose.

mod dequant;
mod foreign;
mod fuzz;
mod gguf;
mod hostile;
mod import;
mod logprobs;
mod ranks;
#[path = "../support/lib.rs"]
mod support;
mod tokenizer;
