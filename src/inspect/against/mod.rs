//! A model file against the Hugging Face folder that it was converted from: every tensor is paired with what it was
//! made of, by its name and by its values; how it was rearranged, what storing it cost, and what is not the same weight.

mod adapter;
mod adapters;
mod carried;
mod folder;
mod judge;
mod measure;
mod names;
mod sources;
mod text;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
pub use adapter::{adapter, scaled, with_adapters};
pub use adapters::compare_adapters;
use carried::Carried;
pub use carried::{COMMAND as RENDER_TEMPLATE, Difference, render as render_template};
use folder::Folder;
use judge::{Finder, Made, Mistake, mistakes};
use measure::Distance;
use names::Place;
use parity_graph::weights;
use sources::How;
use view::Order;

/// Schema of the JSON form.
const SCHEMA: &str = "parity-weights/1";

/// What the tensors of a file were made of.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `parity-weights/1`
    pub schema: &'static str,
    /// The model file.
    pub model: String,
    /// The folder.
    pub folder: String,
    /// `general.architecture`
    pub architecture: String,
    /// In the order of the file.
    pub tensors: Vec<Pair>,
    /// Weights of the folder that are not in the file, and should be.
    pub left_out: Vec<LeftOut>,
    /// Tensors of the folder that were not looked at: of other parts than the text model, or of unknown modules.
    pub unused: Vec<String>,
    /// What else differs: config.json, the tokenizer, the chat template, generation defaults.
    pub findings: Vec<Difference>,
    /// What of these could not be compared, and why.
    pub not_compared: Vec<String>,
}

/// One tensor of the file.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// Its name.
    pub name: String,
    /// How it is stored.
    pub dtype: String,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// Tensors of the folder that it was made of.
    pub made_of: Vec<String>,
    /// How they were rearranged; empty where they were not.
    pub how: String,
    /// ‖file - folder‖ / ‖folder‖: what storing it cost. Null where nothing was found.
    pub rel_l2: Option<f64>,
    /// Rows, largest difference, rows that the type does not explain.
    pub distance: Option<Distance>,
    /// What it comes to.
    pub verdict: Verdict,
    /// What is wrong with it.
    pub mistakes: Vec<Wrong>,
}

/// What the comparison of a tensor comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The same weight, stored in another type at most.
    Same,
    /// Another weight, or the same arranged as the architecture's files do not have it.
    Differs,
    /// Computed by the conversion: of no tensor of the folder.
    Made,
    /// Nothing of the folder has its name or its values.
    Unpaired,
}

/// A mistake of the conversion.
#[derive(Clone, Debug, Serialize)]
pub struct Wrong {
    /// Its name in the catalogue of faults; null where it has none.
    pub fault: Option<&'static str>,
    /// What is wrong.
    pub text: String,
}

/// A weight that the file lacks.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// Its name in the folder.
    pub name: String,
    /// Its mistake.
    #[serde(flatten)]
    pub wrong: Wrong,
}

impl Comparison {
    /// Whether something is not the same weight, or changes logits otherwise.
    pub fn differs(&self) -> bool {
        self.other_weights() || self.findings.iter().any(|finding| finding.changes_logits)
    }

    /// Whether something differs that changes no logit.
    pub fn has_notes(&self) -> bool {
        self.findings.iter().any(|finding| !finding.changes_logits)
    }

    /// All that differs, weights included, in the order of what explains what: settings and tokens, weights, notes.
    pub fn all(&self) -> Vec<Difference> {
        let of_weight = |name: &str, made_of: String, wrong: &Wrong| Difference {
            name: wrong.fault.unwrap_or("weights.differ").to_owned(),
            place: name.to_owned(),
            original: made_of,
            converted: wrong.text.clone(),
            effect: "every product with this weight differs".to_owned(),
            changes_logits: true,
        };
        let of_tensors = self.tensors.iter().flat_map(|pair| {
            pair.mistakes.iter().map(move |wrong| of_weight(&pair.name, pair.made_of.join(", "), wrong))
        });
        let left_out = self.left_out.iter().map(|out| of_weight(&out.name, "there".to_owned(), &out.wrong));
        let (grave, notes): (Vec<_>, Vec<_>) =
            self.findings.iter().cloned().partition(|finding| finding.changes_logits);
        grave.into_iter().chain(of_tensors).chain(left_out).chain(notes).collect()
    }

    /// Whether something is not the same weight.
    pub fn other_weights(&self) -> bool {
        !self.left_out.is_empty() || self.tensors.iter().any(|pair| pair.verdict == Verdict::Differs)
    }

    /// Whether nothing can be said of some tensor.
    pub fn is_open(&self) -> bool {
        self.tensors.iter().any(|pair| pair.verdict == Verdict::Unpaired)
    }

    /// For people; `all` lists every tensor on a line of its own.
    pub fn to_text(&self, all: bool) -> String {
        text::render(self, all)
    }
}

/// The original's own tokens of a text, without those that stand before or behind every text; nothing where its
/// tokenizer cannot be read.
///
/// # Errors
/// A tokenizer.json that cannot be read.
pub fn tokens_of_original(folder: &Path, text: &str) -> Result<Option<Vec<u32>>> {
    let Some((_, tokenizer)) = carried::tokenizer(folder)? else { return Ok(None) };
    Ok(tokenizer.encode(text, false).ok().map(|encoded| encoded.get_ids().to_vec()))
}

/// Compares a model file with the folder that it was converted from.
///
/// # Errors
/// A file that cannot be read, a folder without safetensors, a file without a tensor.
pub fn compare(model: &Path, against: &Path) -> Result<Comparison> {
    let gguf = Gguf::open(model)?;
    let folder = Folder::open(against)?;
    let architecture = gguf.str("general.architecture")?.unwrap_or_default().to_owned();
    let names: Vec<String> = gguf.tensors().map(|info| info.name.clone()).collect();
    if names.is_empty() {
        return Err(Error::file(model, "holds no tensor").expected("a model with its weights"));
    }
    let mut finder = Finder::new(&folder, &gguf, &architecture);
    let mut found: Vec<(usize, Vec<Option<Made<'_>>>)> = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let Some(tensor) = gguf.tensor(name) else { continue };
        let known = tensor.info.dtype.is_decodable() && tensor.info.elements() > 0;
        found.push((number, if known { finder.made_of(tensor) } else { Vec::new() }));
    }
    let usual = usual(&names, &found);
    let mut used: BTreeSet<&str> = BTreeSet::new();
    let mut tensors = Vec::new();
    for (number, made) in found {
        let Some(tensor) = gguf.tensor(&names[number]) else { continue };
        let (role, _, bias) = names::role(&names[number]);
        used.extend(made.iter().flatten().map(|made| made.source.name));
        let whole: Option<Vec<Made<'_>>> = made.into_iter().collect();
        let whole = whole.filter(|made| !made.is_empty());
        let usual = usual.get(&(role, bias)).copied().unwrap_or(AS_STORED);
        let wrong = whole.as_deref().map(|made| mistakes(&architecture, tensor, made, usual));
        let verdict = match &wrong {
            None if names::is_made(role) => Verdict::Made,
            None => Verdict::Unpaired,
            Some(wrong) if wrong.is_empty() => Verdict::Same,
            Some(_) => Verdict::Differs,
        };
        let distance = whole
            .as_deref()
            .map(|made| made.iter().fold(Distance::default(), |sum, made| sum.and(made.distance)));
        tensors.push(Pair {
            name: names[number].clone(),
            dtype: tensor.info.dtype.to_string(),
            shape: tensor.info.shape.clone(),
            made_of: sorted(whole.iter().flatten().map(|made| made.source.name)),
            how: how(whole.as_deref().unwrap_or_default()),
            rel_l2: distance.map(|distance| distance.rel_l2()),
            distance,
            verdict,
            mistakes: wrong
                .into_iter()
                .flatten()
                .map(|Mistake { fault, text }| Wrong { fault, text })
                .collect(),
        });
    }
    let (left_out, unused) = left_over(&folder, &gguf, &used);
    let Carried { differences, not_compared } = carried::compare(&gguf, against, &architecture)?;
    Ok(Comparison {
        schema: SCHEMA,
        model: model.display().to_string(),
        folder: against.display().to_string(),
        architecture,
        tensors,
        left_out,
        unused,
        findings: differences,
        not_compared,
    })
}

const AS_STORED: How = How { transposed: false, order: Order::AsStored, add: 0 };

/// How most tensors of a role lie in the file: what a single one does otherwise is a mistake of it.
fn usual<'n>(
    names: &'n [String],
    found: &[(usize, Vec<Option<Made<'_>>>)],
) -> BTreeMap<(&'n str, bool), How> {
    let mut counts: BTreeMap<(&str, bool), Vec<(How, usize)>> = BTreeMap::new();
    for (number, made) in found {
        let (role, _, bias) = names::role(&names[*number]);
        let counts = counts.entry((role, bias)).or_default();
        for made in made.iter().flatten().filter(|made| made.by_name && made.distance.is_explained()) {
            match counts.iter_mut().find(|(how, _)| *how == made.source.how) {
                Some((_, count)) => *count += 1,
                None => counts.push((made.source.how, 1)),
            }
        }
    }
    let most = |counts: Vec<(How, usize)>| {
        // Of as many the plainer: the matrix as it is stored.
        counts.into_iter().max_by_key(|(how, count)| (*count, !how.transposed, how.order == Order::AsStored))
    };
    counts.into_iter().filter_map(|(role, counts)| Some((role, most(counts)?.0))).collect()
}

fn sorted<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names.collect::<BTreeSet<_>>().into_iter().map(str::to_owned).collect()
}

/// What was rearranged, each thing once.
fn how(made: &[Made<'_>]) -> String {
    let mut words: Vec<String> = Vec::new();
    for made in made {
        words.extend(
            [made.source.part.text(), made.source.how.text()].into_iter().filter(|text| !text.is_empty()),
        );
    }
    if made.len() > 1 {
        words.insert(0, format!("{} experts", made.len()));
    }
    let mut seen = BTreeSet::new();
    words.retain(|word| seen.insert(word.clone()));
    words.join(", ")
}

/// Weights of the folder that no tensor of the file was made of: those that belong in it, and all others.
fn left_over(folder: &Folder, gguf: &Gguf, used: &BTreeSet<&str>) -> (Vec<LeftOut>, Vec<String>) {
    let (mut left_out, mut unused) = (Vec::new(), Vec::new());
    for (name, stored) in folder.tensors().filter(|(name, _)| !used.contains(name)) {
        let place = Place::of(name);
        let (module, bias) = place.module();
        if names::is_beside(name, &place) || stored.element.is_none() || !names::is_known(&module) {
            unused.push(format!("{name} ({} {:?})", stored.dtype, stored.shape));
            continue;
        }
        let fault = match (bias, module.as_str()) {
            (true, _) => Some("linear.no_bias"),
            // Where the file has no output matrix, its embeddings are it.
            (false, "lm_head") if gguf.tensor(&weights::weight(weights::OUTPUT)).is_none() => {
                match is_tied(folder, stored) {
                    true => continue,
                    false => Some("logits.untied"),
                }
            }
            _ => None,
        };
        let text = "is not in the file: nothing of it was made of this weight".to_owned();
        left_out.push(LeftOut { name: name.to_owned(), wrong: Wrong { fault, text } });
    }
    (left_out, unused)
}

/// Whether an output matrix is the table of embeddings, value by value.
fn is_tied(folder: &Folder, head: &folder::Stored) -> bool {
    let table = folder.tensors().find(|(name, _)| Place::of(name).module().0 == "embed_tokens");
    table.is_some_and(|(_, table)| {
        table.element == head.element
            && table.shape == head.shape
            && folder.bytes(table) == folder.bytes(head)
    })
}
