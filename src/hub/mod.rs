//! Models by their name on Hugging Face's hub, `USER/REPO[:QUANT]`, through the cache that other programs share.

#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod files;

use std::path::PathBuf;

use crate::error::{Error, Result};

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
}

/// The file of a model: of the cache, or fetched into it.
///
/// # Errors
/// No such repository or file, no network and nothing in the cache.
pub fn model(text: &str) -> Result<PathBuf> {
    fetch::model(&Spec::parse(text)?)
}

#[cfg(not(feature = "hub"))]
mod fetch {
    use super::*;

    pub fn model(spec: &Spec) -> Result<PathBuf> {
        Err(Error::new(format!("-hf {}", spec.repo), "this build fetches no models")
            .expected("the cargo feature `hub`")
            .hint("cargo install --path . --features hub, or fetch the file and name it with -m"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_repository_are_refused() {
        for text in ["", "repo", "/r", "u/", "u/r/x", "u/..", "u/r:", "u/r:a/b", "u r/x"] {
            assert!(Spec::parse(text).is_err(), "{text}");
        }
    }
}
