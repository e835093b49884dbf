//! A history as one self-contained page: what is worse and since when, and every checkpoint's curve over the runs.

use serde::Serialize;

use super::store::{Run, Series};
use super::trend::{Worse, called};
use crate::error::{Error, Result};

const TEMPLATE: &str = include_str!("page/history.html");
const STYLE: &str = include_str!("page/history.css");
const SCRIPT: &str = include_str!("page/history.js");

#[derive(Serialize)]
struct Data<'a> {
    runs: Vec<(i64, &'a Run, String)>,
    series: &'a [Series],
    worse: &'a [Worse],
}

/// The page: no network, light and dark, usable by keyboard.
///
/// # Errors
/// None that a history can cause.
pub fn render(title: &str, runs: &[Run], series: &[Series], worse: &[Worse]) -> Result<String> {
    let failed = |e: serde_json::Error| Error::new("the page", format!("cannot be written: {e}"));
    let data = Data { runs: runs.iter().map(|run| (run.id, run, called(run))).collect(), series, worse };
    // Inside a script element only `<` can end the data.
    let data = serde_json::to_string(&data).map_err(failed)?.replace('<', "\\u003c");
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut page = String::with_capacity(data.len() + TEMPLATE.len());
    for piece in TEMPLATE.split("{{") {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        page += match name {
            "title" => &title,
            "style" => STYLE,
            "script" => SCRIPT,
            "data" => &data,
            _ => "",
        };
        page += rest;
    }
    Ok(page)
}
