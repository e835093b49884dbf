//! What encodes images, as llama.cpp's mtmd does: graphs without tokens and without a cache, through ggml's scheduler. SKIP as in
//! `rolled_back`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;

use crate::support::driven::{LIBRARIES, libraries, program, python};
use crate::support::program::{flat, manifest, output, parity};

/// Records two images; what the recording says.
fn record(dump: &Path, program: &Path, words: &[&str], flags: &[&str]) -> String {
    let mut command = parity(&["record", "-o"]);
    command.arg(dump).args(flags).arg("--").arg(program).args(words);
    let done = command.output().unwrap();
    let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert_eq!(done.status.code(), Some(0), "{said}");
    said
}

#[test]
fn what_encodes_images_is_recorded_and_judged() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(tower) = program("tower", dir.path()) else { return };
    if python(&["scripts/record/encoders.py", dir.path().to_str().unwrap()]).is_none() {
        return;
    }
    let model = dir.path().join("tower.gguf");
    let (model, at) = (model.to_str().unwrap(), |name: &str| dir.path().join(name));
    let words = [libraries.to_str().unwrap(), model, "2"];
    let audit = |dump: &Path| {
        let (code, said) = output(&["audit", dump.to_str().unwrap(), "-m", model]);
        (code, flat(&said))
    };
    for (name, flags) in [("healthy", &[][..]), ("nodes", &["--observe", "nodes"])] {
        let plain = std::process::Command::new(&tower).args(words).output().unwrap();
        let said = record(&at(name), &tower, &words, flags);
        let plain = String::from_utf8(plain.stdout).unwrap();
        assert!(said.contains(plain.trim_end()), "{said}: not {plain}");
        let json = manifest(&at(name));
        assert_eq!((json["steps"].as_array().unwrap().len(), &json["complete"]), (2, &true.into()));
        assert_eq!(json["model"]["file"], "tower.gguf");
        let (code, said) = audit(&at(name));
        assert_eq!(code, 0, "{said}");
    }
    for (mistake, node) in [("data.scaled=1.5", "blk.1.ffn_gelu"), ("norm.eps=0.1", "norm")] {
        let dump = at(node);
        record(&dump, &tower, &words, &["--inject", &format!("{mistake}@{node}")]);
        let (code, said) = audit(&dump);
        let name = mistake.split('=').next().unwrap();
        assert!(
            code == 1 && said.contains(&format!("DIVERGES at {node}:")) && said.contains(&format!("({name}")),
            "{said}"
        );
    }
}
