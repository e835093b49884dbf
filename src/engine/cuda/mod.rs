//! The GPU engine.

pub mod calls;
