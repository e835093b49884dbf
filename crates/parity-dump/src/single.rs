//! A dump in one `.safetensors` file, as foreign engines write it in one line.
//!
//! Tensors are named by checkpoint ids; `tokens` (I32, U32 or I64) is one more tensor, for positions 0 to T-1. What a
//! manifest says of a folder may stand in the file's `__metadata__`: `producer`, `numerics`, `steps` (as in a manifest,
//! or the token rows of each forward pass: `[5, 1, 1]`), `rows`, `layout` (`{"q_rope": "HTE"}`), `stopped`, `requires`
//! and `complete`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::Checkpoint;
use crate::error::DumpError;
use crate::files::{
    POSITIONS_MAX, element_of, map_file, refuse_numbered, refuse_unknown, too_many_tokens, unreadable,
};
use crate::manifest::{Manifest, ModelInfo, Producer, Step, Stopped};
use crate::reader::Dump;
use crate::recorded::Part;

/// Name of the tensor that holds the tokens.
const TOKENS: &str = "tokens";
/// Key of `__metadata__` that holds the token rows of each step.
const STEPS: &str = "steps";
/// What axes are called.
const LETTERS: &str = "BTHKEDFVS";
/// Steps times tensors at most: each is a part that is kept account of.
const PARTS_MAX: usize = 1 << 21;

/// Opens one file.
pub(crate) fn open(path: &Path) -> Result<Dump, DumpError> {
    let map = map_file(path)?;
    let tensors = SafeTensors::deserialize(&map).map_err(|e| unreadable(path, &e))?;
    let tokens = read_tokens(path, &tensors)?;
    let said = Said::read(path, &map, tokens.len())?;
    if said.steps.len().saturating_mul(tensors.len()) > PARTS_MAX {
        return Err(DumpError::new(path, format!("has too many steps for its {} tensors", tensors.len()))
            .expected_found(format!("at most {}", PARTS_MAX / tensors.len().max(1)), said.steps.len()));
    }
    if let Some((name, layout)) = said.layout.first_key_value() {
        return Err(DumpError::new(path, "has another order of axes than a dump: its __metadata__ says so")
            .expected_found("token rows first", format!("{layout} of {name}"))
            .hint("`parity` turns it round; a program of your own permutes the axes before it saves"));
    }
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let steps: Vec<Step> = said
        .steps
        .into_iter()
        .map(|positions| Step { file: file_name.clone(), positions, ..Step::default() })
        .collect();
    let producer = Producer {
        numerics: said.numerics.or(said.producer.numerics),
        name: if said.producer.name.is_empty() { file_name } else { said.producer.name },
        ..said.producer
    };
    let manifest = Manifest {
        tokens,
        steps: steps.clone(),
        rows: said.rows,
        stopped: said.stopped,
        complete: said.complete,
        ..Manifest::new(producer, ModelInfo::default())
    };
    let mut dump = Dump::from_parts(path, manifest, Vec::new());
    let mut parts: Vec<(Checkpoint, Part)> = Vec::new();
    let mut foreign = Vec::new();
    let mut named: Vec<_> = tensors.iter().filter(|(name, _)| *name != TOKENS).collect();
    named.sort_by_key(|(name, _)| name.to_owned());
    for (name, view) in named {
        let Some(checkpoint) = dump.checkpoint_of(name) else {
            foreign.push(name.to_owned());
            continue;
        };
        let offset = view.data().as_ptr() as usize - map.as_ptr() as usize;
        let element = element_of(path, name, view.dtype())?;
        let part = Part::new(checkpoint, (0, 0), offset, element, view.shape().to_vec());
        parts.push((checkpoint, part));
    }
    dump.set_foreign(foreign);
    for (checkpoint, part) in parts {
        add(&mut dump, path, checkpoint, &part, &steps)?;
    }
    dump.add_map(map);
    dump.sort_rows();
    Ok(dump)
}

/// What a file of another engine's names says about itself in `__metadata__`.
pub struct Metadata {
    /// Who computed it.
    pub producer: Producer,
    /// Positions of each step.
    pub steps: Vec<Vec<u32>>,
    /// Letters of the axes, slowest first, by the tensor's name, its id, or the part of the id behind the layer.
    pub layout: BTreeMap<String, String>,
    /// Whether everything that was to be recorded is there.
    pub complete: bool,
    /// Where and why it ended early.
    pub stopped: Option<Stopped>,
}

/// Reads the `__metadata__` of a file with `n` tokens.
///
/// # Errors
/// What is no such file, steps that its tokens do not have.
pub fn said(path: &Path, file: &[u8], n: usize) -> Result<Metadata, DumpError> {
    let said = Said::read(path, file, n)?;
    let producer = Producer { numerics: said.numerics.or(said.producer.numerics), ..said.producer };
    let Said { steps, layout, complete, stopped, .. } = said;
    Ok(Metadata { producer, steps, layout, complete, stopped })
}

/// Adds a tensor whose rows are those of all steps, one after the other.
fn add(
    dump: &mut Dump,
    path: &Path,
    checkpoint: Checkpoint,
    part: &Part,
    steps: &[Step],
) -> Result<(), DumpError> {
    let rows: Vec<Vec<u32>> = steps.iter().map(|step| dump.rows_of(checkpoint, &step.positions)).collect();
    let all: Vec<u32> = rows.iter().flatten().copied().collect();
    if part.rows() != Some(all.len()) || rows.len() == 1 {
        // Of one step, or refused.
        return dump.add_part(path, checkpoint, part.clone(), &all);
    }
    let mut first = 0;
    for (step, positions) in rows.iter().enumerate() {
        dump.add_part(path, checkpoint, part.of_step(step, first, positions.len()), positions)?;
        first += positions.len();
    }
    Ok(())
}

/// What a file says about itself.
struct Said {
    producer: Producer,
    numerics: Option<String>,
    /// Positions of each step.
    steps: Vec<Vec<u32>>,
    rows: HashMap<Checkpoint, Vec<u32>>,
    layout: BTreeMap<String, String>,
    stopped: Option<Stopped>,
    complete: bool,
}

/// The steps in `__metadata__`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Steps {
    /// Token rows of each, all tokens in all: `[5, 1, 1]`.
    Rows(Vec<u32>),
    /// As in a manifest.
    Positions(Vec<Positions>),
}

/// A step as a manifest has it.
#[derive(Deserialize)]
struct Positions {
    positions: Vec<u32>,
}

impl Steps {
    /// Positions of each step, of `n` tokens; `None` where they do not add up.
    fn positions(self, n: usize) -> Option<Vec<Vec<u32>>> {
        let counts = match self {
            Steps::Positions(steps) => return Some(steps.into_iter().map(|step| step.positions).collect()),
            Steps::Rows(counts) => counts,
        };
        let sum = counts.iter().try_fold(0u32, |sum, rows| sum.checked_add(*rows))?;
        if sum as usize != n || counts.contains(&0) {
            return None;
        }
        let firsts = counts.iter().scan(0, |next, rows| Some(std::mem::replace(next, *next + rows)));
        Some(firsts.zip(&counts).map(|(first, rows)| (first..first + rows).collect()).collect())
    }
}

impl Said {
    /// Reads `__metadata__`, whose values are text. Where nothing is said there is one step, of all `n` tokens.
    fn read(path: &Path, file: &[u8], n: usize) -> Result<Said, DumpError> {
        let (_, header) = SafeTensors::read_metadata(file).map_err(|e| unreadable(path, &e))?;
        let none = HashMap::new();
        let all = header.metadata().as_ref().unwrap_or(&none);
        let requires = match all.get("requires") {
            None => Vec::new(),
            Some(text) => parsed(path, "requires", text, "[\"sequences\"]")?,
        };
        refuse_unknown(path, &requires)?;
        refuse_numbered(path, &requires)?;
        let producer = match all.get("producer").map(|text| text.trim()) {
            None => Producer::default(),
            Some(text) if text.starts_with('{') => parsed(path, "producer", text, "{\"name\": …}")?,
            Some(name) => Producer { name: name.to_owned(), ..Producer::default() },
        };
        let steps = match all.get(STEPS) {
            None => vec![(0..n as u32).collect()],
            Some(text) => {
                let like = "[5, 1, 1] or [{\"positions\": [0, 1, …]}, …]";
                let steps: Steps = parsed(path, STEPS, text, like)?;
                steps.positions(n).ok_or_else(|| {
                    DumpError::new(path, format!("`{STEPS}` in its metadata does not fit its tokens"))
                        .expected_found(
                            format!("token rows of each forward pass, {n} in all, such as [5, 1, 1]"),
                            shown(text),
                        )
                        .hint("a prefill of 5 tokens and two decode steps are [5, 1, 1]")
                })?
            }
        };
        if let Some(position) = steps.iter().flatten().find(|position| **position as usize >= n) {
            return Err(DumpError::new(path, "`steps` has a position without a token")
                .expected_found(format!("positions below {n}"), position));
        }
        let rows = match all.get("rows") {
            None => HashMap::new(),
            Some(text) => parsed(path, "rows", text, "{\"blk.0.ffn_norm\": [4], …}")?,
        };
        let layout: BTreeMap<String, String> = match all.get("layout") {
            None => BTreeMap::new(),
            Some(text) => parsed(path, "layout", text, "{\"q_rope\": \"HTE\", …}")?,
        };
        let is_letters =
            |layout: &String| layout.contains('T') && layout.chars().all(|c| LETTERS.contains(c));
        if let Some((name, layout)) = layout.iter().find(|(_, layout)| !is_letters(layout)) {
            return Err(DumpError::new(path, format!("`layout` of its __metadata__ has no axes for {name}"))
                .expected_found(
                    format!("letters of {LETTERS}, T among them, slowest axis first"),
                    shown(layout),
                ));
        }
        // A file is written at once: what says nothing is whole.
        let complete = match all.get("complete") {
            None => true,
            Some(text) => parsed(path, "complete", text, "true")?,
        };
        let stopped = match all.get("stopped") {
            None => None,
            Some(text) => {
                parsed(path, "stopped", text, "{\"after_step\": 3, \"position\": 9, \"reason\": …}")?
            }
        };
        let numerics = all.get("numerics").cloned();
        Ok(Said { producer, numerics, steps, rows, layout, stopped, complete })
    }
}

/// JSON text of `__metadata__`.
fn parsed<T: DeserializeOwned>(path: &Path, key: &str, text: &str, like: &str) -> Result<T, DumpError> {
    serde_json::from_str(text).map_err(|e| {
        DumpError::new(path, format!("`{key}` of its __metadata__ is not understood: {e}"))
            .expected_found(format!("JSON as in a manifest: {like}"), shown(text))
    })
}

/// The start of a text, as an error shows it.
fn shown(text: &str) -> String {
    const CHARACTERS: usize = 80;
    text.chars().take(CHARACTERS).collect()
}

fn read_tokens(path: &Path, tensors: &SafeTensors<'_>) -> Result<Vec<u32>, DumpError> {
    let missing = |found: String| {
        DumpError::new(path, format!("no usable tensor `{TOKENS}`"))
            .expected_found("token ids (T,) as I32, U32 or I64", found)
            .hint("save the prompt's token ids beside the activations")
    };
    let view = tensors.tensor(TOKENS).map_err(|_| missing("none".to_owned()))?;
    let size = match view.dtype() {
        Dtype::I32 | Dtype::U32 => 4,
        Dtype::I64 => 8,
        other => return Err(missing(format!("{other:?}"))),
    };
    // Before a value is read: a sparse file holds as many as it likes.
    let rows =
        tensors.iter().find(|(name, _)| *name != TOKENS).and_then(|(_, view)| view.shape().first().copied());
    let n = view.data().len() / size;
    if n > POSITIONS_MAX {
        let error = too_many_tokens(path, n);
        return Err(match rows {
            Some(rows) => error.hint(format!("`{TOKENS}` is (T,), and the other tensors have {rows} rows")),
            None => error,
        });
    }
    let mut tokens = Vec::with_capacity(n);
    for bytes in view.data().chunks_exact(size) {
        let token = if size == 8 {
            i64::from_le_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ])
        } else {
            i64::from(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        tokens.push(u32::try_from(token).map_err(|_| missing(format!("token {token}")))?);
    }
    Ok(tokens)
}
