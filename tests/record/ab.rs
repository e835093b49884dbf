//! `parity ab` on a real llama.cpp: SKIP where no shared libraries of one are named (`PARITY_TEST_LLAMA`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;
use std::process::{Command, Output};

use parity_dump::Dump;
use serde_json::Value;

use crate::support::driven::{ANSWER, LIBRARIES, OLDER, PROMPT, driver, libraries, model};
use crate::support::graphs;

/// `parity ab` with these flags on the driver with these words.
fn ab(flags: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PARITY_CACHE", "/nonexistent");
    command.env_remove("GITHUB_ACTIONS").arg("ab").args(flags);
    command.arg("--").arg(driver().unwrap()).args(words).output().unwrap()
}

/// Exit code, standard output as JSON, standard error.
fn json(flags: &[&str], words: &[&str]) -> (i32, Value, String) {
    let done = ab(&[&["--format", "json"], flags].concat(), words);
    let said = String::from_utf8(done.stderr).unwrap();
    let value = serde_json::from_slice(&done.stdout).unwrap_or(Value::Null);
    (done.status.code().unwrap(), value, said)
}

/// Driver words: the libraries, a model, a prefill of five tokens, the prompt.
fn words<'a>(libraries: &'a str, model: &'a str) -> Vec<&'a str> {
    [&[libraries, model, "5"], &PROMPT[..]].concat()
}

fn answer(report: &Value) -> String {
    let sentences = report["answer"].as_array().expect("an answer").iter();
    sentences.map(|sentence| sentence.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn forms_and_types_are_differences_of_arithmetic() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("Q4_K_M"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().to_str().unwrap();
    let (code, report, said) =
        json(&["--a-env", "DRIVER_FLASH=off", "--b-env", "DRIVER_FLASH=on", "-o", kept], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    let told = answer(&report);
    assert!(told.contains("both sides are healthy"), "{told}");
    assert!(told.contains("flash attention where A has attention in three ops"), "{told}");
    assert!(told.contains("FLASH_ATTN_EXT") && told.contains("SOFT_MAX"), "{told}");
    assert!(told.contains("the texts "), "{told}");
    for side in ["a", "b"] {
        assert_eq!(Dump::open(&dir.path().join(side)).unwrap().tokens().len(), 9);
    }
    let again = ab(&["--b-env", "DRIVER_FLASH=on", "-o", kept], &words);
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("holds a dump already"));
    let (code, report, said) = json(&["--b-env", "DRIVER_CACHE=8"], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    assert!(answer(&report).contains("keys in q8_0, values in q8_0 where A has keys in f16"), "{report:#}");
}

#[test]
fn the_first_sides_tokens_are_computed_by_the_others() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = words(libraries, &model);
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().to_str().unwrap();
    // A's program goes on with other tokens than B's.
    let (code, report, said) =
        json(&["--a", "285 314 511 435", "--b", "285 999 999 435", "-o", kept], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    let [a, b] = ["a", "b"].map(|side| Dump::open(&dir.path().join(side)).unwrap().tokens().to_vec());
    assert_eq!((&a[5..], &a), (&[285, 314, 511, 435][..], &b));
    let told = answer(&report);
    assert!(told.contains("not its own first choice at 2 positions (the first at position 6)"), "{told}");
    assert!(told.contains("their values are equal"), "{told}");
}

#[test]
fn prompts_of_other_tokens_are_the_finding() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [libraries, &model];
    let (code, report, said) =
        json(&["--a", "5 312 863 2039 1444 1518 285", "--b", "6 1 312 863 2039 1444 1518 285"], &words);
    assert_eq!(code, 1, "{said}{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("the prompts are not the same tokens"), "{report:#}");
    // What cannot be judged has its recordings kept, and says where.
    let folder = said.lines().find_map(|line| line.strip_prefix("recordings: ")).expect("a folder");
    assert!(Path::new(folder).join("a/manifest.json").exists());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn rows_that_one_program_alone_computed_are_said() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = words(libraries, &model);
    let flags = ["--a", "285 314 511", "--b", "285"];
    let (code, report, said) = json(&flags, &words);
    assert_eq!(code, 2, "{said}{report:#}");
    assert!(answer(&report).contains("B's program ended 2 tokens before A's"), "{report:#}");
    let (code, report, _) = json(&[&flags[..], &["--allow-missing"]].concat(), &words);
    assert_eq!(code, 0, "{report:#}");
    for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// A rotation of heads, and caches of their own for each sequence, make one tensor of a step of what are rows of tokens elsewhere.
#[test]
fn one_tensor_for_a_step_here_and_rows_of_tokens_there_is_no_divergence() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("llama.gguf");
    graphs::fill(&graphs::head("llama-dense"), &file);
    let (libraries, model) = (libraries.to_str().unwrap(), file.to_str().unwrap());
    let ids = "5 12 63 39 44 51 28 31 7 19 22";
    let of = |flags: &[&str], life: &str| {
        let words: Vec<&str> = [libraries, model, life].into_iter().chain(ids.split(' ')).collect();
        let (code, report, said) = json(flags, &words);
        assert_eq!(code, 0, "{life}: {said}{report:#}");
        let notes = report["notes"].to_string();
        assert!(notes.contains("one tensor for a step") && notes.contains("in another form"), "{notes}");
    };
    of(&["--b-env", "DRIVER_CACHE=8,8"], "7");
    let both = ["--a-env", "DRIVER_SEQUENCES=3", "--b-env", "DRIVER_SEQUENCES=3"];
    of(
        &[&both[..], &["--a-env", "DRIVER_UNIFIED=1", "--b-env", "DRIVER_UNIFIED=0"]].concat(),
        "b0:5,1:5 b0:1,1:1",
    );
}

#[test]
fn a_second_context_that_was_not_compared_leaves_the_answer_open() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (model, draft) = (model("F16"), format!("DRIVER_DRAFT={}", model("Q4_K_M")));
    let words = [&[libraries.to_str().unwrap(), &model, "b0:4 m1 b0:4 m0 b0:1"], &PROMPT[..]].concat();
    let (code, report, said) =
        json(&["--a-env", &draft, "--b-env", &draft, "--b-env", "DRIVER_FLASH=off"], &words);
    assert_eq!((code, report["verdict"].as_str()), (2, Some("undecided")), "{said}");
    let why = report["reason"].as_str().unwrap();
    assert!(why.contains("another context too") && why.contains("b/context-1"), "{why}");
}

#[test]
fn batches_are_shapes_of_the_same_work() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("Q4_K_M"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let flags = ["--b-env", "DRIVER_UBATCH=2", "--b-env", "DRIVER_THREADS=1"];
    let (code, report, said) = json(&flags, &words);
    assert_eq!(code, 0, "{said}{report:#}");
    assert!(answer(&report).contains("rows of each step: 5, 1 x 4 in A, 2 x 2, 1 x 5 in B"), "{report:#}");
    // Equal bits are another question.
    let (code, report, _) = json(&[&flags[..], &["--bitwise"]].concat(), &words);
    let first = &report["first_divergence"];
    if code == 1 {
        assert_eq!(first["verdict"], "bits", "{first:#}");
        assert!(first["residual"].as_str().unwrap().contains("the batch:"), "{first:#}");
    } else {
        assert_eq!(code, 0, "{report:#}");
    }
}

#[test]
fn another_number_of_the_model_is_found_with_its_key() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let libraries = libraries.to_str().unwrap();
    let model = model("F16");
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("other.gguf");
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(&model)).unwrap();
    std::fs::write(&other, crate::support::graphs::with_f32(bytes, "qwen2.rope.freq_base", 10_000.0))
        .unwrap();
    let tokens = [&["5"], &PROMPT[..], &ANSWER].concat();
    let words = [&[libraries, "{}"], &tokens[..]].concat();
    let (code, report, said) = json(&["--a", &model, "--b", other.to_str().unwrap()], &words);
    assert_eq!(code, 1, "{said}{report:#}");
    let finding = &report["findings"][0];
    assert_eq!(finding["name"], "config.qwen2.rope.freq_base", "{report:#}");
    assert_eq!((&finding["original"], &finding["converted"]), (&"1000000".into(), &"10000".into()));
    assert!(finding["effect"].as_str().unwrap().contains("1000000 by the file"), "{finding:#}");
    // The other way round it is A that is not the file's: exit code 1 too.
    let (code, report, _) = json(&["--a", other.to_str().unwrap(), "--b", &model], &words);
    assert_eq!(code, 1, "{report:#}");
    for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn weights_of_two_types_are_a_difference_of_arithmetic() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let tokens = [&["5"], &PROMPT[..], &ANSWER].concat();
    let words = [&[libraries.to_str().unwrap(), "{}"], &tokens[..]].concat();
    let (code, report, said) = json(&["--a", &model("F16"), "--b", &model("Q4_K_M")], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("what its own file says"), "{report:#}");
    assert!(answer(&report).contains("both sides are healthy"), "{report:#}");
}

#[test]
fn a_matrix_has_a_line_for_each_side_and_the_worst_exit_code() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = words(libraries, &model);
    let flags = ["--a", "285 314", "--b", "285 314 511 435", "--b", "285 314 511"];
    let (code, report, _) = json(&[&flags[..], &["--allow-missing"]].concat(), &words);
    assert_eq!((code, &report["schema"]), (0, &"parity-ab/1".into()), "{report:#}");
    assert_eq!(report["pairs"].as_array().unwrap().len(), 2);
    let table = ab(&[&flags[..], &["--bisect"]].concat(), &words);
    assert_eq!(table.status.code(), Some(125));
    let lines = String::from_utf8(table.stdout).unwrap();
    assert!(lines.starts_with("b    UNDECIDED") && lines.contains("\nb2   UNDECIDED"), "{lines}");
    for folder in
        String::from_utf8_lossy(&table.stderr).lines().filter_map(|l| l.strip_prefix("recordings: "))
    {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn two_releases_are_compared() {
    let Some((new, old)) = libraries(LIBRARIES).zip(libraries(OLDER)) else { return };
    let model = model("Q4_K_M");
    let tokens = [&["5"], &PROMPT[..], &ANSWER].concat();
    let words = [&["{}", &model], &tokens[..]].concat();
    let (code, report, said) = json(&["--a", old.to_str().unwrap(), "--b", new.to_str().unwrap()], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    assert!(answer(&report).contains("where A has llama.cpp"), "{report:#}");
}

#[test]
fn the_same_run_again_is_equal_in_every_bit() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("Q4_K_M"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let (code, report, said) = json(&["--repeat", "3"], &words);
    assert_eq!(code, 0, "{said}{report:#}");
    assert_eq!((&report["schema"], &report["runs"]), (&"parity-repeat/1".into(), &3.into()));
    assert_eq!((&report["first"], &report["nodes"]), (&Value::Null, &Value::Array(vec![])));
    let done = ab(&["--repeat", "1"], &words);
    assert_eq!(done.status.code(), Some(2));
}

#[test]
fn the_side_that_is_wrong_is_named_whichever_it_is() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("Q4_K_M"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    for (wrong, other, verdict) in [("b", "A", "origin"), ("a", "B", "reference")] {
        let (code, report, said) = json(&[&format!("--{wrong}-env"), "DRIVER_NOISE=ffn_norm-1"], &words);
        assert_eq!(code, 1, "{said}{report:#}");
        let first = &report["first_divergence"];
        // Kept until the graph is computed, the node has the value that its readers saw.
        assert_eq!(first["checkpoint"], "blk.1.ffn_norm", "{first:#}");
        assert_eq!(first["verdict"], verdict, "{first:#}");
        let told = answer(&report);
        assert!(
            told.contains(&format!("{} leaves exact arithmetic first at", wrong.to_uppercase())),
            "{told}"
        );
        assert!(told.contains(&format!("{other} is healthy in all")), "{told}");
        for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
            std::fs::remove_dir_all(folder).unwrap();
        }
    }
}

#[test]
fn what_differs_from_run_to_run_is_found() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("Q4_K_M"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let (code, report, said) = json(&["--repeat", "4", "--a-env", "DRIVER_NOISE=ffn_norm-1"], &words);
    assert_eq!(code, 1, "{said}{report:#}");
    let first = report["first"].as_str().unwrap();
    assert_eq!(first, "blk.1.ffn_norm", "{report:#}");
    let node = &report["nodes"][0];
    assert_eq!((&node["id"], &node["differs_in"]), (&report["first"], &3.into()), "{report:#}");
    // The first element is the first row's: of the prompt, and of each decode step.
    assert_eq!(node["rows"], serde_json::json!([0, 5, 6, 7, 8]), "{report:#}");
    assert!(node["rel_l2"].as_f64().unwrap() > 1e-3, "{report:#}");
    assert!(answer(&report).contains("rounding does not explain it"), "{report:#}");
    for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn looking_changes_nothing_and_what_differs_by_itself_is_no_matter_of_looking() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let (code, found, said) = json(&["--observation"], &words);
    assert_eq!((code, &found["schema"]), (0, &"parity-observation/1".into()), "{said}{found:#}");
    assert_eq!((&found["rows"], &found["differing"]), (&9.into(), &serde_json::json!([])), "{found:#}");
    let (code, found, said) = json(&["--observation", "--a-env", "DRIVER_NOISE=ffn_norm-1"], &words);
    assert_eq!((code, &found["node"]), (2, &Value::Null), "{said}{found:#}");
    assert!(answer(&found).contains("two runs that nobody looks at differ too"), "{found:#}");
    for folder in said.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn what_cannot_be_run_is_said() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = words(libraries, &model);
    for (flags, said) in [
        (&["--b", ""][..], "--repeat N"),
        (&["--b", "x \"y"], "a quote that is opened is closed"),
        (&["--b-env", "X"], "NAME=VALUE"),
        (&["--b-libs", "/nonexistent"], "a folder of shared libraries"),
        (&["--b-program", "/nonexistent"], "no such program"),
        (&["--b", "notatoken /nonexistent.gguf", "--b-libs", "scripts"], "did not load the libraries"),
    ] {
        let done = ab(flags, &words);
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{flags:?}: {text}");
        assert!(text.contains(said), "{flags:?}: {text}");
        for folder in text.lines().filter_map(|line| line.strip_prefix("recordings: ")) {
            std::fs::remove_dir_all(folder).unwrap();
        }
    }
}

#[test]
fn a_prompt_whole_in_micro_batches_and_in_pieces_is_the_same_work() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let libraries = libraries.to_str().unwrap();
    let model = model("Q4_K_M");
    let prompt: Vec<String> = (0..42).map(|i| (3 + i * 73 % 300).to_string()).collect();
    let prompt: Vec<&str> = prompt.iter().map(String::as_str).collect();
    let words = [&[libraries, &model, "{}"], &prompt[..]].concat();
    let of = |flags: &[&str], rows: &str| {
        let (code, report, said) = json(flags, &words);
        assert_eq!(code, 0, "{said}{report:#}");
        assert!(answer(&report).contains(rows), "{report:#}");
    };
    let sizes = ["--a", "40", "--b", "40", "--a-env", "DRIVER_UBATCH=512", "--b-env", "DRIVER_UBATCH=32"];
    of(&sizes, "rows of each step: 40, 1 x 2 in A, 32, 8, 1 x 2 in B");
    // A prefix that was computed before, and lies in the cache.
    of(&["--a", "40", "--b", "30,10"], "rows of each step: 40, 1 x 2 in A, 30, 10, 1 x 2 in B");
}

#[test]
fn every_side_is_computed_once_more_unobserved_unless_that_is_declined() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let (libraries, model) = (libraries.to_str().unwrap(), model("F16"));
    let words = [&words(libraries, &model)[..], &ANSWER].concat();
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().to_str().unwrap();
    for (flags, runs) in [(&[][..], 4), (&["--no-verify", "--force"][..], 2)] {
        let both = ["--b-env", "DRIVER_FLASH=off", "-o", kept];
        let (code, report, said) = json(&[&both[..], flags].concat(), &words);
        assert_eq!(code, 0, "{said}{report:#}");
        assert_eq!(said.lines().filter(|line| line.starts_with("recording ")).count(), runs, "{said}");
        // Of equal logits nothing is said, and their recordings are not kept.
        assert!(!answer(&report).contains("unobserved"), "{report:#}");
        assert!(!dir.path().join("a-unseen").exists());
    }
}
