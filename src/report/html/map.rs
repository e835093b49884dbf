//! Geometry of the two pictures that share one axis of depth: the map of checkpoints, and below it the
//! trajectory of the errors. All lengths in SVG user units.

use std::collections::{BTreeMap, HashMap};

use indexmap::IndexSet;
use serde::Serialize;

use super::color::{DIFFERENCE, OWN};
use crate::checkpoint::{Checkpoint, Kind};
use crate::report::words::number;
use crate::report::{CheckpointVerdict, Entry, Report};

/// Width that the picture has in a two-column page; deeper models are wider.
const WIDTH: f64 = 780.0;
/// Width of the names at least, and of one letter of theirs.
const LABELS: f64 = 96.0;
const LETTER: f64 = 6.1;
/// Letters of a name that are shown.
const LETTERS: usize = 26;
const TOP: f64 = 18.0;
const ROW: f64 = 15.0;
const COLUMN_LEAST: f64 = 11.0;
const CHART_TOP: f64 = 34.0;
const CHART: f64 = 138.0;
const BOTTOM: f64 = 18.0;
/// Errors below are drawn at the chart's floor.
const FLOOR: f64 = 1e-9;
/// Differences above are drawn at its ceiling.
const CEILING: f64 = 1e2;

/// Everything the template draws.
#[derive(Serialize)]
pub struct Map {
    width: f64,
    height: f64,
    labels: f64,
    rows: Vec<Label>,
    columns: Vec<Label>,
    cells: Vec<Cell>,
    chart: Chart,
}

#[derive(Serialize)]
struct Label {
    text: String,
    at: f64,
}

#[derive(Serialize)]
struct Cell {
    id: String,
    row: usize,
    column: usize,
    x: f64,
    y: f64,
    w: f64,
    h: f64,
    own: Option<String>,
    difference: Option<String>,
    verdict: &'static str,
    fault: bool,
    mark: &'static str,
    label: String,
}

#[derive(Serialize)]
struct Chart {
    top: f64,
    bottom: f64,
    left: f64,
    right: f64,
    decades: Vec<Label>,
    layers: Vec<f64>,
    band: String,
    difference: String,
    inherited: String,
    candidate: String,
    reference: String,
    faults: Vec<Point>,
}

#[derive(Serialize)]
struct Point {
    x: f64,
    y: f64,
    id: String,
    text: String,
    first: bool,
    anchor: &'static str,
}

/// Lays the report's checkpoints out.
pub fn map(report: &Report) -> Map {
    let kinds = kinds(report);
    let layers: Vec<u32> = layers(report);
    let columns = layers.len() + 2;
    let letters = kinds.iter().map(|kind| kind.name().chars().count().min(LETTERS)).max().unwrap_or(0);
    let labels = round((letters as f64 * LETTER + 12.0).max(LABELS));
    let column = ((WIDTH - labels) / columns as f64).max(COLUMN_LEAST);
    let frame = Frame { labels, column, layers };
    let rows = |kind: Kind| kinds.iter().position(|k| *k == kind).unwrap_or(0);
    let cells = report.checkpoints.iter().map(|entry| cell(entry, rows(entry.id.kind()), &frame)).collect();
    let map_bottom = TOP + kinds.len() as f64 * ROW;
    Map {
        width: round(labels + columns as f64 * column + 2.0),
        height: round(map_bottom + CHART_TOP + CHART + BOTTOM),
        labels,
        rows: kinds
            .iter()
            .enumerate()
            .map(|(row, kind)| Label { text: short(kind.name()), at: TOP + (row as f64 + 0.5) * ROW })
            .collect(),
        columns: frame.labels(),
        cells,
        chart: chart(report, &frame, map_bottom + CHART_TOP),
    }
}

/// The kinds of the report's checkpoints, each where it comes first.
fn kinds(report: &Report) -> Vec<Kind> {
    let kinds: IndexSet<Kind> = report.checkpoints.iter().map(|entry| entry.id.kind()).collect();
    kinds.into_iter().collect()
}

/// A name as far as there is room for it.
fn short(name: &str) -> String {
    match name.chars().count() <= LETTERS {
        true => name.to_owned(),
        false => name.chars().take(LETTERS - 1).chain(['…']).collect(),
    }
}

fn layers(report: &Report) -> Vec<u32> {
    let mut layers: Vec<u32> = report.checkpoints.iter().filter_map(|entry| entry.id.layer_index()).collect();
    layers.dedup();
    layers.sort_unstable();
    layers.dedup();
    layers
}

/// The axis of depth: a column for the embedding, one for each layer, one for the head of the model.
struct Frame {
    /// Where the first column begins.
    labels: f64,
    column: f64,
    layers: Vec<u32>,
}

impl Frame {
    fn column_of(&self, entry: &Entry) -> usize {
        match entry.id.layer_index() {
            Some(layer) => 1 + self.layers.binary_search(&layer).unwrap_or(0),
            None if entry.id.kind() == Kind::Embed => 0,
            None => self.layers.len() + 1,
        }
    }

    fn left(&self, column: usize) -> f64 {
        self.labels + column as f64 * self.column
    }

    /// Numbers of the layers, as many as have room.
    fn labels(&self) -> Vec<Label> {
        let every = (16.0 / self.column).ceil() as usize;
        let shown = self.layers.iter().enumerate().filter(|(i, _)| i % every == 0);
        shown
            .map(|(i, layer)| Label {
                text: layer.to_string(),
                at: round(self.left(i + 1) + self.column / 2.0),
            })
            .collect()
    }
}

fn cell(entry: &Entry, row: usize, frame: &Frame) -> Cell {
    let column = frame.column_of(entry);
    let own = entry.local.candidate.as_ref().map(|local| local.over_bound);
    let difference = entry.numbers.as_ref().map(|numbers| numbers.rel_l2);
    let mut label = format!("{}: {}", entry.id, entry.verdict.name());
    if let Some(own) = own {
        label += &format!(", local error / bound {}", number(own));
    }
    if let Some(difference) = difference {
        label += &format!(", rel L2 {}", number(difference));
    }
    Cell {
        id: entry.id.to_string(),
        row,
        column,
        x: round(frame.left(column)),
        y: TOP + row as f64 * ROW,
        w: round(frame.column - 1.0),
        h: ROW - 1.0,
        own: own.map(|value| OWN.color(value)),
        difference: difference.map(|value| DIFFERENCE.color(value)),
        verdict: entry.verdict.name(),
        fault: entry.verdict.is_fault(),
        mark: mark(entry.verdict),
        label,
    }
}

/// A sign in the cell, so that colour is never the only difference.
pub fn mark(verdict: CheckpointVerdict) -> &'static str {
    match verdict {
        CheckpointVerdict::Match => "",
        CheckpointVerdict::Inherited => "·",
        CheckpointVerdict::Origin => "✕",
        CheckpointVerdict::Nonfinite => "∞",
        CheckpointVerdict::Shape => "≠",
        CheckpointVerdict::Beyond => "!",
        CheckpointVerdict::Bits => "b",
        CheckpointVerdict::Reference => "R",
        CheckpointVerdict::Missing => "–",
        CheckpointVerdict::Precision => "≈",
        CheckpointVerdict::Undecided => "?",
    }
}

fn chart(report: &Report, frame: &Frame, top: f64) -> Chart {
    let places = places(report, frame);
    let x = |entry: &Entry| places.get(&entry.id).copied().unwrap_or(frame.labels);
    let (low, high) = range(report);
    let y = |value: f64| {
        let value = if value.is_nan() { high } else { value.clamp(low, high) };
        round(top + CHART * (high / value).log10() / (high / low).log10())
    };
    let entries = &report.checkpoints;
    let series = |pick: &dyn Fn(&Entry) -> Option<f64>| -> Vec<(f64, f64)> {
        // A logarithmic axis has no place for 0.
        let drawn =
            entries.iter().filter_map(|entry| Some((entry, pick(entry).filter(|value| *value != 0.0)?)));
        let mut points: Vec<(f64, f64)> = drawn.map(|(entry, value)| (x(entry), y(value))).collect();
        // What belongs to no layer may be computed between two layers, but is drawn behind them.
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let right = frame.left(frame.layers.len() + 2);
    let decades = (low.log10().round() as i32..=high.log10().round() as i32).filter(|e| e % 2 == 0);
    Chart {
        top,
        bottom: top + CHART,
        left: frame.labels,
        right: round(right),
        decades: decades
            .map(|exponent| Label { text: format!("1e{exponent}"), at: y(10f64.powi(exponent)) })
            .collect(),
        layers: (0..=frame.layers.len()).map(|i| round(frame.left(i + 1) - 0.5)).collect(),
        band: area(&series(&band), top + CHART),
        difference: line(&series(&|entry| entry.numbers.as_ref().map(|n| n.rel_l2))),
        inherited: line(&series(&|entry| entry.parts.as_ref().map(|parts| parts.inherited))),
        candidate: dots(&series(&|entry| entry.local.candidate.as_ref().map(|local| local.rel_l2))),
        reference: dots(&series(&|entry| entry.local.reference.as_ref().map(|local| local.rel_l2))),
        faults: faults(report, &x, &y, (frame.labels + right) / 2.0),
    }
}

/// Horizontal places of all checkpoints: the column of each, and within it the order of execution.
fn places(report: &Report, frame: &Frame) -> HashMap<Checkpoint, f64> {
    let mut members: BTreeMap<usize, Vec<Checkpoint>> = BTreeMap::new();
    for entry in &report.checkpoints {
        members.entry(frame.column_of(entry)).or_default().push(entry.id);
    }
    let of_column = |(column, ids): (usize, Vec<Checkpoint>)| {
        let step = (frame.column - 1.0) / ids.len() as f64;
        let left = frame.left(column);
        ids.into_iter().enumerate().map(move |(i, id)| (id, round(left + (i as f64 + 0.5) * step)))
    };
    members.into_iter().flat_map(of_column).collect()
}

/// What rounding explains, relative to the exact output.
fn band(entry: &Entry) -> Option<f64> {
    let local = entry.local.candidate.as_ref()?;
    local.bound_rel_l2.filter(|bound| bound.is_finite())
}

/// Least and largest power of ten of the chart.
fn range(report: &Report) -> (f64, f64) {
    let mut low: f64 = 1e-6;
    let mut high: f64 = 1e-3;
    for entry in &report.checkpoints {
        let own = [&entry.local.candidate, &entry.local.reference].into_iter().flatten().map(|l| l.rel_l2);
        let values = own.chain(entry.numbers.iter().map(|n| n.rel_l2)).chain(band(entry));
        for value in values.filter(|value| *value > 0.0 && value.is_finite()) {
            low = low.min(value);
            high = high.max(value);
        }
    }
    let decade = |value: f64, up: bool| {
        let exponent = value.log10();
        10f64.powf(if up { exponent.ceil() } else { exponent.floor() })
    };
    (decade(low.max(FLOOR), false), decade(high.min(CEILING), true))
}

fn faults(report: &Report, x: &dyn Fn(&Entry) -> f64, y: &dyn Fn(f64) -> f64, middle: f64) -> Vec<Point> {
    let first = report.first_divergence.as_ref().map(|first| first.checkpoint);
    let faulty = report.checkpoints.iter().filter(|entry| entry.verdict.is_fault());
    faulty
        .map(|entry| {
            let own = entry.local.candidate.as_ref().map(|local| local.rel_l2);
            let value = own.or(entry.numbers.as_ref().map(|n| n.rel_l2)).unwrap_or(f64::NAN);
            let is_first = first == Some(entry.id);
            let x = x(entry);
            Point {
                x,
                y: y(value),
                id: entry.id.to_string(),
                text: entry.id.to_string(),
                first: is_first,
                anchor: if x > middle { "end" } else { "start" },
            }
        })
        .collect()
}

fn line(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (i, (x, y)) in points.iter().enumerate() {
        path += &format!("{}{x} {y}", if i == 0 { 'M' } else { 'L' });
    }
    path
}

/// Points that a round line cap makes visible: one path for all of them.
fn dots(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("M{x} {y}h0")).collect()
}

fn area(points: &[(f64, f64)], floor: f64) -> String {
    match (points.first(), points.last()) {
        (Some(first), Some(last)) => {
            format!("{}L{} {floor}L{} {floor}Z", line(points), last.0, first.0)
        }
        _ => String::new(),
    }
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
