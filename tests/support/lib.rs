//! What several tests use.

#![allow(dead_code, reason = "each binary of tests takes a part of it")]

pub mod audited;
pub mod driven;
pub mod dumps;
pub mod edited;
pub mod files;
pub mod fixture;
pub mod gguf_writer;
pub mod graphs;
pub mod injected;
pub mod program;
pub mod runs;
pub mod samples;
pub mod subset;
pub mod tiny_model;
