//! Maps: which tensor of another engine is which checkpoint, and how it lies there. TOML files, of the user's or
//! built in.

pub mod apply;
pub mod built_in;
pub mod expression;
pub mod pattern;

use std::path::Path;

use toml::{Spanned, Table, Value};

use crate::error::{Error, Result};
use crate::files;
use expression::{Expression, Widths};
use pattern::{Numbers, Pattern};

/// How ranks' parts of a tensor become the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shards {
    /// Side by side along an axis, counted from 0 at the token rows.
    Concat(usize),
    /// Summands.
    Sum,
    /// All ranks hold the whole.
    First,
}

/// Columns of a tensor's rows: `from..to`, each `step`-th.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// First one.
    pub from: Expression,
    /// One behind the last.
    pub to: Expression,
    /// Distance of two.
    pub step: usize,
}

/// What a tensor, or a part of it, is.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The checkpoint; `tokens` and `positions` are what their names say.
    pub id: Pattern,
    /// Letters of the axes, slowest first: T is the token rows, B has one entry.
    pub layout: Option<String>,
    /// Order of the axes, before anything else.
    pub transpose: Option<Vec<usize>>,
    /// Which columns, counted along the last axis.
    pub columns: Option<Columns>,
    /// Positions of its rows, from the end where negative, where these are not all of the step.
    pub rows: Option<Vec<i64>>,
    /// Values are multiplied by this,
    pub scale: Option<f32>,
    /// and this is added.
    pub add: Option<f32>,
    /// How ranks' parts become the whole.
    pub shards: Option<Shards>,
}

/// One line of a map.
#[derive(Clone, Debug)]
pub struct Line {
    /// The name.
    pub pattern: Pattern,
    /// What it is; several where it is split.
    pub targets: Vec<Target>,
    /// Counted from 1.
    pub number: usize,
}

/// A map.
#[derive(Clone, Debug)]
pub struct Map {
    /// The file, or the name of a built-in one.
    pub origin: String,
    /// Whether it came with parity.
    pub built_in: bool,
    /// Names lose the first of these that they begin with,
    prefix: Vec<String>,
    /// and of these that they end with.
    suffix: Vec<String>,
    /// In the order of the file.
    pub lines: Vec<Line>,
}

/// Keys that are no names of tensors.
const PREFIX: &str = "prefix";
const SUFFIX: &str = "suffix";

/// What a target may say.
const KEYS: [&str; 8] = ["id", "layout", "transpose", "columns", "rows", "scale", "add", "shards"];

impl Map {
    /// Reads a file.
    ///
    /// # Errors
    /// The file, the line and the pattern that is wrong.
    pub fn read(path: &Path) -> Result<Map> {
        let text = files::read(path, files::TEXT_BYTES_MAX)?;
        Map::parse(&text, &path.display().to_string(), false)
    }

    /// Reads a text; `origin` is what errors call it.
    ///
    /// # Errors
    /// The line and the pattern that is wrong.
    pub fn parse(text: &str, origin: &str, built_in: bool) -> Result<Map> {
        let entries: std::collections::HashMap<Spanned<String>, Spanned<Value>> = toml::from_str(text)
            .map_err(|e| {
                let line = e.span().map(|span| line_of(text, span.start));
                let subject = line.map_or(origin.to_owned(), |line| format!("{origin}:{line}"));
                Error::new(subject, format!("is no map of names: {}", e.message())).expected(EXAMPLE)
            })?;
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        let mut map = Map {
            origin: origin.to_owned(),
            built_in,
            prefix: Vec::new(),
            suffix: Vec::new(),
            lines: Vec::new(),
        };
        for (key, value) in entries {
            let (number, key) = (line_of(text, key.span().start), key.into_inner());
            let wrong = |what: String| {
                Error::new(format!("{origin}:{number}"), format!("`{key}`: {what}")).expected(EXAMPLE)
            };
            match key.as_str() {
                PREFIX => map.prefix = strings(value.get_ref()).map_err(wrong)?,
                SUFFIX => map.suffix = strings(value.get_ref()).map_err(wrong)?,
                _ => {
                    let pattern = Pattern::parse(&key).map_err(wrong)?;
                    let targets = targets(value.get_ref()).map_err(wrong)?;
                    check(&pattern, &targets).map_err(wrong)?;
                    map.lines.push(Line { pattern, targets, number });
                }
            }
        }
        Ok(map)
    }

    /// A map that translates nothing: names are ids.
    pub fn none() -> Map {
        let (prefix, suffix) = (Vec::new(), Vec::new());
        Map { origin: String::new(), built_in: true, prefix, suffix, lines: Vec::new() }
    }

    /// Which one it is, for a reader of a report.
    pub fn described(&self) -> String {
        match (self.origin.is_empty(), self.built_in) {
            (true, _) => "its names are ids".to_owned(),
            (false, true) => format!("names by the built-in map {} (--names chooses another)", self.origin),
            (false, false) => format!("names by {}", self.origin),
        }
    }

    /// The first line that a name fits, and the numbers in the name.
    pub fn find(&self, name: &str, widths: &Widths) -> Option<(&Line, Numbers)> {
        let name = self.prefix.iter().find_map(|prefix| name.strip_prefix(prefix.as_str())).unwrap_or(name);
        let name = self.suffix.iter().find_map(|suffix| name.strip_suffix(suffix.as_str())).unwrap_or(name);
        let known = |letter| widths.get(letter);
        self.lines.iter().find_map(|line| Some((line, line.pattern.find(name, &known)?)))
    }

    /// What errors call a line.
    pub fn place(&self, line: &Line) -> String {
        match self.built_in {
            true => {
                format!("the built-in map {}, line {}: `{}`", self.origin, line.number, line.pattern.text)
            }
            false => format!("{}:{}: `{}`", self.origin, line.number, line.pattern.text),
        }
    }

    /// A width of the model that decides whether a name fits a line, and is not known.
    pub fn unknown(line: &Line, widths: &Widths) -> Option<char> {
        line.pattern.letters().find(|letter| letter.is_uppercase() && widths.get(*letter).is_none())
    }
}

const EXAMPLE: &str = r#""layers.{n}.wq" = "blk.{n}.q", or { id = "blk.{n}.q", layout = "BHTE" }; docs/dumps.md lists what a line can say"#;

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

fn strings(value: &Value) -> std::result::Result<Vec<String>, String> {
    let text =
        |value: &Value| value.as_str().map(str::to_owned).ok_or("a list of texts is wanted".to_owned());
    value.as_array().ok_or("a list of texts is wanted".to_owned())?.iter().map(text).collect()
}

fn targets(value: &Value) -> std::result::Result<Vec<Target>, String> {
    match value {
        Value::Array(parts) if !parts.is_empty() => parts.iter().map(target).collect(),
        one => Ok(vec![target(one)?]),
    }
}

fn target(value: &Value) -> std::result::Result<Target, String> {
    let table = match value {
        Value::String(id) => Table::from_iter([("id".to_owned(), Value::String(id.clone()))]),
        Value::Table(table) => table.clone(),
        other => return Err(format!("an id or a table is wanted, not {}", other.type_str())),
    };
    if let Some(other) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
        return Err(format!("`{other}` is none of {}", KEYS.join(", ")));
    }
    let text = |key: &str| match table.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(format!("`{key}` is a text")),
    };
    let number = |key: &str| match table.get(key) {
        None => Ok(None),
        Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x as f32)),
        Some(Value::Integer(x)) => Ok(Some(*x as f32)),
        Some(_) => Err(format!("`{key}` is a number")),
    };
    let id = Pattern::parse(text("id")?.ok_or("`id` is missing")?)?;
    if !id.makes_ids() {
        return Err(format!("`{}` is no checkpoint id (such as blk.{{n}}.ffn_out)", id.text));
    }
    let list = |key: &str| table.get(key).map(integers).transpose().map_err(|e| format!("`{key}`: {e}"));
    let axes =
        |axes: Vec<i64>| axes.into_iter().map(|axis| usize::try_from(axis).ok()).collect::<Option<Vec<_>>>();
    let transpose =
        list("transpose")?.map(|list| axes(list).ok_or("`transpose` lists axes, from 0".to_owned()));
    let rows = match table.get("rows") {
        Some(Value::String(last)) if last == "last" => Some(vec![-1]),
        _ => list("rows")?,
    };
    Ok(Target {
        id,
        layout: text("layout")?.map(layout).transpose()?,
        transpose: transpose.transpose()?,
        columns: text("columns")?.map(columns).transpose()?,
        rows,
        scale: number("scale")?,
        add: number("add")?,
        shards: text("shards")?.map(shards).transpose()?,
    })
}

fn integers(value: &Value) -> std::result::Result<Vec<i64>, String> {
    let all = value.as_array().and_then(|values| values.iter().map(Value::as_integer).collect());
    all.ok_or_else(|| "a list of whole numbers is wanted".to_owned())
}

/// Letters of axes, each once, T among them.
fn layout(text: &str) -> std::result::Result<String, String> {
    let letters: Vec<char> = text.chars().filter(|c| !" (),".contains(*c)).collect();
    let once = letters.iter().all(|letter| letters.iter().filter(|other| *other == letter).count() == 1);
    let known = letters.iter().all(|letter| "BTHKEDFVS".contains(*letter));
    match once && known && letters.contains(&'T') {
        true => Ok(letters.into_iter().collect()),
        false => Err(format!(
            "`{text}` is no layout: the axes from the slowest on, each once, of T token rows, B (one entry), H or K \
             heads, E, D, F, V, S; axes that are one, as H·E, are one letter"
        )),
    }
}

fn columns(text: &str) -> std::result::Result<Columns, String> {
    let (range, step) = text.split_once("step").unwrap_or((text, "1"));
    let wrong = || format!("`{text}` are no columns: \"0..H*E\", \"W/2..W\" or \"0..W step 2\"");
    let (from, to) = range.split_once("..").ok_or_else(wrong)?;
    let step = step.trim().parse().ok().filter(|step| *step > 0).ok_or_else(wrong)?;
    Ok(Columns { from: Expression::parse(from)?, to: Expression::parse(to)?, step })
}

fn shards(text: &str) -> std::result::Result<Shards, String> {
    let wrong = || format!("`{text}` is none of \"concat\", \"concat 0\", \"sum\", \"first\"");
    let (way, axis) = text.split_once(' ').map_or((text, None), |(way, axis)| (way, Some(axis)));
    match (way, axis) {
        ("concat", None) => Ok(Shards::Concat(1)),
        ("concat", Some(axis)) => Ok(Shards::Concat(axis.trim().parse().map_err(|_| wrong())?)),
        ("sum", None) => Ok(Shards::Sum),
        ("first", None) => Ok(Shards::First),
        _ => Err(wrong()),
    }
}

/// Numbers of ids must come from the name.
fn check(pattern: &Pattern, targets: &[Target]) -> std::result::Result<(), String> {
    for target in targets {
        if let Some(letter) = target.id.letters().find(|letter| !pattern.letters().any(|has| has == *letter))
        {
            return Err(format!(
                "`{}` has a number {{{letter}}} that the name does not have",
                target.id.text
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Map> {
        Map::parse(text, "map.toml", false)
    }

    #[test]
    fn a_line_says_what_a_tensor_is_and_how_it_lies() {
        let map = parse(
            "prefix = [\"model.\"]\n\"norm\" = \"final_norm\"\n\
             \"h.{n}.qkv\" = [{ id = \"blk.{n}.q\", columns = \"0..H*E\" }, { id = \"blk.{n}.v\", columns = \"1..W step 2\" }]\n\
             \"h.{n}.o\" = { id = \"blk.{n}.attn_out\", layout = \"(B,T,D)\", shards = \"sum\", scale = 2, rows = \"last\" }\n",
        )
        .unwrap();
        let (line, numbers) = map.find("model.h.3.qkv", &Widths::default()).unwrap();
        assert_eq!((line.number, line.targets.len()), (3, 2));
        assert_eq!(line.targets[1].id.fill(&numbers).unwrap(), "blk.3.v");
        assert_eq!(line.targets[1].columns.as_ref().unwrap().step, 2);
        let (line, _) = map.find("h.0.o", &Widths::default()).unwrap();
        let target = &line.targets[0];
        assert_eq!(target.layout.as_deref(), Some("BTD"));
        assert_eq!(
            (target.shards, target.scale, target.rows.clone()),
            (Some(Shards::Sum), Some(2.0), Some(vec![-1]))
        );
        assert!(map.find("h.x.o", &Widths::default()).is_none());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line_and_pattern() {
        for (text, said) in [
            ("\"a.{n}\" = \"blk.{n}.q\"\n\"b\" = \"q\"", "map.toml:2: `b`: `q` is no checkpoint id"),
            ("\"a\" = \"blk.{n}.q\"", "that the name does not have"),
            ("\n\n\"a{\" = \"embed\"", "map.toml:3: `a{`: a brace"),
            ("a = { id = \"embed\", layuot = \"TD\" }", "`layuot` is none of"),
            ("a = { layout = \"TD\" }", "`id` is missing"),
            ("a = { id = \"embed\", layout = \"DD\" }", "no layout"),
            ("a = { id = \"embed\", columns = \"0-3\" }", "are no columns"),
            ("a = { id = \"embed\", columns = \"0..x\" }", "neither a number"),
            ("a = { id = \"embed\", shards = \"mean\" }", "is none of \"concat\""),
            ("a = { id = \"embed\", scale = nan }", "`scale` is a number"),
            ("a = 3", "an id or a table is wanted"),
            ("a = []", "an id or a table is wanted"),
            ("prefix = 3", "a list of texts"),
            ("{\"a\": \"embed\"}", "map.toml:1: is no map of names"),
            ("a = \"embed\"\na = \"logits\"", "map.toml:2"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
