//! `suite.toml` as it is written: every list in a `[[case]]` is an axis, and the case stands for all
//! combinations.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ProblemKind;
use super::family::{Family, Setting, Value};
use super::suite::{Case, Expect, Input, Waiver};
use crate::checkpoint::Checkpoint;
use crate::compare::{Tolerance, Tolerances};
use crate::engine::device::Device;
use crate::error::Error;
use crate::faults::injected::parse;
use crate::inspect::against::scaled;
use crate::numerics::Numerics;
use crate::remote;
use crate::report::Verdict;
use crate::select::{self, Layers, Selection};

/// What a file holds.
pub struct Families {
    /// Name of the suite.
    pub name: String,
    /// File of its baseline, where it has one.
    pub baseline: Option<PathBuf>,
    /// One for each `[[case]]`, those of included suites first.
    pub families: Vec<Family>,
}

type Result<T> = std::result::Result<T, String>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    baseline: Option<PathBuf>,
    #[serde(default)]
    include: Vec<PathBuf>,
    #[serde(default)]
    models: BTreeMap<String, String>,
    #[serde(default)]
    prompts: BTreeMap<String, Prompt>,
    #[serde(default)]
    case: Vec<Definition>,
}

/// `"def f():"`, `{ file = "prompt.txt" }` or `{ tokens = [1, 2, 3] }`.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Prompt {
    Text(String),
    File { file: PathBuf },
    Tokens { tokens: Vec<u32> },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Definition {
    name: String,
    model: Option<Axis<String>>,
    prompt: Option<Axis<String>>,
    device: Option<Axis<String>>,
    numerics: Option<Axis<String>>,
    chunk: Option<Axis<usize>>,
    inject: Option<Axis<String>>,
    n_predict: Option<usize>,
    dump: Option<String>,
    reference: Option<String>,
    #[serde(default)]
    lora: Vec<String>,
    layer: Option<String>,
    #[serde(default)]
    checkpoint: Vec<String>,
    expect: Option<Expected>,
    at: Option<Checkpoint>,
    fault: Option<String>,
    #[serde(default)]
    tolerance: Vec<ToleranceRule>,
    #[serde(default)]
    waive: Vec<WaiverRule>,
    #[serde(default)]
    allow: BTreeSet<ProblemKind>,
    #[serde(default)]
    retries: u32,
}

/// One value, or several to run the case with each.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Axis<T> {
    One(T),
    Many(Vec<T>),
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Expected {
    Parity,
    Divergence,
    Identical,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToleranceRule {
    checkpoint: String,
    rtol: Option<f64>,
    atol: Option<f64>,
    nmse: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaiverRule {
    checkpoint: String,
    reason: String,
    until: String,
}

/// Reads the text of a suite whose paths are relative to `folder`.
pub fn read(text: &str, folder: &Path) -> Result<Families> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
    let mut families: Vec<Family> = Vec::new();
    for path in &file.include {
        let path = folder.join(path);
        let inside = |e: String| format!("{}: {e}", path.display());
        let text = crate::files::read(&path, crate::files::TEXT_BYTES_MAX).map_err(|e| e.to_string())?;
        let inner: File = toml::from_str(&text).map_err(|e| inside(e.to_string()))?;
        // One level, so that nothing includes itself.
        if !inner.include.is_empty() {
            return Err(inside("an included suite includes others".to_owned()));
        }
        inner.expand(path.parent().unwrap_or(folder), &mut families).map_err(inside)?;
    }
    file.expand(folder, &mut families)?;
    Ok(Families { name: file.name, baseline: file.baseline.map(|path| folder.join(path)), families })
}

impl File {
    /// Adds its definitions behind those that there are.
    fn expand(&self, folder: &Path, families: &mut Vec<Family>) -> Result<()> {
        for definition in &self.case {
            let family = definition.family(families.len(), self, folder);
            families.push(family.map_err(|e| format!("case `{}`: {e}", definition.name))?);
        }
        Ok(())
    }
}

impl Definition {
    /// Its axes, every value of which is read once.
    fn family(&self, definition: usize, file: &File, folder: &Path) -> Result<Family> {
        check_name(&self.name)?;
        let axes = [
            axis("model", &self.model, |name| {
                let path = file.models.get(name).ok_or_else(|| unknown("model", name, file.models.keys()))?;
                Ok(Setting::Model(located(path, folder)))
            })?,
            axis("prompt", &self.prompt, |name| {
                let prompt = file.prompts.get(name);
                let prompt = prompt.ok_or_else(|| unknown("prompt", name, file.prompts.keys()))?;
                prompt.read(folder).map(Setting::Input)
            })?,
            axis("device", &self.device, |word| word.parse().map(Setting::Device))?,
            axis("numerics", &self.numerics, |words| words.parse().map(Setting::Numerics))?,
            axis("chunk", &self.chunk, |chunk| match chunk {
                0 => Err("`chunk = 0`: a piece has at least one token".to_owned()),
                _ => Ok(Setting::Chunk(*chunk)),
            })?,
            axis("inject", &self.inject, |fault| {
                parse(fault).map(Setting::Inject).map_err(|e: Error| e.to_string())
            })?,
        ];
        Ok(Family {
            template: self.template(definition, folder)?,
            axes: axes.into_iter().flatten().collect(),
        })
    }

    /// The case without its axes.
    fn template(&self, definition: usize, folder: &Path) -> Result<Case> {
        let verdict = match self.expect {
            Some(Expected::Divergence) => Verdict::Divergence,
            _ => Verdict::Parity,
        };
        let identical = matches!(self.expect, Some(Expected::Identical));
        if identical && (self.dump.is_none() || self.reference.is_none()) {
            return Err(
                "expect = \"identical\" compares two recordings: it needs `dump` and `reference`".to_owned()
            );
        }
        let expect = Expect { verdict, identical, at: self.at, fault: self.fault.clone() };
        if verdict == Verdict::Parity
            && (self.inject.is_some() || expect.at.is_some() || expect.fault.is_some())
        {
            return Err(
                "a case with `inject`, `at` or `fault` must fail: write expect = \"divergence\"".to_owned()
            );
        }
        let runs =
            [self.prompt.is_some(), self.device.is_some(), self.numerics.is_some(), self.chunk.is_some()];
        if self.dump.is_some() && (runs.contains(&true) || self.inject.is_some() || self.n_predict.is_some())
        {
            return Err(
                "`dump` is judged as it is: prompt, device, numerics, chunk, inject and n_predict are for \
                        cases that run"
                    .to_owned(),
            );
        }
        if let Some(kind) = self.allow.iter().find(|kind| !kind.can_be_allowed()) {
            return Err(format!(
                "`{kind:?}` cannot be allowed; a waiver with a reason and a date can cover it"
            ));
        }
        let layers: Option<Layers> = self.layer.as_deref().map(str::parse).transpose()?;
        Ok(Case {
            id: self.name.clone(),
            definition,
            model: None,
            input: Input::Reference,
            n_predict: self.n_predict,
            device: Device::Cpu,
            numerics: Numerics::default(),
            chunk: None,
            dump: self.dump.as_ref().map(|path| located(path, folder)),
            reference: self.reference.as_ref().map(|path| located(path, folder)),
            lora: self.lora.iter().map(|text| adapter(text, folder)).collect(),
            selection: Selection::new(layers, &self.checkpoint).map_err(|e| e.to_string())?,
            tolerances: self.tolerances()?,
            inject: Vec::new(),
            expect,
            waivers: self.waive.iter().map(WaiverRule::read).collect::<Result<_>>()?,
            allow: self.allow.clone(),
            retries: match self.retries {
                retries @ 0..=RETRIES_MAX => retries,
                retries => return Err(format!("retries = {retries}: at most {RETRIES_MAX}")),
            },
        })
    }

    fn tolerances(&self) -> Result<Tolerances> {
        self.tolerance.iter().try_fold(Tolerances::default(), |all, rule| {
            let tolerance = Tolerance { rtol: rule.rtol, atol: rule.atol, nmse: rule.nmse };
            all.with_rule(&rule.checkpoint, tolerance).map_err(|e| e.to_string())
        })
    }
}

/// The values of an axis, if the case has it.
fn axis<T: ToString>(
    name: &str,
    axis: &Option<Axis<T>>,
    read: impl Fn(&T) -> Result<Setting>,
) -> Result<Option<Vec<Value>>> {
    let values: &[T] = match axis {
        None => return Ok(None),
        Some(Axis::One(value)) => std::slice::from_ref(value),
        Some(Axis::Many(values)) if values.is_empty() => {
            return Err(format!("`{name} = []`: an axis has at least one value"));
        }
        Some(Axis::Many(values)) => values,
    };
    let several = matches!(axis, Some(Axis::Many(_)));
    let value = |value: &T| -> Result<Value> {
        Ok(Value { name: several.then(|| value.to_string()), setting: read(value)? })
    };
    values.iter().map(value).collect::<Result<_>>().map(Some)
}

/// A name that can be shown, chosen with `--case`, and made a folder's.
fn check_name(name: &str) -> Result<()> {
    let wrong = match name {
        _ if name.trim().is_empty() => "it is empty",
        "." | ".." => "it is a folder's",
        _ if name.contains(char::is_control) => "it has control characters",
        _ => return Ok(()),
    };
    Err(format!("`name = {name:?}` is no name of a case: {wrong}"))
}

/// A case that fails so often fails.
const RETRIES_MAX: u32 = 100;

impl Prompt {
    fn read(&self, folder: &Path) -> Result<Input> {
        match self {
            Prompt::Text(text) => Ok(Input::Prompt(text.as_str().into())),
            Prompt::Tokens { tokens } => Ok(Input::Tokens(tokens.as_slice().into())),
            Prompt::File { file } => {
                let path = folder.join(file);
                let text = crate::files::read(&path, crate::files::TEXT_BYTES_MAX);
                text.map(|text| Input::Prompt(text.into())).map_err(|e| e.to_string())
            }
        }
    }
}

impl WaiverRule {
    fn read(&self) -> Result<Waiver> {
        let checkpoints = select::pattern("waiver", &self.checkpoint).map_err(|e| e.to_string())?;
        if self.reason.trim().is_empty() {
            return Err(format!("the waiver of `{}` gives no reason", self.checkpoint));
        }
        if !is_date(&self.until) {
            return Err(format!("`until = \"{}\"` is no date; expected YYYY-MM-DD", self.until));
        }
        Ok(Waiver {
            pattern: self.checkpoint.clone(),
            checkpoints,
            reason: self.reason.clone(),
            until: self.until.clone(),
        })
    }
}

/// YYYY-MM-DD, so that dates compare as texts.
fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let digits = |part: &str, n: usize| part.len() == n && part.bytes().all(|b| b.is_ascii_digit());
    let [year, month, day] = parts[..] else { return false };
    let within = |part: &str, last: u32| part.parse::<u32>().is_ok_and(|n| (1..=last).contains(&n));
    digits(year, 4) && digits(month, 2) && digits(day, 2) && within(month, 12) && within(day, 31)
}

/// Relative to the suite, or below a folder that the environment names; an address as it is.
fn located(path: &str, folder: &Path) -> PathBuf {
    if remote::is_remote(Path::new(path)) {
        return PathBuf::from(path);
    }
    let named = path.strip_prefix('$').and_then(|rest| rest.split_once('/'));
    match named {
        // An unset variable leaves a path that does not exist, and a message that shows the variable.
        Some((name, rest)) => match std::env::var_os(name) {
            Some(root) => PathBuf::from(root).join(rest),
            None => PathBuf::from(path),
        },
        None => folder.join(path),
    }
}

/// `FILE[:SCALE]`, relative to the suite.
fn adapter(text: &str, folder: &Path) -> (PathBuf, f32) {
    let whole = located(text, folder);
    scaled(&whole.to_string_lossy())
}

fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a String>) -> String {
    let known: Vec<&str> = known.map(String::as_str).collect();
    format!("there is no {what} `{name}` in [{what}s] (there are: {})", known.join(", "))
}
