//! Which files of a repository are the model that is meant.

use super::Spec;
use crate::error::{Error, Result};

/// The quantisation that is taken where none is named, as llama.cpp has it.
const DEFAULT_QUANT: &str = "Q4_K_M";

impl Spec {
    /// The model among the files of the repository; of a split model its first part.
    pub(super) fn choose<'a>(&self, names: &'a [String]) -> Result<&'a str> {
        let models = || {
            let is_model = |name: &&String| {
                let name = name.to_ascii_lowercase();
                name.ends_with(".gguf")
                    && !name.contains("mmproj")
                    && part_of(&name).is_none_or(|(n, _)| n == 1)
            };
            names.iter().map(|name| name as &String).filter(is_model)
        };
        let of = |quant: &str| models().find(|name| has_word(name, quant));
        let found = match &self.quant {
            Some(quant) => of(quant),
            None => of(DEFAULT_QUANT).or_else(|| models().next()),
        };
        found.map(String::as_str).ok_or_else(|| {
            let there: Vec<&str> = models().map(String::as_str).collect();
            Error::new(format!("-hf {}", self.repo), "has no such model")
                .expected(match &self.quant {
                    Some(quant) => format!("a .gguf file whose name has {quant} in it"),
                    None => "a .gguf file".to_owned(),
                })
                .found(if there.is_empty() { "none".to_owned() } else { there.join(", ") })
        })
    }
}

/// Whether a name has a word in it, in capitals or not, that no letter, digit or `_` goes on.
fn has_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    let goes_on = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    name.match_indices(&word).any(|(at, _)| {
        !goes_on(name[..at].chars().next_back()) && !goes_on(name[at + word.len()..].chars().next())
    })
}

/// `(k, n)` of a name that ends with `-0000k-of-0000n.gguf`.
fn part_of(name: &str) -> Option<(u32, u32)> {
    let stem = name.strip_suffix(".gguf")?;
    let (rest, n) = stem.rsplit_once("-of-")?;
    let (_, k) = rest.rsplit_once('-')?;
    let number = |digits: &str| digits.parse().ok().filter(|_| digits.len() == 5);
    Some((number(k)?, number(n)?))
}

/// The names of all parts of a split model, of which `first` is the first; that name alone of a whole one.
pub(super) fn parts(first: &str) -> Vec<String> {
    match part_of(first) {
        Some((_, n)) => {
            let stem = &first[..first.len() - "00001-of-00001.gguf".len()];
            (1..=n).map(|k| format!("{stem}{k:05}-of-{n:05}.gguf")).collect()
        }
        None => vec![first.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(spec: &str, names: &[&str]) -> Option<String> {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        Spec::parse(spec).unwrap().choose(&names).ok().map(str::to_owned)
    }

    #[test]
    fn the_quantisation_that_is_meant_is_taken() {
        let names = ["README.md", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K.gguf", "mmproj-F16.gguf"];
        assert_eq!(chosen("u/r", &names).as_deref(), Some("m-Q4_K_M.gguf"));
        assert_eq!(chosen("u/r:q4_k", &names).as_deref(), Some("m-Q4_K.gguf"));
        assert_eq!(chosen("u/r:F16", &names), None);
        assert_eq!(chosen("u/r", &["a/x-q8_0.gguf"]).as_deref(), Some("a/x-q8_0.gguf"));
        let split = ["m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"];
        let first = chosen("u/r:Q8_0", &split).unwrap();
        assert_eq!(parts(&first), [split[1], split[0]]);
        assert_eq!(parts("m.gguf"), ["m.gguf"]);
    }
}
