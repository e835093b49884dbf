//! Dumps of other engines: read in their own format, named by a map, put into the order of a dump of our own.

pub mod array;
mod convert;
pub mod logprobs;
pub mod map;
pub mod read;
mod shards;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use parity_dump::manifest::{ModelInfo, Producer, Stopped};
use parity_dump::{Checkpoint, Dump};

use crate::dump::inputs;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::numerics::Numerics;
use array::Array;
use map::expression::Widths;
use map::{Map, built_in};

/// Under which key a dump says of how many ranks it was put together.
pub const RANKS: &str = "ranks";

/// One forward pass.
#[derive(Clone, Default)]
pub struct Pass {
    /// What was dumped, under the producer's names.
    pub arrays: Vec<Array>,
    /// Its tokens, where the format says them.
    pub tokens: Option<Vec<u32>>,
    /// Their positions, where the format says them.
    pub positions: Option<Vec<u32>>,
    /// Positions of tensors that lack some, by name.
    pub rows: BTreeMap<String, Vec<u32>>,
}

/// What one engine, or one rank of it, dumped.
#[derive(Clone)]
pub struct Foreign {
    /// The file or folder.
    pub path: PathBuf,
    /// Which format it has.
    pub format: &'static str,
    /// Who computed the values, where the format says so.
    pub producer: Producer,
    /// The model, where the format says so.
    pub model: ModelInfo,
    /// The text, where the format says so.
    pub prompt: Option<String>,
    /// Whatever else it says of itself.
    pub provenance: BTreeMap<String, String>,
    /// All tokens in the order of their positions, where they lie beside the passes.
    pub tokens: Option<Vec<u32>>,
    /// Letters of the axes of tensors, by name, by id, or by the part of the id behind the layer.
    pub layout: BTreeMap<String, String>,
    /// In order.
    pub passes: Vec<Pass>,
    /// `false` for an interrupted recording.
    pub complete: bool,
    /// Where and why it ended early, where it says so.
    pub stopped: Option<Stopped>,
}

impl Foreign {
    /// Passes of a format that says nothing but the arrays.
    pub fn new(path: &Path, format: &'static str, passes: Vec<Pass>) -> Foreign {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Foreign {
            path: path.to_owned(),
            format,
            producer: Producer { name, ..Producer::default() },
            model: ModelInfo::default(),
            prompt: None,
            provenance: BTreeMap::new(),
            tokens: None,
            layout: BTreeMap::new(),
            passes,
            complete: true,
            stopped: None,
        }
    }

    /// As rank of an engine whose ranks lie in `folder`: called after that, where its format says no name.
    fn of_rank(mut self, rank: &Path, folder: &Path) -> Foreign {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        if name(&self.path).is_some_and(|own| own == self.producer.name) {
            self.producer.name = name(&whole).unwrap_or_default();
        }
        Foreign { path: rank.to_owned(), ..self }
    }

    /// Where it lies: of several ranks the folder around them.
    fn origin(&self, ranks: usize) -> PathBuf {
        match (ranks, self.path.parent()) {
            (2.., Some(parent)) if self.format != "sglang" => parent.to_owned(),
            _ => self.path.clone(),
        }
    }

    /// The layout that the dump itself says of a tensor.
    fn layout_of(&self, name: &str, id: Checkpoint) -> Option<String> {
        let by_name = self.layout.get(name).or_else(|| self.layout.get(&id.to_string()));
        by_name.or_else(|| self.layout.get(id.kind().name())).cloned()
    }

    /// Names of all tensors, each once.
    pub fn names(&self) -> BTreeSet<&str> {
        self.passes.iter().flat_map(|pass| &pass.arrays).map(|array| array.name.as_str()).collect()
    }
}

/// How a dump is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A map of names: a TOML file, or the name of one that comes with parity. One that fits is looked for where none
    /// is given.
    pub names: Option<PathBuf>,
    /// Tokens by position, where the dump does not say them.
    pub tokens: Option<Vec<u32>>,
    /// The model file, whose widths a map may need.
    pub model: Option<PathBuf>,
}

impl Options {
    /// Whether anything is said of a dump itself.
    pub fn is_told(&self) -> bool {
        self.names.is_some() || self.tokens.is_some()
    }
}

/// Opens a dump, of parity's own format or another.
///
/// # Errors
/// What is no dump, does not fit the map, or says of itself that it is of another text.
pub fn open(path: &Path, options: &Options) -> Result<Dump> {
    let dump = each_position_once(opened(path, options)?, path)?;
    inputs::refuse_others(&dump)?;
    if let Some(model) = options.model.as_ref().filter(|_| dump.manifest().graphs.is_empty()) {
        shards::refuse_one_rank(&dump, &Widths::of(&Gguf::open(model)?)?)?;
    }
    Ok(dump)
}

/// A dump with the arithmetic that a user says it has, if any, whatever it declares.
pub fn declared(mut dump: Dump, numerics: Option<Numerics>) -> Dump {
    if let Some(numerics) = numerics {
        dump.declare(numerics.to_string());
    }
    dump
}

fn opened(path: &Path, options: &Options) -> Result<Dump> {
    let own = (!options.is_told() && is_own(path)).then(|| Dump::open(path).map_err(Error::from));
    let own = match own {
        Some(Ok(dump)) if is_understood(&dump) => return Ok(dump),
        other => other,
    };
    let read = read::read(path);
    let ranks = match (read, own.is_some()) {
        (Ok(ranks), _) => ranks,
        (Err(_), true) => return own.unwrap_or_else(|| Err(Error::file(path, "is no dump"))),
        (Err(error), false) => return Err(error),
    };
    let model = options.model.as_ref().map(|model| Gguf::open(model)).transpose()?;
    let widths = model.as_ref().map(Widths::of).transpose()?.unwrap_or_default();
    let architecture = model.as_ref().map(|model| model.str("general.architecture")).transpose()?.flatten();
    let names: BTreeSet<&str> = ranks.iter().flat_map(Foreign::names).collect();
    let foreign = names.iter().copied().filter(|name| !is_fixed(name));
    let found = match &options.names {
        Some(names) => Some(map_of(names)?),
        None => {
            let has_ids = names.iter().any(|name| is_of_layer(name));
            built_in::fitting(foreign, has_ids, &widths, architecture)?
        }
    };
    let Some(map) = found else {
        let ids = || convert::convert(&ranks, &Map::none(), &widths, options.tokens.as_deref());
        return match own {
            Some(Ok(dump)) => Ok(dump),
            // What is only laid out otherwise can still be read, or gets the fix.
            Some(Err(own)) => ids().map_err(|error| if map::apply::is_misfit(&error) { error } else { own }),
            None => ids(),
        };
    };
    convert::convert(&ranks, &map, &widths, options.tokens.as_deref())
}

/// Whether a dump is parity's own, with ids for names.
pub fn is_native(path: &Path) -> bool {
    is_own(path) && Dump::open(path).is_ok_and(|dump| is_understood(&dump))
}

/// Whether it may be a dump of parity's own format.
fn is_own(path: &Path) -> bool {
    match path.is_dir() {
        true => path.join(parity_dump::manifest::MANIFEST_FILE).exists(),
        false => read::is_safetensors(path),
    }
}

/// Whether every name of a dump is an id of the vocabulary, or one of the graph that it brings.
fn is_understood(dump: &Dump) -> bool {
    let fixed = dump.foreign().is_empty() && dump.checkpoints().all(|id| id.kind().is_fixed());
    fixed || !dump.manifest().graphs.is_empty() || dump.seen_checkpoints().next().is_some()
}

/// Whether a name is an id of the vocabulary that stands in a layer.
fn is_of_layer(name: &str) -> bool {
    name.parse::<Checkpoint>().is_ok_and(|id| id.kind().is_fixed() && id.layer_index().is_some())
}

fn is_fixed(name: &str) -> bool {
    name.parse::<Checkpoint>().is_ok_and(|id| id.kind().is_fixed())
}

/// The map that a user names: a file, or one that comes with parity.
fn map_of(names: &Path) -> Result<Map> {
    match names.to_str().and_then(built_in::named) {
        Some(map) if !names.exists() => map,
        _ => Map::read(names),
    }
}

/// Refuses a dump whose steps hold a position twice: which of its rows are those of the token, nobody knows.
fn each_position_once(dump: Dump, path: &Path) -> Result<Dump> {
    let mut known = BTreeSet::new();
    for (index, step) in dump.manifest().steps.iter().enumerate() {
        if let Some(twice) = step.positions.iter().find(|position| !known.insert(**position)) {
            return Err(Error::file(path, format!("position {twice} is recorded twice"))
                .expected("each position in one step, once")
                .found(format!("it again among the positions of step {index}"))
                .hint(
                    "`positions` of a step are those of its token rows, counted from the start of the text",
                ));
        }
    }
    Ok(dump)
}

/// Names that are spelt out in a sentence.
const NAMED_MAX: usize = 4;

/// A sentence of names, if there are any.
fn listed(what: &str, names: &[String]) -> Option<String> {
    let more = if names.len() > NAMED_MAX { ", …" } else { "" };
    let first = names[..names.len().min(NAMED_MAX)].join(", ");
    (!names.is_empty()).then(|| format!("{what}: {} ({first}{more})", names.len()))
}

/// What a reader must know of the names of the `side`'s dump: which map translated them, and what was not looked at.
pub fn names_not_understood(dump: &Dump, side: &str) -> Vec<String> {
    let unknown = listed(
        &format!("tensors of the {side} that were not looked at, since their names are no checkpoint"),
        dump.foreign(),
    );
    let unknown = unknown.map(|text| match dump.notes().is_empty() {
        true => format!("{text}; --names MAP.toml translates them, `parity map` proposes one"),
        false => text,
    });
    dump.notes().iter().map(|note| format!("the {side}: {note}")).chain(unknown).collect()
}
