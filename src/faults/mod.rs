//! Mistakes that people make in LLM engines: injected into a graph, and diagnosed where a node is wrong.
//!
//! The catalogue is [`parity_graph::fault`]: a mistake is a rewrite of the graph, so that the same entry both injects
//! it into a run and predicts, from a failing node's recorded inputs, what that mistake would have given.

use std::collections::HashSet;

use crate::report::Tried;

pub mod between;
mod described;
pub mod diagnosis;
mod exchanged_experts;
mod guessed;
pub mod injected;
pub mod others;
mod over_caches;
mod passed_on;
mod precision;
mod ranks;
pub mod rewritten;
mod rolled_back;
mod sample;
pub mod tokens;
mod trial;

pub use trial::changed;

/// Faults that a report lists where none explains the error.
const TRIED_MAX: usize = 12;

/// What a report lists of the faults that were tried: each once, with the largest share of the error that it accounts for
/// in any form, the likeliest first. One that makes things worse accounts for nothing; one that gives NaN where numbers
/// were recorded says nothing.
fn nearest(mut tried: Vec<Tried>) -> Vec<Tried> {
    tried.retain(|tried| tried.explains.is_finite());
    tried.iter_mut().for_each(|tried| tried.explains = tried.explains.max(0.0));
    tried.sort_by(|a, b| b.explains.total_cmp(&a.explains));
    let mut told = HashSet::new();
    tried.retain(|tried| told.insert(tried.fault.clone()));
    tried.truncate(TRIED_MAX);
    tried
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_told_once_and_never_below_nothing() {
        let tried = [("a", -0.5), ("b", 0.25), ("a", 0.125), ("c", f64::NAN), ("d", -3.0), ("b", 0.75)];
        let tried = tried.map(|(fault, explains)| Tried { fault: fault.to_owned(), explains });
        let told: Vec<(String, f64)> =
            nearest(tried.into()).into_iter().map(|tried| (tried.fault, tried.explains)).collect();
        assert_eq!(told, [("b".to_owned(), 0.75), ("a".to_owned(), 0.125), ("d".to_owned(), 0.0)]);
        let many = (0..40).map(|i| Tried { fault: i.to_string(), explains: 0.5 }).collect();
        assert_eq!(nearest(many).len(), TRIED_MAX);
    }
}
