//! Suites: how they are read, run, sharded, compared and told.

mod bits;
mod cli;
mod gate;
mod graphs;
#[path = "../support/lib.rs"]
mod support;
