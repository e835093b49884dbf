//! The program as a user runs it.

mod cli;
mod edges;
mod first_minute;
mod inspect;
mod inspect_against;
mod inspect_carried;
mod originals;
#[path = "../support/lib.rs"]
mod support;
