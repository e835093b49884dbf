//! What an audit and a diff answer: recordings of llama.cpp and of other engines, healthy, wrong, incomplete, foreign.

mod activations;
mod adapters;
mod agreement;
mod attentions;
mod audit;
mod backends;
mod caches;
mod copies;
mod cuda_caches;
mod cut_out;
mod declared;
mod emulated;
mod engines;
mod foreign_weights;
mod formulas;
mod gaps;
mod graph_runs;
mod half_cache;
mod life;
mod lost_steps;
mod matrices;
mod mixed;
mod narrow_engines;
mod order;
mod overwritten;
mod precision;
mod recorded_graphs;
mod recorded_weights;
mod recurrent;
mod spoiled;
mod stopped;
#[path = "../support/lib.rs"]
mod support;
mod undeclared;
mod verdicts;
mod wiring;
