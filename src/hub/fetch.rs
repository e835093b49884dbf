//! The model of the cache, or fetched into it.

use std::path::PathBuf;

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo};

use super::Spec;
use super::files::parts;
use crate::error::{Error, Result};

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
