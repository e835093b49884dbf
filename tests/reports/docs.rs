//! What the pages say can be typed: every command and flag that they show exists, and the answers that they show are
//! the program's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All pages for users.
fn pages() -> Vec<PathBuf> {
    let below = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap().flatten().map(|entry| entry.path());
        entries.filter(|path| path.extension().is_some_and(|end| end == "md")).collect::<Vec<_>>()
    };
    let mut all = [below("docs"), below("docs/engines"), below("skills/parity")].concat();
    let beside = ["README.md", "AGENTS.md", "python/README.md", "reference-dumps/README.md"];
    all.extend(beside.map(|page| root().join(page)));
    all
}

fn parity(args: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(root()).args(args).env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent");
    command.output().unwrap()
}

/// The words of a command as a shell reads them, up to what is no part of it: a comment, a pipe, a redirection.
fn words(line: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let (mut word, mut quote, mut begun) = (String::new(), None, false);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, begun) = (Some(c), true),
            (None, c) if c.is_whitespace() => {
                if begun || !word.is_empty() {
                    out.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (None, '#' | '|' | '>' | '<' | ';' | '&') if word.is_empty() && !begun => break,
            (None, c) => word.push(c),
        }
    }
    if begun || !word.is_empty() {
        out.push(word);
    }
    out
}

/// Lines of the fenced blocks of a page, with continued lines in one, and what stands in single backticks.
fn code(page: &str) -> Vec<String> {
    let (mut out, mut inside) = (Vec::new(), false);
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            inside = !inside;
        } else if inside {
            let mut whole = line.to_owned();
            while let Some(head) = whole.strip_suffix('\\') {
                whole = format!("{head} {}", lines.next().unwrap_or_default());
            }
            out.push(whole);
        } else {
            out.extend(line.split('`').skip(1).step_by(2).map(|text| text.replace("\\|", "|")));
        }
    }
    out
}

/// The arguments of a line that runs parity.
fn arguments(line: &str) -> Option<Vec<String>> {
    let line = line.trim().trim_start_matches("$ ");
    let line = line
        .strip_prefix("cargo run --release -- ")
        .map(|rest| format!("parity {rest}"))
        .unwrap_or(line.to_owned());
    let words = words(line.strip_prefix("target/release/").unwrap_or(&line));
    (words.len() > 1 && words[0] == "parity").then(|| words[1..].to_vec())
}

/// Flags of a command, from its help.
fn flags(command: &str) -> Option<BTreeSet<String>> {
    let help = parity(&[command.to_owned(), "--help".to_owned()]);
    let text = String::from_utf8(help.stdout).unwrap();
    let plain = |word: &str| word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-').to_owned();
    let found = text.split_whitespace().map(plain).filter(|word| word.starts_with('-'));
    help.status.success().then(|| found.chain(["-hf".to_owned()]).collect())
}

/// Commands whose help ends with examples.
const WITH_EXAMPLES: [&str; 13] = [
    "ab",
    "testcase",
    "run",
    "record",
    "diff",
    "audit",
    "bench",
    "faults",
    "gate",
    "diff-reports",
    "inspect",
    "map",
    "explain",
];

/// Lines and columns of a screen that a command's short help fits on.
const SCREEN: (usize, usize) = (52, 80);

/// The short help of a command on a terminal of 80 columns.
fn short_help(command: &str) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_parity"));
    let output = program.args([command, "-h"]).env("COLUMNS", SCREEN.1.to_string()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_short_help_of_a_command_is_one_screen_and_ends_with_examples() {
    for command in WITH_EXAMPLES {
        let help = short_help(command);
        let widest = help.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(help.lines().count() <= SCREEN.0 && widest <= SCREEN.1, "{command}:\n{help}");
        let examples =
            help.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{command} has no examples")).1;
        assert!(examples.lines().all(|line| line.starts_with("  parity ")), "{command}:\n{examples}");
    }
}

/// Whether a command or flag is of a feature that this build does not have.
fn is_left_out(word: &str) -> bool {
    match word {
        "history" | "--history" => !cfg!(feature = "history"),
        "push" | "pull" | "--compress" => !cfg!(feature = "remote"),
        _ => false,
    }
}

#[test]
fn every_command_and_flag_of_the_pages_exists() {
    let mut skipped = 0;
    let mut known: BTreeMap<String, Option<BTreeSet<String>>> = BTreeMap::new();
    let (mut wrong, mut seen) = (Vec::new(), 0);
    let of_pages = pages().into_iter().map(|page| {
        let text = fs::read_to_string(&page).unwrap();
        (page.strip_prefix(root()).unwrap().display().to_string(), code(&text))
    });
    let of_help = WITH_EXAMPLES.map(|command| {
        let lines = short_help(command).lines().map(str::to_owned).collect();
        (format!("parity {command} -h"), lines)
    });
    for (page, lines) in of_pages.chain(of_help) {
        for args in lines.iter().filter_map(|line| arguments(line)) {
            // `parity DUMP`, `parity 0.1.0`: no command, but what a program prints or a name that stands for one.
            let name = args[0].trim_matches(|c: char| !c.is_ascii_lowercase() && c != '-').to_owned();
            if name.is_empty() || name != args[0] || name.starts_with('-') {
                continue;
            }
            seen += 1;
            if args.iter().any(|word| is_left_out(word)) {
                skipped += 1;
                continue;
            }
            let place = format!("{page}: parity {}", args.join(" "));
            match known.entry(name.clone()).or_insert_with(|| flags(&name)) {
                None => wrong.push(format!("{place}: no such command")),
                Some(flags) => {
                    let own = args[1..].iter().take_while(|word| *word != "--");
                    // `--a "-fa off"`: what has a blank in it is the value of a flag.
                    let is_flag =
                        |word: &&String| word.starts_with('-') && word.len() > 1 && !word.contains(' ');
                    let given = own.filter(is_flag);
                    let names = given.map(|word| word.split('=').next().unwrap_or_default().to_owned());
                    let unknown = names.filter(|flag| !flags.contains(flag));
                    wrong.extend(unknown.map(|flag| format!("{place}: no flag {flag}")));
                }
            }
        }
    }
    if skipped > 0 {
        eprintln!("SKIP: {skipped} commands of features that this build does not have (--features release)");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 60, "{seen} commands were found");
}

/// A measured number differs from processor to processor: numbers with a point or an exponent are all the same.
fn unmeasured(word: &str) -> String {
    let number = word.trim_matches(|c: char| "(),;%".contains(c));
    let measured = number.parse::<f64>().is_ok() && number.contains(['.', 'e']);
    if measured { word.replace(number, "~") } else { word.to_owned() }
}

fn sentence(lines: &[&str]) -> String {
    lines.iter().flat_map(|line| line.split_whitespace()).map(unmeasured).collect::<Vec<_>>().join(" ")
}

/// The lines from the answer up to the blank line behind it.
fn answer<'a>(lines: &[&'a str]) -> Vec<&'a str> {
    let is_answer =
        |line: &&str| ["DIVERGES", "UNDECIDED", "PARITY:"].iter().any(|word| line.starts_with(*word));
    let first = lines.iter().position(is_answer);
    lines[first.unwrap_or(lines.len())..].iter().take_while(|line| !line.trim().is_empty()).copied().collect()
}

/// (checkpoint, verdict) of the rows of a table, and what is said about several.
fn rows(lines: &[&str]) -> Vec<(String, String)> {
    let table = lines
        .iter()
        .filter(|line| line.starts_with("blk.") || line.starts_with("logits") || line.starts_with("embed"));
    let ends = |line: &&str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next_back()?.to_owned()))
    };
    table.filter_map(ends).collect()
}

/// Commands with what a page shows below them.
fn examples(page: &str) -> Vec<(Vec<String>, Vec<String>)> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let blocks: Vec<&str> = text.split("```").skip(1).step_by(2).collect();
    let mut out = Vec::new();
    for (place, block) in blocks.iter().enumerate() {
        let lines: Vec<&str> = block.lines().skip(1).collect();
        let Some(command) = lines.first() else { continue };
        let shown: Vec<String> = match command.starts_with("$ ") {
            true => lines[1..].iter().map(|line| line.to_string()).collect(),
            // The README has the answer in a block of its own.
            false if lines.len() == 1 => blocks
                .get(place + 1)
                .filter(|next| !next.lines().nth(1).is_some_and(|line| line.starts_with("$ ")))
                .into_iter()
                .flat_map(|next| next.lines().skip(1))
                .map(str::to_owned)
                .collect(),
            false => continue,
        };
        let is_answer = shown.iter().any(|line| line.starts_with("DIVERGES") || line.starts_with("PARITY:"));
        out.extend(arguments(command).filter(|args| args[0] == "run" && is_answer).map(|args| (args, shown)));
    }
    out
}

#[test]
fn the_answers_that_the_pages_show_are_the_programs() {
    let pages = ["README.md", "docs/README.md", "docs/divergences.md"];
    let all: Vec<_> = pages.into_iter().flat_map(examples).collect();
    assert!(all.len() >= 11, "{} examples", all.len());
    for (mut args, shown) in all {
        args.extend(["--device", "cpu"].map(str::to_owned));
        let output = String::from_utf8(parity(&args).stdout).unwrap();
        let (printed, shown): (Vec<&str>, Vec<&str>) =
            (output.lines().collect(), shown.iter().map(String::as_str).collect());
        let command = args.join(" ");
        let head: Vec<&str> = answer(&shown).into_iter().take_while(|line| *line != "…").collect();
        // The command to type next repeats the device, which the page leaves to the machine.
        let ours = sentence(&answer(&printed)).replace(" --device cpu", "");
        let theirs = sentence(&head);
        assert!(ours.starts_with(&theirs), "parity {command}\nshown:   {theirs}\nprinted: {ours}");
        let found: BTreeSet<_> = rows(&printed).into_iter().collect();
        for (id, verdict) in rows(&shown) {
            let is_printed = found.contains(&(id.clone(), verdict.clone()));
            assert!(is_printed, "parity {command}\nnot printed: {id} {verdict}");
        }
    }
}

#[test]
fn every_name_of_a_mistake_is_on_its_page() {
    let page = fs::read_to_string(root().join("docs/mistakes.md")).unwrap();
    let listed = parity(&["faults".to_owned(), "--format".to_owned(), "json".to_owned()]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let faults = listed.as_array().unwrap().iter().map(|fault| fault["name"].as_str().unwrap().to_owned());
    let tokens = fs::read_to_string(root().join("src/faults/tokens.rs")).unwrap();
    let tokens = tokens.split('"').filter(|text| text.starts_with("tokens.")).map(str::to_owned);
    let names: BTreeSet<String> = faults.chain(tokens).collect();
    assert!(names.len() > 130, "{}", names.len());
    let lacking: Vec<&String> =
        names.iter().filter(|name| !page.contains(&format!("| `{name}` |"))).collect();
    assert!(lacking.is_empty(), "not in docs/mistakes.md: {lacking:?}");
}
