//! x
use crate::Graph;
pub fn labels(_g:&Graph)->Vec<Option<parity_dump::Checkpoint>>{vec![]}
