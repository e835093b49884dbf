//! llama.cpp against itself: runs that differ in a flag, a build or a device, recorded with the same tokens, compared and
//! judged; or the same run again.

mod answer;
mod numbers;
pub mod observation;
pub mod repeat;
mod side;
mod two_files;
mod unseen;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use parity_dump::Dump;

use super::diff::{self, diff};
use crate::compare::common_positions;
use crate::error::{Error, Result};
use crate::model::diff::Whose;
use crate::record::{self, Observe};
use crate::report::Report;
use observation::{Observation, of_side};

pub use side::{Recorded, Recording};

/// One run.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// What it is called: `a`, `b`, `b2`.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Variables that it gets beside those of this process.
    pub environment: Vec<(OsString, OsString)>,
    /// Folder of the shared libraries that it is to load before others.
    pub libraries: Option<PathBuf>,
}

/// What is compared, and how.
pub struct Options<'a> {
    /// The runs: the first is what the others are compared with.
    pub sides: &'a [Side],
    /// How each is recorded.
    pub recording: &'a Recording<'a>,
    /// How they are judged.
    pub judged: &'a diff::Options,
    /// The sequence that is looked at alone; in a run of one sequence, that.
    pub sequence: Option<u32>,
    /// Whether each run is computed once more with nobody looking.
    pub unseen: bool,
}

/// What came of one pair.
pub struct Pair {
    /// The side that was compared with the first.
    pub name: String,
    /// The first side is its reference.
    pub report: Report,
}

/// Records the first run, then every other with its tokens, and compares each of them with it.
///
/// # Errors
/// A program that cannot be recorded, or whose model cannot be read.
pub fn ab(options: &Options<'_>) -> Result<Vec<Pair>> {
    let [a, others @ ..] = options.sides else {
        return Err(Error::new("parity ab", "there is no run to compare"));
    };
    // A program that cannot be recorded is told before minutes of another.
    for side in options.sides {
        side.command.first().map(|program| record::can_record(Path::new(program))).transpose()?;
    }
    let first = side::record(a, options.recording, None)?;
    let looks = options.unseen && options.recording.observe != Observe::None;
    let mut of_first: Option<Observation> = None;
    let mut pairs = Vec::new();
    for b in others {
        let second = side::record(b, options.recording, Some(&first.forced()))?;
        let mut report = compare(&first, &second, options)?;
        if looks {
            let healthy = answer::are_healthy(&report);
            let looked = |side, run, healthy| of_side(side, options.recording, run, healthy);
            if of_first.is_none() {
                of_first = Some(looked(a, &first, healthy.a)?);
            }
            of_first.iter().for_each(|found| answer::add_unseen(&mut report, found, Whose::Reference));
            answer::add_unseen(&mut report, &looked(b, &second, healthy.b)?, Whose::Candidate);
        }
        pairs.push(Pair { name: b.name.clone(), report });
    }
    Ok(pairs)
}

/// The answer for two runs.
fn compare(a: &Recorded, b: &Recorded, options: &Options<'_>) -> Result<Report> {
    let [mut reference, mut candidate] = [Dump::open(&a.dir)?, Dump::open(&b.dir)?];
    if let Some(id) = options.sequence {
        for dump in [&mut reference, &mut candidate] {
            dump.call_sequence(id);
            dump.choose_sequence(id)?;
        }
    }
    candidate.number_as(reference.manifest());
    let [a, b] = &[a.read_as(&reference), b.read_as(&candidate)];
    let options = options.judged;
    let [file, other] = [a.file()?, b.file()?];
    let prompt = a.prompt.max(b.prompt);
    let common = common_positions(candidate.tokens(), reference.tokens());
    let apart = two_files::apart(&file, &other)?;
    let mut report = match &apart {
        None => diff(&mut candidate, &mut reference, Some(&file), options)?,
        Some(_) => two_files::compare([&other, &file], [&mut candidate, &mut reference], options)?,
    };
    let sides = answer::Sides { a, b, reference: &reference, candidate: &candidate, gguf: file.gguf() };
    // Who failed on the way has no other prompt, but less of it.
    let one_failed = a.failed.is_some() != b.failed.is_some();
    match common < prompt && !one_failed {
        true => answer::of_other_prompts(&mut report, &sides, common, options.no_text),
        false => answer::of_one_text(&mut report, &sides)?,
    }
    if let Some(apart) = &apart {
        two_files::add(&mut report, apart, [a, b]);
    }
    answer::add_other_contexts(&mut report, &sides);
    answer::add_failures(&mut report, [a, b]);
    leave_open_other_contexts(&mut report, [a, b]);
    Ok(report)
}

/// A program that computes in several contexts, as with a draft model, was compared in the first of them alone: nothing is known
/// of the others.
fn leave_open_other_contexts(report: &mut Report, sides: [&Recorded; 2]) {
    let second = parity_record::recorder::another(1);
    if !sides.iter().any(|side| side.dir.join(&second).exists()) {
        return;
    }
    let [theirs, ours] = sides.map(|side| side.dir.join(&second).display().to_string());
    let why = format!(
        "the program computes in another context too, as with a draft model, which was recorded and not compared: -o DIR keeps \
         it, parity diff {ours} {theirs} -m ITS.gguf judges it"
    );
    report.leave_open(why.clone());
    report.gaps.push(why);
}

/// Whether a folder can take what is recorded: it has none of the sides yet, or may lose them.
///
/// # Errors
/// Names the dump that is in the way.
pub fn room(dir: &Path, names: &[String], force: bool) -> Result<()> {
    for name in names {
        let side = dir.join(name);
        if side.join(parity_dump::manifest::MANIFEST_FILE).exists() && !force {
            return Err(Error::file(&side, "holds a dump already")
                .expected("a folder that is new or empty")
                .hint("--force replaces it; -o DIR chooses another folder"));
        }
    }
    std::fs::create_dir_all(dir).map_err(|e| Error::file(dir, format!("cannot be written: {e}")))
}
