//! Rules of the architecture, read from the sources. Every exemption has a reason, and one that is no
//! longer needed is a failure too.

mod tidy {
    pub mod source;
}

use std::collections::{BTreeMap, BTreeSet};

use parity_dump::checkpoint::Kind;
use tidy::source::{Source, files};

/// Lines of a file, tests included.
const FILE_LINES_MAX: usize = 450;
/// Lines of a function, from `fn` to its brace.
const FUNCTION_LINES_MAX: usize = 70;

/// The one file that spells checkpoint ids.
const VOCABULARY: &str = "crates/parity-dump/src/checkpoint.rs";
/// The one file that spells the names of a model file's tensors.
const TENSORS: &str = "crates/parity-graph/src/weights.rs";
/// The one folder that names cudarc.
const CUDA: &str = "src/engine/cuda";

/// Longer files: path, reason.
const LONG_FILES: &[(&str, &str)] = &[
    ("crates/parity-graph/src/edit.rs", "one table: every edit of values beside how it is applied"),
    (
        "crates/parity-record/src/inject.rs",
        "every change of a node, as llama.cpp's own graph is given it or refused it",
    ),
];

/// Longer functions: path, name, reason.
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// What may panic outside tests: path, what is written there, why it cannot happen.
const PANICS: &[(&str, &str, &str)] = &[
    (
        "src/engine/cuda/calls/mod.rs",
        ".expect(\"a grid has fewer than 2^32 blocks\")",
        "a block covers many elements, and 2^32 blocks of them are more than a device holds",
    ),
    (
        "src/engine/cuda/greedy.rs",
        ".expect(\"a token behind the values\")",
        "a slot has room for the values and a token behind them",
    ),
    ("src/engine/cuda/modules.rs", ".expect(\"just put there\")", "the line before puts it there or returns"),
    (
        "src/engine/cuda/calls/linear/few.rs",
        ".expect(\"a format of the kernel\")",
        "the kernel is chosen only for formats that it has",
    ),
    (
        "crates/parity-record/src/layout.rs",
        "bytes\"))",
        "slices of constant length: four and eight bytes become an i32 and an i64",
    ),
    (
        "crates/parity-dump/src/writer.rs",
        ".expect(\"a step is open\")",
        "a caller that writes outside a step is a bug of the caller, as the documentation says",
    ),
    (
        "src/gguf/blocks.rs",
        "panic!(\"{dtype} is not decodable\")",
        "Gguf hands out tensors of decodable types only: a bug, not a file",
    ),
    (
        "src/gguf/blocks.rs",
        ".expect(\"a part lies within its block\")",
        "offsets and lengths are constants of the block format, checked by every test that decodes it",
    ),
    ("src/report/table.rs", ".expect(\"a run has an entry\")", "slice::chunk_by gives no empty chunk"),
];

/// Parts of GGUF tensor names that are spelt like checkpoints.
const TENSOR_NAMES: [&str; 4] = ["attn_norm", "ffn_norm", "ffn_gate", "ffn_up"];

/// The one file of each crate that holds what only systems other than Linux can run, and how much of it was run.
const ELSEWHERE: &[(&str, &str)] = &[
    ("src/elsewhere.rs", "built by CI for Windows, and run by the tests there alone"),
    ("crates/parity-dump/src/packed.rs", "one call of Windows beside that of Unix"),
    ("crates/parity-record/src/elsewhere.rs", "built by CI for Windows, not run"),
    ("crates/parity-tap/src/elsewhere.rs", "images of macOS: built by CI, not run"),
];

/// Uses of later modules: path, module, reason.
const BACKWARD: &[(&str, &str, &str)] = &[];

/// What ends the process; `expect` is told from parsers' methods of that name by its quote.
const PANICKING: [&str; 8] = [
    ".unwrap()",
    ".unwrap_err()",
    ".expect(",
    ".expect_err(",
    "panic!",
    "unreachable!",
    "todo!",
    "unimplemented!",
];

fn sources() -> Vec<Source> {
    let sources = files(&["src", "crates"], &["rs"]);
    let is_test =
        |path: &str| path.contains("/tests/") || path.contains("/benches/") || path.ends_with("/tests.rs");
    let sources: Vec<Source> = sources
        .into_iter()
        .filter(|(path, _)| !is_test(path))
        .map(|(path, text)| Source::new(path, text))
        .collect();
    assert!(sources.len() > 20, "the sources are not where this test looks for them");
    sources
}

/// Reports what is wrong and not exempt, and what is exempt and not wrong.
fn judge<K: Ord + Clone>(
    found: BTreeMap<K, String>,
    exempt: impl IntoIterator<Item = K>,
    show: impl Fn(&K) -> String,
) {
    let exempt: BTreeSet<K> = exempt.into_iter().collect();
    let wrong = found.iter().filter(|(key, _)| !exempt.contains(key)).map(|(_, text)| text.clone());
    let stale = exempt
        .iter()
        .filter(|key| !found.contains_key(key))
        .map(|key| format!("{}: the exemption is no longer needed", show(key)));
    let complaints: Vec<String> = wrong.chain(stale).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn files_are_short() {
    let found = files(&["src", "crates", "tests", "kernels"], &["rs", "cu", "cuh"])
        .into_iter()
        .map(|(path, text)| (text.lines().count(), path))
        .filter(|(lines, _)| *lines > FILE_LINES_MAX)
        .map(|(lines, path)| {
            (path.clone(), format!("{path}: {lines} lines, at most {FILE_LINES_MAX} wanted"))
        })
        .collect();
    judge(found, LONG_FILES.iter().map(|(path, _)| path.to_string()), String::clone);
}

#[test]
fn functions_are_short() {
    let mut found = BTreeMap::new();
    for source in sources() {
        for (name, first, lines) in source.functions() {
            if lines > FUNCTION_LINES_MAX {
                let text = format!(
                    "{}:{first}: `{name}` has {lines} lines, at most {FUNCTION_LINES_MAX} wanted",
                    source.path
                );
                found.insert((source.path.clone(), name), text);
            }
        }
    }
    let exempt = LONG_FUNCTIONS.iter().map(|(path, name, _)| (path.to_string(), name.to_string()));
    judge(found, exempt, |(path, name)| format!("{path}: `{name}`"));
}

/// Public modules of the library in the order of src/lib.rs.
fn modules() -> Vec<String> {
    let library = sources().into_iter().find(|source| source.path == "src/lib.rs").unwrap();
    let words: Vec<&str> = library.code.split_whitespace().collect();
    words
        .windows(2)
        .filter(|pair| pair[0] == "mod")
        .map(|pair| pair[1].trim_end_matches(';').to_string())
        .collect()
}

#[test]
fn a_module_uses_only_those_above_it() {
    let modules = modules();
    let place = |module: &str| modules.iter().position(|known| known == module);
    let mut found = BTreeMap::new();
    for source in sources() {
        let Some(file) = source.path.strip_prefix("src/") else { continue };
        let module = file.split('/').next().unwrap().trim_end_matches(".rs");
        let Some(own) = place(module) else { continue };
        for used in source.modules_named() {
            if place(&used).is_some_and(|used| used > own) {
                let text =
                    format!("{}: `{module}` uses `{used}`, which stands below it in src/lib.rs", source.path);
                found.insert((source.path.clone(), used), text);
            }
        }
    }
    let exempt = BACKWARD.iter().map(|(path, used, _)| (path.to_string(), used.to_string()));
    judge(found, exempt, |(path, used)| format!("{path}: `{used}`"));
}

#[test]
fn every_module_is_in_the_list() {
    let modules = modules();
    for source in sources() {
        let Some(file) = source.path.strip_prefix("src/") else { continue };
        let module = file.split('/').next().unwrap().trim_end_matches(".rs");
        // The process and its commands stand above the library.
        let known = ["lib", "main", "cli"].contains(&module) || modules.iter().any(|known| known == module);
        assert!(known, "{}: `{module}` is not in src/lib.rs", source.path);
    }
}

#[test]
fn cudarc_is_named_in_one_folder() {
    for source in sources() {
        let lines = source.lines_with("cudarc");
        let inside = source.path.starts_with(&format!("{CUDA}/")) || source.path == format!("{CUDA}.rs");
        assert!(inside || lines.is_empty(), "{}:{lines:?}: names cudarc, which is for {CUDA}", source.path);
    }
}

#[test]
fn checkpoints_are_spelt_in_one_file() {
    // Words like `embed`, `q` and `logits` alone are as likely something else.
    let names: BTreeSet<&str> = Kind::all().map(Kind::name).collect();
    let is_id = |string: &str| match string.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, name)) => names.contains(name),
        None => string.contains('_') && names.contains(string) && !TENSOR_NAMES.contains(&string),
    };
    assert!(is_id("blk.{layer}.q") && is_id("q_rope") && !is_id("blk.{}.attn_norm.weight"));
    for source in sources().iter().filter(|source| source.path != VOCABULARY) {
        let spelt: Vec<_> = source.strings.iter().filter(|(_, string)| is_id(string)).collect();
        assert!(spelt.is_empty(), "{}: {spelt:?}: spelt in {VOCABULARY} only, use Kind", source.path);
    }
}

#[test]
fn tensors_are_spelt_in_one_file() {
    let sources = sources();
    let is_part = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_lowercase() || c == b'_');
    let table = sources.iter().find(|source| source.path == TENSORS).unwrap();
    // `output` alone, and what llama.cpp's nodes and checkpoints are called too, may be something else.
    let own = |part: &str| part.contains('_') && !TENSOR_NAMES.contains(&part);
    let parts: BTreeSet<&str> = table
        .strings
        .iter()
        .map(|(_, part)| part.as_str())
        .filter(|part| is_part(part) && own(part))
        .collect();
    assert!(parts.contains("attn_q") && parts.contains("token_embd") && parts.contains("ffn_down_exps"));
    // A sentence may name a tensor.
    let is_tensor = |string: &str| {
        if string.contains(' ') {
            return false;
        }
        let kind = [".weight", ".bias"].iter().find_map(|kind| string.strip_suffix(kind));
        let part = kind.unwrap_or(string).rsplit('.').next().unwrap_or_default();
        kind.is_some() && is_part(part)
            || string.starts_with("blk.{") && parts.contains(part)
            || parts.contains(string)
    };
    assert!(is_tensor("output.weight") && is_tensor("blk.{layer}.attn_sinks") && !is_tensor("{part}.weight"));
    for source in sources.iter().filter(|source| source.path != TENSORS) {
        let spelt: Vec<_> = source.strings.iter().filter(|(_, string)| is_tensor(string)).collect();
        assert!(spelt.is_empty(), "{}: {spelt:?}: spelt in {TENSORS} only, use its constants", source.path);
    }
}

#[test]
fn nothing_panics_outside_tests() {
    let mut found = BTreeMap::new();
    let mut used = BTreeSet::new();
    for source in sources() {
        for line in PANICKING.iter().flat_map(|word| source.lines_with(word)) {
            let written = source.text.lines().nth(line - 1).unwrap().trim();
            match PANICS.iter().find(|(path, text, _)| *path == source.path && written.contains(text)) {
                Some(exempt) => drop(used.insert(exempt)),
                None => drop(
                    found.insert((source.path.clone(), line), format!("{}:{line}: {written}", source.path)),
                ),
            }
        }
    }
    let stale = PANICS.iter().filter(|exempt| !used.contains(exempt));
    let stale: Vec<String> =
        stale.map(|(path, text, _)| format!("{path}: {text}: no longer there")).collect();
    let complaints: Vec<&String> = found.values().chain(&stale).collect();
    assert!(complaints.is_empty(), "an error would do, or an entry in PANICS:\n{complaints:#?}");
}

/// Whether an attribute has code only for other systems than Linux.
fn is_for_others(line: &str) -> bool {
    let others =
        ["not(unix)", "windows", "not(target_os", "target_os = \"macos\"", "target_os = \"windows\""];
    line.trim_start().starts_with("#[cfg(") && others.iter().any(|other| line.contains(other))
}

#[test]
fn what_only_other_systems_run_is_in_one_file_of_each_crate() {
    let mut found = BTreeMap::new();
    for source in sources() {
        let lines: Vec<&str> = source.text.lines().collect();
        for (number, pair) in lines.windows(2).enumerate().filter(|(_, pair)| is_for_others(pair[0])) {
            // To take it from that file, and to name the file, is for every file.
            let next = pair[1].trim_start().trim_start_matches("pub ");
            if !["use ", "mod "].iter().any(|word| next.starts_with(word)) {
                let text = format!("{}:{}: {}", source.path, number + 2, pair[1].trim());
                found.insert(source.path.clone(), text);
            }
        }
    }
    // What is whole under a condition says so where it is named.
    for (path, _) in ELSEWHERE {
        found.entry(path.to_string()).or_insert_with(|| {
            assert!(std::path::Path::new(path).is_file(), "{path} is not there");
            String::new()
        });
    }
    judge(found, ELSEWHERE.iter().map(|(path, _)| path.to_string()), String::clone);
    let crates: BTreeSet<&str> =
        ELSEWHERE.iter().map(|(path, _)| path.split("src/").next().unwrap()).collect();
    assert_eq!(crates.len(), ELSEWHERE.len(), "one file of each crate");
}

#[test]
fn every_file_says_what_it_is() {
    for source in sources() {
        assert!(
            source.text.starts_with("//! "),
            "{}: begins with its purpose as a `//!` sentence",
            source.path
        );
    }
}

#[test]
fn scripts_say_what_they_are() {
    let scripts: Vec<_> = files(&["scripts"], &["sh"]).into_iter().map(|(path, _)| path).collect();
    assert!(scripts.len() > 10, "{scripts:?}");
    for path in scripts {
        let help = std::process::Command::new("bash").args([path.as_str(), "--help"]).output().unwrap();
        let text = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(help.status.success() && text.split_whitespace().count() > 8, "{path} --help: {text}");
    }
}

#[test]
fn exemptions_have_reasons() {
    let others = [LONG_FUNCTIONS, PANICS, BACKWARD].into_iter().flatten().map(|(_, _, why)| why);
    let mut reasons = LONG_FILES.iter().chain(ELSEWHERE).map(|(_, why)| why).chain(others);
    assert!(reasons.all(|why| why.split_whitespace().count() >= 3));
}

#[test]
fn the_reader_of_sources_sees_what_is_code() {
    let text = "// a.unwrap()\n/* /* cudarc */ cudarc */ fn f(x: [u8; 2]) -> char {\n  let s = r#\"b\".unwrap()\"#; '\"' }\n\
                use crate::{a::b, c};\n#[cfg(test)]\nmod t { fn g() { \"d\".unwrap() } }\nfn h<'a>(_: &'a str) { crate::e::x() }\n";
    let source = Source::new("x.rs".into(), text.into());
    assert_eq!(source.functions(), [("f".into(), 2, 2), ("h".into(), 7, 1)]);
    assert_eq!(source.strings, [(3, "b\".unwrap()".to_string())]);
    assert_eq!(source.modules_named(), ["a", "c", "e"]);
    assert!(source.lines_with("cudarc").is_empty() && source.lines_with(".unwrap()").is_empty());
    assert_eq!(source.lines_with("crate"), [4, 7]);
}

/// Packages of a normal build, and of one for tests: each with its features.
fn packages(edges: &str) -> BTreeMap<String, BTreeSet<String>> {
    let args = ["tree", "--offline", "--no-dedupe", "--prefix", "none", "-f", "{p}|{f}", "-e", edges];
    let tree = std::process::Command::new(env!("CARGO")).args(args).output().unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let mut packages = BTreeMap::<String, BTreeSet<String>>::new();
    for line in String::from_utf8(tree.stdout).unwrap().lines().filter(|line| !line.is_empty()) {
        let (package, features) = line.split_once('|').unwrap();
        packages.entry(package.to_owned()).or_default().insert(features.to_owned());
    }
    packages
}

#[test]
fn tests_need_no_library_in_another_form() {
    // Otherwise `cargo test` builds parity, and all that stands on that library, a second time.
    let (normal, tests) = (packages("normal,build"), packages("normal,build,dev"));
    let other: Vec<_> = normal.iter().filter(|(package, features)| tests[*package] != **features).collect();
    assert!(
        other.is_empty(),
        "name these under [dependencies], with the features that tests want: {other:#?}"
    );
}
