//! Mistakes: injected, found and named, or found and named in none.

mod catalogue;
mod graph_others;
mod inject;
mod matrix;
mod property;
mod stories;
mod strange;
#[path = "../support/lib.rs"]
mod support;
mod unseen;
