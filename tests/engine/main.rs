//! What parity itself computes: its engine, its graphs, its arithmetic.

mod alphabet;
mod builders;
mod engine;
#[path = "../support/lib.rs"]
mod support;
