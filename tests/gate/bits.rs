//! Equal bits as what is asked for: `parity diff --bitwise`, and `expect = "identical"` of a suite.

use std::path::Path;

use serde_json::Value;

use crate::support::program::{answer, output};

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const CLEAN: &str = "reference-dumps/qwen2-tiny-py-F16/read_lines";
/// The same text with flash attention and a cache in f16.
const DEFAULTS: &str = "reference-dumps/qwen2-tiny-py-F16/read_lines-defaults";

#[test]
fn the_first_difference_of_bits_is_named_with_what_moved_it() {
    for model in [&["-m", MODEL][..], &[]] {
        let (code, report) =
            answer(&[&["diff", CLEAN, CLEAN, "--bitwise", "--format", "json"], model].concat());
        assert_eq!((code, &report["verdict"]), (0, &"parity".into()), "{report:#}");
        let entries = report["checkpoints"].as_array().unwrap();
        assert!(entries.iter().all(|entry| entry["bits"]["equal"] == true), "{report:#}");
        assert!(report["notes"].to_string().contains("are equal on both sides"), "{report:#}");
    }
    let (code, healthy) = answer(&["diff", DEFAULTS, CLEAN, "-m", MODEL, "--format", "json"]);
    assert_eq!((code, &healthy["checkpoints"][0]["bits"]), (0, &Value::Null), "{healthy:#}");
    let (code, report) = answer(&["diff", DEFAULTS, CLEAN, "-m", MODEL, "--bitwise", "--format", "json"]);
    let first = &report["first_divergence"];
    assert_eq!((code, &first["verdict"]), (1, &"bits".into()), "{report:#}");
    let entries = report["checkpoints"].as_array().unwrap();
    let at = entries.iter().position(|entry| entry["id"] == first["checkpoint"]).unwrap();
    assert_eq!((&entries[at]["verdict"], &entries[at]["bits"]["equal"]), (&"bits".into(), &false.into()));
    let text = first["residual"].as_str().unwrap();
    assert!(text.contains("nothing before it differs in a bit"), "{text}");
    assert!(text.contains("what moved it is"), "{text}");
}

#[test]
fn a_suite_may_expect_equal_bits() {
    let folder = tempfile::tempdir().unwrap();
    let suite = folder.path().join("suite.toml");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let write = |dump: &str, more: &str| {
        let text = format!(
            "name = \"bits\"\n[models]\ntiny = {:?}\n[[case]]\nname = \"same\"\nmodel = \"tiny\"\ndump = {:?}\n{more}\nexpect = \
             \"identical\"\n",
            root.join(MODEL),
            root.join(dump)
        );
        std::fs::write(&suite, text).unwrap();
    };
    let gate = || output(&["gate", suite.to_str().unwrap()]);
    let reference = format!("reference = {:?}", root.join(CLEAN));
    write(CLEAN, &reference);
    let (code, text) = gate();
    assert_eq!(code, 0, "{text}");
    write(DEFAULTS, &reference);
    let (code, text) = gate();
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("bits differ at position"), "{text}");
    write(CLEAN, "");
    let (code, text) = gate();
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("it needs `dump` and `reference`"), "{text}");
}
