//! `parity ab`: a llama.cpp program against itself.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{self, AuditArgs, LoraArgs, SelectArgs, ToleranceArgs};
use crate::error::{Error, Result};
use crate::jobs::ab::observation::observation;
use crate::jobs::ab::repeat::repeat;
use crate::jobs::ab::{Options, Recording, Side, ab, room};
use crate::jobs::diff;
use crate::record::{Filter, Observe};
use crate::report::files::Folder;
use crate::report::{Report, Verdict};
use crate::text::tell;

const EXAMPLES: &str = "\
Examples:
  parity ab --a \"-fa off\" --b \"-fa on\" -- llama-completion -m M -p P -n 8
  parity ab --b-libs new/lib -- llama-completion -m M -p P -n 8
  parity ab --repeat 5 -- llama-completion -m M -p P -n 8";

/// What `git bisect run` takes for a build that cannot be judged.
const CANNOT_BE_TESTED: u8 = 125;

/// Flags of `parity ab`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Flags of side A, as a shell would split them
    ///
    /// They stand where {} is in the command, or at its end.
    #[arg(
        long,
        value_name = "FLAGS",
        allow_hyphen_values = true,
        default_value = "",
        hide_default_value = true
    )]
    a: String,
    /// Flags of side B; may be repeated
    ///
    /// Each is compared with A.
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    b: Vec<String>,
    /// Variable of side A; may be repeated
    #[arg(long, value_name = "K=V")]
    a_env: Vec<String>,
    /// Variable of every side B; may be repeated
    #[arg(long, value_name = "K=V")]
    b_env: Vec<String>,
    /// Program of side A, in place of the command's
    #[arg(long, value_name = "PROGRAM")]
    a_program: Option<PathBuf>,
    /// Program of side B; one for all, or one for each --b
    #[arg(long, value_name = "PROGRAM")]
    b_program: Vec<PathBuf>,
    /// Shared libraries of side A, loaded before others
    #[arg(long, value_name = "DIR")]
    a_libs: Option<PathBuf>,
    /// Shared libraries of side B; one for all, or one for each --b
    #[arg(long, value_name = "DIR")]
    b_libs: Vec<PathBuf>,
    /// Run side A N times, and find the first node whose bits differ
    #[arg(long, value_name = "N", conflicts_with_all = ["b", "b_env", "b_program", "b_libs"])]
    repeat: Option<usize>,
    /// Find out whether looking at nodes changes the logits of side A
    #[arg(long, conflicts_with_all = ["b", "b_env", "b_program", "b_libs", "repeat"])]
    observation: bool,
    /// Look at one sequence alone: of several on a side, and the only one of the other
    #[arg(long, value_name = "N", conflicts_with_all = ["repeat", "observation"])]
    sequence: Option<u32>,
    /// Keep the recordings: DIR/a, DIR/b, DIR/b2
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Let -o replace recordings
    #[arg(long, requires = "output")]
    force: bool,
    /// How closely to look: auto, none, outputs or nodes (docs/ab.md)
    #[arg(long, value_name = "LEVEL", default_value_t, hide_short_help = true)]
    observe: Observe,
    /// Do not run each side once more with nobody looking
    #[arg(long, hide_short_help = true)]
    no_verify: bool,
    /// Only the logits that the programs ask for
    #[arg(long, hide_short_help = true)]
    own_rows: bool,
    /// Ask for equal bits
    #[arg(long)]
    bitwise: bool,
    /// End with 125 in place of 2, for `git bisect run`
    #[arg(long)]
    bisect: bool,
    /// Threads of the audit [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    pub threads: Option<usize>,
    /// The llama.cpp program and its arguments
    #[arg(last = true, value_name = "COMMAND", required = true)]
    command: Vec<OsString>,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    output_args: OutputArgs,
}

/// Several pairs, as they are printed.
#[derive(Serialize)]
struct Pairs {
    schema: &'static str,
    pairs: Vec<Report>,
}

/// Runs the command. Recordings in a temporary folder stay where the exit code is not 0, and the folder is named.
pub fn main(args: &Args) -> Outcome {
    let answered = answer(args);
    let verdict = match answered {
        Ok(verdict) => verdict,
        Err(error) if args.bisect => {
            tell(format_args!("error: {error}"));
            Verdict::Undecided
        }
        Err(error) => return Err(error),
    };
    Ok(match verdict {
        Verdict::Undecided if args.bisect => ExitCode::from(CANNOT_BE_TESTED),
        verdict => super::exit_code(verdict),
    })
}

fn answer(args: &Args) -> Result<Verdict> {
    let folder = args.output_args.folder()?;
    let sides = args.sides()?;
    let temporary = match &args.output {
        Some(_) => None,
        None => Some(
            tempfile::Builder::new()
                .prefix("parity-ab-")
                .tempdir()
                .map_err(|e| Error::file(&std::env::temp_dir(), format!("cannot be written to: {e}")))?,
        ),
    };
    let dir = match (&args.output, &temporary) {
        (Some(dir), _) => dir.as_path(),
        (None, Some(temporary)) => temporary.path(),
        (None, None) => Path::new("."),
    };
    let names: Vec<String> = sides.iter().map(|side| side.name.clone()).collect();
    room(dir, &names, args.force)?;
    let answered = judged(args, &sides, dir, folder);
    if let Some(temporary) = temporary.filter(|_| !matches!(answered, Ok(Verdict::Parity))) {
        tell(format_args!("recordings: {}", temporary.keep().display()));
    }
    answered
}

fn judged(args: &Args, sides: &[Side], dir: &Path, folder: Option<Folder>) -> Result<Verdict> {
    let say = |text: &str| tell(format_args!("{text}"));
    let (observe, no_text) = (args.observe, args.output_args.no_text());
    let (filter, all_rows) = (Filter::default(), !args.own_rows);
    let adapters = &args.lora.adapters()[..];
    let recording = Recording { dir, filter, all_rows, observe, no_text, adapters, say: &say };
    let judged = diff::Options {
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        bitwise: args.bitwise,
        no_text: args.output_args.no_text(),
        audit: args.audit.rows(),
    };
    if let (true, [side, ..]) = (args.observation, sides) {
        let found = observation(side, &recording, &judged)?;
        args.output_args.show(&found, |_| found.render())?;
        return Ok(found.verdict());
    }
    if let (Some(runs), [side, ..]) = (args.repeat, sides) {
        let found = repeat(side, runs, &recording, &judged)?;
        args.output_args.show(&found, |_| found.render())?;
        return Ok(found.verdict());
    }
    let pairs = ab(&Options {
        sides,
        recording: &recording,
        judged: &judged,
        sequence: args.sequence,
        unseen: !args.no_verify,
    })?;
    let worst = [Verdict::Divergence, Verdict::Undecided];
    let verdict = worst.into_iter().find(|verdict| pairs.iter().any(|pair| pair.report.verdict == *verdict));
    let mut reports: Vec<(String, Report)> = pairs.into_iter().map(|pair| (pair.name, pair.report)).collect();
    match reports.pop() {
        Some((_, report)) if reports.is_empty() => drop(args.output_args.deliver(folder, report)?),
        last => {
            reports.extend(last);
            let whole = |pairs| Pairs { schema: "parity-ab/1", pairs };
            args.output_args.deliver_all(folder, reports, whole)?;
        }
    }
    Ok(verdict.unwrap_or(Verdict::Parity))
}

impl Args {
    /// The runs that were asked for: A first.
    fn sides(&self) -> Result<Vec<Side>> {
        let a = self.side("a", &self.a, &self.a_env, self.a_program.as_deref(), self.a_libs.as_deref())?;
        if self.repeat.is_some() || self.observation {
            return Ok(vec![a]);
        }
        let n = [self.b.len(), self.b_program.len(), self.b_libs.len(), 1].into_iter().max().unwrap_or(1);
        for (flag, given) in
            [("--b", self.b.len()), ("--b-program", self.b_program.len()), ("--b-libs", self.b_libs.len())]
        {
            if ![0, 1, n].contains(&given) {
                return Err(Error::new(flag, format!("given {given} times"))
                    .expected(format!("once for all sides, or once for each of {n}")));
            }
        }
        let mut sides = vec![a];
        for i in 0..n {
            let name = if i == 0 { "b".to_owned() } else { format!("b{}", i + 1) };
            let flags = of(&self.b, i).map_or("", String::as_str);
            let (program, libraries) = (of(&self.b_program, i), of(&self.b_libs, i));
            let b = self.side(
                &name,
                flags,
                &self.b_env,
                program.map(PathBuf::as_path),
                libraries.map(PathBuf::as_path),
            )?;
            let same = (&b.command, &b.environment, &b.libraries)
                == (&sides[0].command, &sides[0].environment, &sides[0].libraries);
            if same {
                return Err(Error::new("parity ab", format!("sides a and {name} are the same run"))
                    .expected("flags, variables, a program or libraries that one side alone has")
                    .hint("--repeat N compares a run with itself"));
            }
            sides.push(b);
        }
        Ok(sides)
    }

    fn side(
        &self,
        name: &str,
        flags: &str,
        environment: &[String],
        program: Option<&Path>,
        libraries: Option<&Path>,
    ) -> Result<Side> {
        let words = shlex::split(flags).ok_or_else(|| {
            Error::new(format!("--{name}"), format!("`{flags}` cannot be split into words"))
                .expected("words as a shell reads them: a quote that is opened is closed")
        })?;
        if let Some(folder) = libraries.filter(|folder| !folder.is_dir()) {
            return Err(Error::file(folder, "is no folder").expected("a folder of shared libraries"));
        }
        let mut command: Vec<OsString> = Vec::new();
        let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        let has_place = self.command.iter().any(|word| word == "{}");
        for word in &self.command {
            match word == "{}" {
                true => command.extend(words.iter().cloned()),
                false => command.push(word.clone()),
            }
        }
        if !has_place {
            command.extend(words);
        }
        if let (Some(program), Some(first)) = (program, command.first_mut()) {
            *first = program.as_os_str().to_owned();
        }
        let environment = environment.iter().map(|text| variable(text)).collect::<Result<_>>()?;
        Ok(Side { name: name.to_owned(), command, environment, libraries: libraries.map(Path::to_owned) })
    }
}

/// The value for a side: one for all, or its own.
fn of<T>(values: &[T], side: usize) -> Option<&T> {
    if values.len() == 1 { values.first() } else { values.get(side) }
}

/// `K=V`.
fn variable(text: &str) -> Result<(OsString, OsString)> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err(Error::new("--a-env, --b-env", format!("`{text}` is no variable")).expected("NAME=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        args: Args,
    }

    fn sides(text: &str) -> Result<Vec<String>> {
        let words = shlex::split(text).unwrap();
        let typed = Typed::parse_from([vec!["ab".to_owned()], words].concat());
        let shown = |side: Side| {
            let words: Vec<String> = side.command.iter().map(|w| w.to_string_lossy().into_owned()).collect();
            format!("{} {}", side.name, words.join("|"))
        };
        Ok(typed.args.sides()?.into_iter().map(shown).collect())
    }

    #[test]
    fn flags_stand_where_the_braces_are_or_at_the_end() {
        let end = sides("--a '-ngl 0' --b '-ngl 99 -p \"a b\"' -- prog -m M").unwrap();
        assert_eq!(end, ["a prog|-m|M|-ngl|0", "b prog|-m|M|-ngl|99|-p|a b"]);
        let inside = sides("--b '-fa on' -- prog {} -m M").unwrap();
        assert_eq!(inside, ["a prog|-m|M", "b prog|-fa|on|-m|M"]);
    }

    #[test]
    fn repeated_flags_are_a_matrix_and_what_differs_nowhere_is_refused() {
        let matrix = sides("--b '-x 1' --b '-x 2' --b-program other -- prog").unwrap();
        assert_eq!(matrix, ["a prog", "b other|-x|1", "b2 other|-x|2"]);
        assert!(sides("-- prog").unwrap_err().to_string().contains("--repeat"));
        assert!(sides("--b 'x \"y' -- prog").unwrap_err().to_string().contains("quote"));
        assert!(sides("--b 1 --b 2 --b 3 --b-program x --b-program y -- prog").is_err());
        assert!(sides("--b-env nothing -- prog").is_err());
    }
}
