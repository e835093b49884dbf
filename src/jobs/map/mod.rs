//! Proposes a map of names for another engine's dump, by the values of its tensors alone.

mod exact;
mod fit;
mod lines;

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};
use crate::foreign::array::Array;
use crate::foreign::map::built_in;
use crate::foreign::map::expression::Widths;
use crate::foreign::{Foreign, Pass, read};
use crate::gguf::Gguf;

pub use fit::{Columns, Fit, NEAR, SURE, Way};
pub use lines::{Group, Proposal};

/// Tokens of a pass: every node of the model is kept for each of them.
const TOKENS_MAX: usize = 512;

/// What an array of a dump is.
#[derive(Clone, Debug)]
pub struct Found {
    /// The producer's name.
    pub name: String,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// The node; several where it holds several side by side. None where no node has its size.
    pub fits: Vec<Fit>,
}

/// Proposes a map for the dump at `path`, of the model `gguf`; `tokens` are those of its first pass, where it does not
/// hold them.
///
/// # Errors
/// A dump that cannot be read, one whose tokens nobody knows, an architecture without a builder.
pub fn propose(path: &Path, gguf: &Gguf, tokens: Option<&[u32]>) -> Result<Proposal> {
    let ranks = read::read(path)?;
    let [dump] = ranks.as_slice() else {
        return Err(Error::file(path, "holds several ranks: a map is found of one that has the whole model")
            .expected("one dump")
            .found(format!("{} ranks", ranks.len()))
            .hint(
                "names are the same on one rank alone: dump that once, and use the map for all (shards = …)",
            ));
    };
    let Some(pass) = dump.passes.first() else {
        return Err(Error::file(path, "holds no pass"));
    };
    let vocabulary = Widths::of(gguf)?.get('V').unwrap_or(usize::MAX);
    let inputs = Inputs::of(dump, pass, tokens, vocabulary)?;
    if inputs.tokens.len() > TOKENS_MAX {
        return Err(Error::file(path, "is of too long a text to be looked at value by value")
            .expected(format!("at most {TOKENS_MAX} tokens in its first pass"))
            .found(inputs.tokens.len())
            .hint("dump a short prompt: its names are the same"));
    }
    let nodes = exact::exact(gguf, &inputs.tokens)?;
    let mut found = Vec::new();
    for array in &pass.arrays {
        if inputs.names.contains_key(&array.name) || array.len() <= inputs.tokens.len() {
            continue;
        }
        let fits = fit::fits(array, &nodes, inputs.tokens.len())?;
        found.push(Found { name: array.name.clone(), shape: array.shape.clone(), fits });
    }
    if !found.iter().any(|found| found.fits.iter().any(|fit| fit.distance <= NEAR)) {
        return Err(Error::file(path, "holds nothing that this model computes of its tokens")
            .expected(format!("a tensor within {NEAR} of a node, relative to its size"))
            .found(nearest(&found))
            .hint(format!(
                "are these its tokens, and its weights? {:?}; --tokens 1,2,3 says others",
                inputs.tokens.iter().take(8).collect::<Vec<_>>()
            )));
    }
    Ok(Proposal::new(inputs.names, found))
}

fn nearest(found: &[Found]) -> String {
    let all =
        found.iter().flat_map(|found| found.fits.iter().map(move |fit| (fit.distance, &found.name, fit.id)));
    match all.min_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((distance, name, id)) => format!("`{name}` as the nearest, {distance:.2} from {id}"),
        None => format!("{} tensors, none of them of a node's size", found.len()),
    }
}

/// What the first pass was computed of.
struct Inputs {
    tokens: Vec<u32>,
    /// Arrays that hold tokens or positions: which of the two.
    names: BTreeMap<String, &'static str>,
}

impl Inputs {
    fn of(dump: &Foreign, pass: &Pass, given: Option<&[u32]>, vocabulary: usize) -> Result<Inputs> {
        let mut names = BTreeMap::new();
        let mut tokens = pass.tokens.clone();
        let mut some: Vec<(bool, Vec<u32>, &Array)> = Vec::new();
        for array in pass.arrays.iter().filter(|array| array.dtype.is_integer()) {
            let numbers = array.integers().unwrap_or_default();
            let numbers: Option<Vec<u32>> = numbers.into_iter().map(|n| u32::try_from(n).ok()).collect();
            let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) else { continue };
            let counts = numbers.len() > 1 && numbers.iter().enumerate().all(|(i, n)| *n as usize == i);
            let is_flat = array.shape.iter().filter(|extent| **extent > 1).count() <= 1;
            match (counts, is_flat && numbers.iter().all(|n| (*n as usize) < vocabulary)) {
                (true, _) => drop(names.insert(array.name.clone(), "positions")),
                (false, true) => some.push((is_known(&array.name), numbers, array)),
                _ => {}
            }
        }
        some.sort_by_key(|(known, numbers, _)| (std::cmp::Reverse(*known), std::cmp::Reverse(numbers.len())));
        if tokens.is_none()
            && let Some((_, numbers, array)) = some.into_iter().next()
        {
            tokens = Some(numbers);
            names.insert(array.name.clone(), "tokens");
        }
        let tokens = given.map(<[u32]>::to_vec).or(tokens).or_else(|| dump.tokens.clone());
        match tokens {
            Some(tokens) if !tokens.is_empty() => Ok(Inputs { tokens, names }),
            _ => Err(Error::file(&dump.path, "does not say of which tokens it is")
                .expected("an array of whole numbers, the token ids")
                .found(format!("{} arrays, none of them", pass.arrays.len()))
                .hint("--tokens 1,2,3 says them: those of its first pass")),
        }
    }
}

/// Whether a name is one that tokens have in one of the maps that come with parity.
fn is_known(name: &str) -> bool {
    let of = |map: &str| {
        let map = built_in::named(map)?.ok()?;
        let (line, _) = map.find(name, &Widths::default())?;
        line.targets.iter().any(|target| target.id.text == "tokens").then_some(())
    };
    built_in::names().any(|map| of(map).is_some())
}
