//! `parity gate` over models that run op by op: recordings and built graphs of any architecture, healthy and with
//! mistakes, as runs, as dumps and as dumps beside one another.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::support::graphs::record::{record, record_with};
use crate::support::graphs::{fill, head, recorded, renamed};
use crate::support::program::parity;

/// Models that parity's engines have no nodes for.
const MODELS: [&str; 4] = ["qwen3moe-moe", "gemma3-dense", "gpt-oss-moe", "llama-moe"];

/// A folder with models, recordings of them, and a suite.
struct Folder(TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `NAME.gguf` and, of it, the recording `NAME`.
    fn add(&self, model: &str) {
        fill(&head(model), &self.path(&format!("{model}.gguf")));
        record(&self.path(&format!("{model}.gguf")), &recorded(model, ""), &self.path(model));
    }

    fn gate(&self, models: &[&str], cases: &str) -> (i32, String) {
        let models: String = models.iter().map(|name| format!("\"{name}\" = \"{name}.gguf\"\n")).collect();
        std::fs::write(self.path("suite.toml"), format!("name = \"graphs\"\n[models]\n{models}{cases}"))
            .unwrap();
        let mut command = parity(&[]);
        command.env("PARITY_CACHE", self.path("cache"));
        let done = command.arg("gate").arg(self.path("suite.toml")).output().unwrap();
        let text = String::from_utf8([&done.stdout[..], &done.stderr[..]].concat()).unwrap();
        (done.status.code().unwrap(), text)
    }
}

#[test]
fn a_suite_runs_models_without_nodes_and_passes_where_they_are_healthy() {
    let folder = Folder::new();
    let mut cases = String::new();
    for model in MODELS {
        folder.add(model);
        cases += &format!(
            "[[case]]\nname = \"run {model}\"\nmodel = \"{model}\"\nreference = \"{model}\"\n\
             numerics = [\"f32\", \"f64\"]\n\
             [[case]]\nname = \"audit {model}\"\nmodel = \"{model}\"\ndump = \"{model}\"\n\
             [[case]]\nname = \"diff {model}\"\nmodel = \"{model}\"\ndump = \"{model}\"\nreference = \"{model}\"\n"
        );
    }
    let (code, text) = folder.gate(&MODELS, &cases);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("16 passed"), "{text}");
}

#[test]
fn an_injected_mistake_must_be_found_by_its_name_at_its_node() {
    let folder = Folder::new();
    folder.add("gemma3-dense");
    let case = |mistake: &str, at: &str, fault: &str| {
        format!(
            "[[case]]\nname = \"injected\"\nmodel = \"gemma3-dense\"\nreference = \"gemma3-dense\"\n\
             inject = \"{mistake}\"\nexpect = \"divergence\"\nat = \"{at}\"\nfault = \"{fault}\"\n"
        )
    };
    let right = case("rope.base@blk.1.k_rope", "blk.1.k_rope", "injected");
    let (code, text) = folder.gate(&["gemma3-dense"], &right);
    assert_eq!(code, 0, "{text}");
    let (code, text) =
        folder.gate(&["gemma3-dense"], &case("rope.base@blk.1.k_rope", "blk.0.k_rope", "injected"));
    assert!(code == 1 && text.contains("expected at blk.0.k_rope"), "{text}");
    let (code, text) =
        folder.gate(&["gemma3-dense"], &case("rope.base@blk.1.k_rope", "blk.1.k_rope", "rope.sign"));
    assert!(code == 1 && text.contains("expected rope.sign"), "{text}");
    let (code, text) = folder.gate(&["gemma3-dense"], &case("moe.top_k@0", "blk.0.q", "injected"));
    assert!(code == 2 && text.contains("no node of this graph has a place"), "{text}");
}

#[test]
fn a_wrong_recording_fails_and_one_of_an_unknown_architecture_is_judged() {
    let folder = Folder::new();
    folder.add("qwen3moe-moe");
    // A norm without its weight, as an engine would record it.
    let (model, graph) = (folder.path("qwen3moe-moe.gguf"), recorded("qwen3moe-moe", ""));
    record_with(&model, &graph, &folder.path("wrong"), &|id, args| {
        (id.to_string() == "blk.1.attn_norm").then(|| args.get(0).unwrap().values().into_owned())
    });
    let case =
        |dump: &str| format!("[[case]]\nname = \"{dump}\"\nmodel = \"qwen3moe-moe\"\ndump = \"{dump}\"\n");
    let (code, text) = folder.gate(&["qwen3moe-moe"], &case("wrong"));
    assert!(code == 1 && text.contains("blk.1.attn_norm"), "{text}");
    let against = format!("{}reference = \"qwen3moe-moe\"\n", case("wrong"));
    let (code, text) = folder.gate(&["qwen3moe-moe"], &against);
    assert!(code == 1 && text.contains("blk.1.attn_norm"), "{text}");
    // Under a name that nobody knows the recording's own graph is all that there is.
    fill(&renamed(head("qwen3moe-moe"), "qwen3moe", "qwen9moe"), &folder.path("unknown.gguf"));
    let unknown = "[[case]]\nname = \"unknown\"\nmodel = \"unknown\"\nreference = \"qwen3moe-moe\"\n";
    let (code, text) = folder.gate(&["unknown"], unknown);
    assert_eq!(code, 0, "{text}");
    let (code, text) = folder.gate(&["unknown"], "[[case]]\nname = \"unknown\"\nmodel = \"unknown\"\n");
    assert!(code == 2, "{text}");
}
