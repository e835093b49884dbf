//! What is told: reports in every format, the shipped sample, the pages for users.

mod docs;
mod html;
mod report;
mod sample;
#[path = "../support/lib.rs"]
mod support;
