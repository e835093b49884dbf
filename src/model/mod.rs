//! What is to be computed: configuration, graph and weights of one model.

pub mod edit;
pub mod graph;
