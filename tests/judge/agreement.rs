//! Whatever is asked of a recording, its nodes have the same local error, in the same arithmetic, and are as healthy.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::program::answer;
use crate::support::samples::sample;

/// Above it a local error is none of rounding.
const HEALTHY: f64 = 1.0;

/// A recording of the repository, or a copy of one without its graphs.
struct Recording {
    path: PathBuf,
    model: String,
    _copy: Option<TempDir>,
}

impl Recording {
    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

fn manifest(dump: &Path) -> Option<Value> {
    serde_json::from_str(&fs::read_to_string(dump.join("manifest.json")).ok()?).ok()
}

/// What a folder holds, in the order of the names.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

/// Every dump below a folder of the repository, with the path of its model among `models`.
fn below(folder: &Path, models: &[PathBuf], found: &mut Vec<Recording>) {
    for entry in entries(folder).into_iter().filter(|path| path.is_dir()) {
        let Some(manifest) = manifest(&entry) else {
            below(&entry, models, found);
            continue;
        };
        // Hashes alone are compared, and never judged.
        let requires =
            |what| manifest["requires"].as_array().is_some_and(|all| all.iter().any(|one| one == what));
        if requires("hashes") {
            continue;
        }
        let file = manifest["model"]["file"].as_str().unwrap();
        let model =
            models.iter().find(|path| path.ends_with(file)).unwrap_or_else(|| panic!("{file} is not here"));
        let model = model.to_str().unwrap().to_owned();
        // Rows of several sequences are judged by their own graphs alone. Logits alone of a wrong run take half a minute to
        // be named.
        let numbered = requires("sequences");
        if manifest["graphs"].is_array() && !numbered && !entry.ends_with("mistakes/early-unseen") {
            found.push(without_graphs(&entry, manifest, &model));
        }
        found.push(Recording { path: entry, model, _copy: None });
    }
}

/// A copy that brings no graph.
fn without_graphs(dump: &Path, mut manifest: Value, model: &str) -> Recording {
    let copy = tempfile::tempdir().unwrap();
    for file in entries(dump) {
        fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
    }
    manifest.as_object_mut().unwrap().remove("graphs");
    fs::write(copy.path().join("manifest.json"), manifest.to_string()).unwrap();
    Recording { path: copy.path().to_owned(), model: model.to_owned(), _copy: Some(copy) }
}

fn recordings() -> Vec<Recording> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["reference-dumps", "tests/data"].map(|folder| root.join(folder));
    let mut models = Vec::new();
    for folder in ["reference-dumps/models", "tests/data/backends"] {
        models.extend(
            entries(&root.join(folder))
                .into_iter()
                .filter(|path| path.extension().is_some_and(|extension| extension == "gguf")),
        );
    }
    let mut found = Vec::new();
    folders.iter().for_each(|folder| below(folder, &models, &mut found));
    // Of other engines, in their own formats.
    let engines = entries(&root.join("tests/data/engines"));
    // Logits alone of a wrong engine take twenty seconds to be named.
    let whole = engines.into_iter().filter(|path| path.is_file() && !path.ends_with("ct2-theta.safetensors"));
    let foreign =
        ["perplexity-tiny.safetensors", "typed.pt"].map(|name| root.join("tests/data/foreign").join(name));
    for path in whole.chain(foreign) {
        let model = root.join("reference-dumps/models/qwen2-tiny-py-F16.gguf");
        found.push(Recording { path, model: model.to_str().unwrap().to_owned(), _copy: None });
    }
    found
}

/// What is said of a node by itself: its local error as it is written, and whether it is healthy.
#[derive(Debug, PartialEq)]
struct Said {
    rel_l2: Value,
    over_bound: Value,
    arithmetic: Value,
    is_healthy: bool,
}

/// What a report says of the nodes of a side.
fn said(report: &Value, side: &str) -> BTreeMap<String, Said> {
    let entries = report["checkpoints"].as_array().unwrap();
    let of = |entry: &Value| {
        let local = &entry["local"][side];
        let over = local["over_bound"].as_f64().unwrap_or(f64::NAN);
        let said = Said {
            rel_l2: local["rel_l2"].clone(),
            over_bound: local["over_bound"].clone(),
            arithmetic: local["arithmetic"].clone(),
            is_healthy: over <= HEALTHY,
        };
        local.is_object().then(|| (entry["id"].as_str().unwrap().to_owned(), said))
    };
    entries.iter().filter_map(of).collect()
}

/// What the report of a command says of each of these sides.
fn asked(args: &[&str], sides: &[&str]) -> Vec<BTreeMap<String, Said>> {
    let (code, report) = answer(&[args, &["--allow-missing", "--format", "json"]].concat());
    assert!(report.is_object(), "{args:?}: {code}");
    sides.iter().map(|side| said(&report, side)).collect()
}

/// Every recording beside another one of its model: as few pairs as that takes, each of recordings that are not listed
/// side by side, as copies are.
fn pairs(all: &[Recording]) -> Vec<[&Recording; 2]> {
    let mut of_model: BTreeMap<&str, Vec<&Recording>> = BTreeMap::new();
    all.iter().for_each(|one| of_model.entry(&one.model).or_default().push(one));
    let mut pairs = Vec::new();
    for some in of_model.into_values().filter(|some| some.len() > 1) {
        let half = some.len().div_ceil(2);
        pairs.extend((0..half).map(|place| [some[place], some[(place + half) % some.len()]]));
    }
    pairs
}

/// Recordings, and pairs of them, that are asked about where not all are. Of copies and what they were made of, which are listed in
/// turn, both are among them.
const RECORDINGS: usize = 13;
const PAIRS: usize = 4;

#[test]
fn every_command_says_the_same_of_every_recording() {
    let all = recordings();
    let of = all.len();
    assert!(of >= 20, "{of}");
    let all = sample("recordings", RECORDINGS, all);
    let mut alone = BTreeMap::new();
    for one in &all {
        let model = ["-m", &one.model];
        alone.insert(
            &one.path,
            asked(&[&["audit", one.path()], &model[..]].concat(), &["candidate"]).remove(0),
        );
        // A run of the same tokens, in the same steps.
        let run = ["run", "--device", "cpu", "--reference", one.path()];
        let run = asked(&[&run[..], &model[..]].concat(), &["reference"]).remove(0);
        agrees(&alone[&one.path], &run, &format!("{} as reference of a run", one.path()));
    }
    let judged: usize = alone.values().map(BTreeMap::len).sum();
    assert!(judged > 600 * all.len() / of, "{judged} of {} recordings", all.len());
    for pair in sample("pairs of recordings", PAIRS, pairs(&all)) {
        let diff = |[one, other]: [&Recording; 2]| {
            asked(&["diff", one.path(), other.path(), "-m", &one.model], &["candidate", "reference"])
        };
        let (there, mut back) = (diff(pair), diff([pair[1], pair[0]]));
        back.reverse();
        for (place, one) in pair.into_iter().enumerate() {
            let what = format!("{} beside {}", one.path(), pair[1 - place].path());
            agrees(&alone[&one.path], &there[place], &what);
            assert_eq!(there[place], back[place], "{what}, in either order");
        }
    }
}

/// Fails where something else is said of a node than by an audit of its recording alone.
fn agrees(alone: &BTreeMap<String, Said>, found: &BTreeMap<String, Said>, what: &str) {
    for (id, said) in found {
        assert_eq!(alone.get(id), Some(said), "{what}: {id}");
    }
}
