//! What the parent process adds to a dump when the program has ended: the model, the prompt, how it ended.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

use parity_dump::{Checkpoint, Dump, ModelInfo};

use super::program::Program;
use super::tap::{Report, absolute};
use super::{Filter, Options, Summary, Way, ending, file_name};
use crate::dump::Graphs;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::info;

/// A recording that has ended.
pub struct Finished<'a> {
    /// Folder of the dump.
    pub dir: &'a Path,
    /// Which checkpoints were wanted.
    pub filter: &'a Filter,
    /// The model, where one was seen.
    pub model: Option<&'a Path>,
    /// The text that was evaluated.
    pub prompt: Option<String>,
    /// How it was made.
    pub provenance: Vec<(String, String)>,
    /// Why it is not complete, where it is not.
    pub incomplete: Option<String>,
    /// Token sequences that were seen.
    pub sequences: usize,
    /// How the program ended; `None` of the built-in llama.cpp.
    pub program: Option<ExitStatus>,
}

/// Completes the manifest of a program's recording and says what was recorded.
///
/// # Errors
/// Where nothing was recorded.
pub fn finish(options: &Options, program: &Program, report: &Report, status: ExitStatus) -> Result<Summary> {
    if report.recordings.is_empty() {
        return Err(nothing(options.way, program, report, status));
    }
    if let Some(inject) = options.inject.as_ref().filter(|_| report.injected.is_none()) {
        return Err(no_place(inject));
    }
    let injected = injected(options.inject.as_ref(), report.injected.as_ref());
    let of = |(number, dir): (usize, &Path)| {
        complete(Finished {
            dir,
            filter: &options.filter,
            model: model_of(dir, &report.models, number),
            prompt: prompt(&options.command).filter(|_| number == 0 && !options.no_text),
            provenance: provenance(options, status)
                .into_iter()
                .chain(injected.clone().filter(|_| number == 0))
                .collect(),
            incomplete: report.stopped.clone().or_else(|| cut_short(report, status)),
            sequences: report.sequences,
            program: Some(status),
        })
    };
    let first = of((0, &options.dir))?;
    let own = absolute(&options.dir);
    let others = report.recordings.iter().filter(|dir| **dir != own).map(PathBuf::as_path);
    let others = (1..).zip(others).map(of).collect::<Result<_>>()?;
    Ok(Summary { others, ..first })
}

/// Which of the models that were opened a recording is of: the one that has most of its graph's weights; where several have as
/// many, the one that was opened as number `number` of these.
fn model_of<'a>(dir: &Path, models: &'a [PathBuf], number: usize) -> Option<&'a Path> {
    if models.len() <= 1 {
        return models.first().map(PathBuf::as_path);
    }
    let graphs = Dump::open(dir).map_err(Error::from).and_then(|dump| Graphs::read(&dump)).ok()?;
    let graph = graphs.all().first()?;
    let held = |path: &PathBuf| {
        let Ok(gguf) = Gguf::open(path) else { return 0 };
        let weights = (graph.nodes..graph.tensors.len()).map(|id| graph.get(id));
        let has = |tensor: &&parity_graph::Tensor| {
            gguf.tensor(&tensor.name).is_some_and(|found| {
                let same = found.info.dtype.to_string().eq_ignore_ascii_case(&tensor.dtype);
                same && found.info.shape.iter().product::<usize>() == tensor.elements()
            })
        };
        weights.filter(has).count()
    };
    let held: Vec<usize> = models.iter().map(held).collect();
    let best = held.iter().max()?;
    let alike: Vec<&PathBuf> =
        models.iter().zip(&held).filter(|(_, held)| *held == best).map(|(path, _)| path).collect();
    alike.get(number.min(alike.len().checked_sub(1)?)).map(|path| path.as_path())
}

/// That a mistake could not be injected.
pub fn no_place(inject: &parity_record::Wanted) -> Error {
    Error::new("--inject", format!("no node has a place for {inject}"))
        .expected("FAULT, or FAULT@CHECKPOINT of a recorded node, such as rope.base@blk.1.q_rope")
        .hint("parity inspect shows the checkpoints of a recording")
}

/// Completes the manifest and says what was recorded.
///
/// # Errors
/// Where no pass was recorded to its end, or no checkpoint of it.
pub fn complete(finished: Finished<'_>) -> Result<Summary> {
    let Finished { dir, incomplete, program, .. } = finished;
    let dump = Dump::open(dir)?;
    let mut manifest = dump.manifest().clone();
    let checkpoints = recorded(&dump)?;
    if manifest.steps.is_empty() {
        let why = incomplete.or_else(|| program.map(ending)).unwrap_or_else(|| "an early end".to_owned());
        return Err(Error::file(dir, "no forward pass was recorded to its end").found(why));
    }
    if checkpoints.is_empty() {
        return Err(Error::file(dir, "no checkpoint of the model was chosen")
            .found(format!("--layer and --checkpoint `{}`", finished.filter))
            .hint("parity record without them records everything"));
    }
    if let Some(path) = finished.model {
        manifest.model = model_info(path);
    }
    manifest.prompt = finished.prompt;
    manifest.provenance.extend(finished.provenance);
    let made =
        [("date", date(SystemTime::now())), ("recorded by", format!("parity {}", env!("CARGO_PKG_VERSION")))];
    manifest.provenance.extend(made.map(|(key, value)| (key.to_owned(), value)));
    if let Some(reason) = &incomplete {
        manifest.stop(reason);
    }
    manifest.complete = manifest.stopped.is_none();
    let incomplete = manifest.stopped.as_ref().map(|stopped| stopped.reason.clone());
    parity_dump::write_manifest(dir, &manifest)?;
    let bytes = |file: &String| fs::metadata(dir.join(file)).map_or(0, |meta| meta.len());
    Ok(Summary {
        dir: dir.to_owned(),
        steps: manifest.steps.len(),
        tokens: manifest.tokens.len(),
        checkpoints: checkpoints.len(),
        bytes: manifest.steps.iter().flat_map(|step| step.hashes.iter().chain([&step.file])).map(bytes).sum(),
        sequences: finished.sequences,
        unmapped: manifest.unmapped,
        incomplete,
        program,
        model: finished.model.map(Path::to_owned),
        library: None,
        replaced: Vec::new(),
        others: Vec::new(),
        verified: None,
    })
}

/// The checkpoints of a dump, of values or of hashes.
fn recorded(dump: &Dump) -> Result<HashSet<Checkpoint>> {
    let mut all: HashSet<Checkpoint> = dump.checkpoints().collect();
    for step in 0..dump.manifest().steps.len() {
        all.extend(dump.hashes(step)?.into_iter().map(|hashed| hashed.id));
    }
    Ok(all)
}

/// Why a recording that nobody stopped is not whole, where it is not.
fn cut_short(report: &Report, status: ExitStatus) -> Option<String> {
    let unwritten = || format!("the program ended before {} of its passes were written", report.unwritten);
    let by_signal = status.code().is_none().then(|| ended(status));
    by_signal.or_else(|| (report.unwritten > 0).then(unwritten))
}

/// That the program ended before its own end.
pub fn ended(status: ExitStatus) -> String {
    format!("the program ended with {}", ending(status))
}

/// Why there is no dump.
fn nothing(way: Way, program: &Program, report: &Report, status: ExitStatus) -> Error {
    let error = Error::file(&program.path, "computed no llama.cpp graph that could be recorded");
    if let Some(reason) = &report.stopped {
        return error.found(reason);
    }
    if way == Way::Loaded && report.loaded.is_none() {
        return error
            .expected("a program that has ggml load its backends, as llama.cpp's tools do since January 2025")
            .found(format!("one that did not load the recorder; it ended with {}", ending(status)))
            .hint("see its own messages above, or record without --load");
    }
    let error = error.found(format!("it ended with {}", ending(status)));
    if !report.models.is_empty() {
        return error.hint("see its own messages above: it opened a model, but evaluated no token");
    }
    if program.contains_llama() {
        return error.hint(
            "llama.cpp is linked into it statically, out of reach: build it with -DBUILD_SHARED_LIBS=ON \
             (Rust: feature `dynamic-link`), or use `parity record -m MODEL -p PROMPT` (feature llama-cpp)",
        );
    }
    error.hint("see its own messages above; is it a llama.cpp program, and does it evaluate a prompt?")
}

/// What a manifest says of a model file.
pub fn model_info(path: &Path) -> ModelInfo {
    // A model that parity cannot run can still be recorded.
    let unread = || ModelInfo { file: Some(file_name(path)), ..ModelInfo::default() };
    Gguf::open(path).map_or_else(|_| unread(), |gguf| info(&gguf))
}

/// A command without the text of its prompt.
fn without_prompt(command: &[OsString]) -> Vec<OsString> {
    let is_flag = |word: &OsString| word == "-p" || word == "--prompt";
    let is_text = |at: usize| at > 0 && is_flag(&command[at - 1]);
    let with = |(at, word): (usize, &OsString)| match word.to_string_lossy().starts_with("--prompt=") {
        true => OsString::from("--prompt=…"),
        false if is_text(at) => OsString::from("…"),
        false => word.clone(),
    };
    command.iter().enumerate().map(with).collect()
}

/// The text after `-p` or `--prompt`.
pub fn prompt(command: &[OsString]) -> Option<String> {
    let flag = command.iter().position(|word| word == "-p" || word == "--prompt")?;
    command.get(flag + 1).map(|text| text.to_string_lossy().into_owned())
}

/// What was injected, so that nobody takes the recording for a healthy one.
pub fn injected(inject: Option<&parity_record::Wanted>, text: Option<&String>) -> Option<(String, String)> {
    let (inject, text) = inject.zip(text)?;
    Some(("injected".to_owned(), format!("{inject}: {text}")))
}

/// The command without folders, and how it ended.
pub fn provenance(options: &Options, status: ExitStatus) -> [(String, String); 3] {
    let command = if options.no_text { without_prompt(&options.command) } else { options.command.clone() };
    let words: Vec<String> = command
        .iter()
        .map(|word| {
            if Path::new(word).is_file() {
                file_name(Path::new(word))
            } else {
                word.to_string_lossy().into_owned()
            }
        })
        .collect();
    let words = shell_words(&words);
    let rows = if options.all_rows { "all rows" } else { "the rows that the program asks for" };
    [
        ("command".to_owned(), words),
        ("program".to_owned(), ending(status)),
        ("logits".to_owned(), rows.to_owned()),
    ]
}

/// The day in UTC, `2026-11-21`.
fn date(time: SystemTime) -> String {
    const DAY: u64 = 86_400;
    // Days to year, month and day as in Hinnant, "chrono-compatible low-level date algorithms": years begin
    // in March, so that the odd day is the last.
    let days = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() / DAY) + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// A command line that a shell would take apart again into `words`.
fn shell_words(words: &[String]) -> String {
    let plain = |word: &str| {
        !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./=,:@%+".contains(c))
    };
    let quoted = |word: &String| {
        if plain(word) { word.clone() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parity_dump::{Element, Producer, Writer};

    use super::*;

    #[test]
    fn a_program_that_is_killed_leaves_a_recording_that_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path(), Producer::default(), ModelInfo::default()).unwrap();
        let embed: Checkpoint = "embed".parse().unwrap();
        writer.begin_step(&[3, 1], &[0, 1], 1).unwrap();
        writer.tensor(embed, Element::F32, &[2, 1], &[0; 8], None).unwrap();
        writer.end_step().unwrap();
        drop(writer);
        let filter = Filter::default();
        let finished = |incomplete: Option<&str>| Finished {
            dir: folder.path(),
            filter: &filter,
            model: None,
            prompt: None,
            provenance: Vec::new(),
            incomplete: incomplete.map(str::to_owned),
            sequences: 1,
            program: None,
        };
        let summary = complete(finished(Some("the program ended with signal 9"))).unwrap();
        assert_eq!(summary.incomplete.as_deref(), Some("the program ended with signal 9"));
        let manifest = Dump::open(folder.path()).unwrap().manifest().clone();
        let stopped = manifest.stopped.clone().unwrap();
        assert!(!manifest.complete && stopped.reason.contains("signal 9"), "{stopped:?}");
        assert_eq!((stopped.after_step, stopped.position), (Some(0), Some(2)));
        // What the recorder said itself stays, whatever the program did then.
        assert_eq!(complete(finished(None)).unwrap().incomplete, summary.incomplete);
        let again = Dump::open(folder.path()).unwrap().manifest().clone();
        assert!(!again.is_whole() && again.stopped == Some(stopped), "{again:?}");
    }

    #[test]
    fn passes_that_were_computed_and_not_written_are_missed() {
        use std::os::unix::process::ExitStatusExt;
        let report = |unwritten| Report { unwritten, ..Report::default() };
        assert_eq!(cut_short(&report(0), ExitStatus::from_raw(0)), None);
        let said = cut_short(&report(2), ExitStatus::from_raw(0)).unwrap();
        assert_eq!(said, "the program ended before 2 of its passes were written");
        assert!(cut_short(&report(2), ExitStatus::from_raw(9)).unwrap().contains("signal 9"));
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_795_219_199, "2026-11-20"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), day);
        }
    }

    #[test]
    fn a_command_line_can_be_typed_again() {
        let words = ["llama-completion", "-p", "it's\n", ""].map(str::to_owned);
        assert_eq!(shell_words(&words), "llama-completion -p 'it'\\''s\n' ''");
    }
}
