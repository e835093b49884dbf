//! The program as a user runs it.

mod cli;
mod edges;
mod first_minute;
mod guess;
mod guess_steps;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod inspect_against;
mod inspect_carried;
mod originals;
mod overflow;
mod port;
#[path = "../support/lib.rs"]
mod support;
mod time;
