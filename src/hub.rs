//! Models by their name on Hugging Face's hub, `USER/REPO[:QUANT]`, through the cache that other programs share.

use std::path::PathBuf;

use crate::error::{Error, Result};

/// The quantisation that is taken where none is named, as llama.cpp has it.
const DEFAULT_QUANT: &str = "Q4_K_M";

/// A repository, and which of its files is meant.
#[derive(Clone, Debug, PartialEq)]
struct Spec {
    repo: String,
    quant: Option<String>,
}

impl Spec {
    fn parse(text: &str) -> Result<Spec> {
        let (repo, quant) = text.split_once(':').map_or((text, None), |(repo, quant)| (repo, Some(quant)));
        let part = |part: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
        };
        let fits = repo.split_once('/').is_some_and(|(user, name)| part(user) && part(name));
        if !fits || quant.is_some_and(|quant| !part(quant)) {
            return Err(Error::new("-hf", "is no name of a model on the hub")
                .expected("USER/REPO or USER/REPO:QUANT, e.g. Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M")
                .found(text));
        }
        Ok(Spec { repo: repo.to_owned(), quant: quant.map(str::to_owned) })
    }

    /// The model among the files of the repository; of a split model its first part.
    fn choose<'a>(&self, names: &'a [String]) -> Result<&'a str> {
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
fn parts(first: &str) -> Vec<String> {
    match part_of(first) {
        Some((_, n)) => {
            let stem = &first[..first.len() - "00001-of-00001.gguf".len()];
            (1..=n).map(|k| format!("{stem}{k:05}-of-{n:05}.gguf")).collect()
        }
        None => vec![first.to_owned()],
    }
}

/// The file of a model: of the cache, or fetched into it.
///
/// # Errors
/// No such repository or file, no network and nothing in the cache.
pub fn model(text: &str) -> Result<PathBuf> {
    fetch::model(&Spec::parse(text)?)
}

#[cfg(feature = "hub")]
mod fetch {
    use super::*;
    use hf_hub::api::sync::{ApiBuilder, ApiRepo};
    use hf_hub::{Cache, Repo};

    pub fn model(spec: &Spec) -> Result<PathBuf> {
        let repo = Repo::model(spec.repo.clone());
        let cache = Cache::from_env();
        let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| value == "1");
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(format!("-hf {}", spec.repo), format!("the hub did not answer: {e}"))
                .expected("a network, or the model in the cache")
                .found(format!("nothing that fits in {}", cache.path().display()))
                .hint("HF_ENDPOINT names another hub, -m FILE a model that is here already")
        };
        let online = || -> std::result::Result<(ApiRepo, Vec<String>), String> {
            if offline {
                return Err("HF_HUB_OFFLINE=1 forbids to ask it".to_owned());
            }
            let api = ApiBuilder::from_env().build().map_err(|e| e.to_string())?.repo(repo.clone());
            let names = api.info().map_err(|e| e.to_string())?.siblings;
            Ok((api, names.into_iter().map(|sibling| sibling.rfilename).collect()))
        };
        match online() {
            Ok((api, names)) => {
                let names = parts(spec.choose(&names)?);
                let paths: Vec<PathBuf> = names
                    .iter()
                    .map(|name| api.get(name))
                    .collect::<std::result::Result<_, _>>()
                    .map_err(|e| failed(&e))?;
                paths.into_iter().next().ok_or_else(|| failed(&"no file"))
            }
            Err(why) => cached(spec, &cache, &repo)?.ok_or_else(|| failed(&why)),
        }
    }

    /// The model as an earlier run, or another program, left it.
    fn cached(spec: &Spec, cache: &Cache, repo: &Repo) -> Result<Option<PathBuf>> {
        let folder = cache.path().join(repo.folder_name());
        let Ok(commit) = std::fs::read_to_string(folder.join("refs").join(repo.revision())) else {
            return Ok(None);
        };
        let snapshot = folder.join("snapshots").join(commit.trim());
        let below = |dir: &std::path::Path| -> Vec<PathBuf> {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        // Some repositories have a folder for each quantisation.
        let mut paths: Vec<PathBuf> = below(&snapshot);
        paths.extend(paths.clone().iter().filter(|path| path.is_dir()).flat_map(|path| below(path)));
        let relative = |path: &PathBuf| Some(path.strip_prefix(&snapshot).ok()?.to_str()?.to_owned());
        let mut names: Vec<String> = paths.iter().filter_map(relative).collect();
        names.sort();
        let Ok(chosen) = spec.choose(&names) else { return Ok(None) };
        let whole = parts(chosen).iter().all(|part| snapshot.join(part).is_file());
        Ok(whole.then(|| snapshot.join(chosen)))
    }
}

#[cfg(not(feature = "hub"))]
mod fetch {
    use super::*;

    pub fn model(spec: &Spec) -> Result<PathBuf> {
        Err(Error::new(format!("-hf {}", spec.repo), "this build fetches no models")
            .expected("the cargo feature `hub`")
            .hint("cargo install parity --features hub, or fetch the file and name it with -m"))
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

    #[test]
    fn names_that_are_no_repository_are_refused() {
        for text in ["", "repo", "/r", "u/", "u/r/x", "u/..", "u/r:", "u/r:a/b", "u r/x"] {
            assert!(Spec::parse(text).is_err(), "{text}");
        }
    }
}
