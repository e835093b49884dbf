//! The sentences and number formats that every rendering shares.

use super::{CheckpointVerdict, Entry, Report, Side, TokenReport, Tried, Verdict};
use crate::checkpoint::Checkpoint;
use crate::ops::bound::HEALTHY;
use crate::text::printable;

impl Verdict {
    /// As it is spelt in `report.json`.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Parity => "parity",
            Verdict::Divergence => "divergence",
            Verdict::Undecided => "undecided",
        }
    }

    /// Exit code of a command that ends with this answer.
    pub fn exit_code(self) -> u8 {
        match self {
            Verdict::Parity => 0,
            Verdict::Divergence => 1,
            Verdict::Undecided => 2,
        }
    }
}

impl CheckpointVerdict {
    /// As it is spelt in `report.json`.
    pub fn name(self) -> &'static str {
        match self {
            CheckpointVerdict::Match => "match",
            CheckpointVerdict::Inherited => "inherited",
            CheckpointVerdict::Origin => "origin",
            CheckpointVerdict::Reference => "reference",
            CheckpointVerdict::Beyond => "beyond",
            CheckpointVerdict::Missing => "missing",
            CheckpointVerdict::Shape => "shape",
            CheckpointVerdict::Nonfinite => "nonfinite",
            CheckpointVerdict::Bits => "bits",
            CheckpointVerdict::Precision => "precision",
            CheckpointVerdict::Undecided => "undecided",
        }
    }

    /// One sentence for readers who meet it for the first time.
    pub fn meaning(self) -> &'static str {
        match self {
            CheckpointVerdict::Match => "the difference is within what rounding explains",
            CheckpointVerdict::Inherited => "it differs, but the node is healthy: its input differed already",
            CheckpointVerdict::Origin => {
                "the candidate's local error is beyond what rounding explains: the bug is here"
            }
            CheckpointVerdict::Reference => "the reference's local error is beyond what rounding explains",
            CheckpointVerdict::Beyond => "the difference is beyond the given tolerance",
            CheckpointVerdict::Missing => "one side does not have it",
            CheckpointVerdict::Shape => "the two sides have different shapes",
            CheckpointVerdict::Bits => "its bits differ, and nothing before it differs in a bit",
            CheckpointVerdict::Nonfinite => "there are NaN or Inf on a side",
            CheckpointVerdict::Precision => {
                "rounding explains it, but only of a coarser arithmetic than was declared or than the others of its kind have"
            }
            CheckpointVerdict::Undecided => "there is no evidence either way",
        }
    }

    /// Whether the node itself is in order. A coarser arithmetic than was declared is among the report's origins.
    pub fn is_healthy(self) -> bool {
        use CheckpointVerdict::{Inherited, Match, Precision};
        matches!(self, Match | Inherited | Precision)
    }

    /// Whether it makes a run a divergence.
    pub fn is_fault(self) -> bool {
        matches!(
            self,
            CheckpointVerdict::Origin
                | CheckpointVerdict::Nonfinite
                | CheckpointVerdict::Shape
                | CheckpointVerdict::Beyond
                | CheckpointVerdict::Bits
        )
    }

    /// All of them, best first.
    pub const ALL: [CheckpointVerdict; 11] = [
        CheckpointVerdict::Match,
        CheckpointVerdict::Inherited,
        CheckpointVerdict::Origin,
        CheckpointVerdict::Nonfinite,
        CheckpointVerdict::Shape,
        CheckpointVerdict::Beyond,
        CheckpointVerdict::Bits,
        CheckpointVerdict::Reference,
        CheckpointVerdict::Precision,
        CheckpointVerdict::Missing,
        CheckpointVerdict::Undecided,
    ];
}

/// The answer in a word or two: `DIVERGES at blk.2.q_rope`.
pub fn answer(report: &Report) -> String {
    match (report.verdict, &report.first_divergence) {
        (Verdict::Parity, _) => "PARITY".to_owned(),
        (Verdict::Divergence, Some(first)) => format!("DIVERGES at {}", first.checkpoint),
        (Verdict::Divergence, None) => "DIVERGES".to_owned(),
        (Verdict::Undecided, _) => "UNDECIDED".to_owned(),
    }
}

/// What is behind the answer, in one sentence without a full stop.
pub fn because(report: &Report) -> String {
    let Some(first) = &report.first_divergence else {
        return match (report.verdict, &report.reason) {
            (_, Some(reason)) => reason.clone(),
            (Verdict::Parity, None) => agreement(report),
            (Verdict::Divergence, None) => "the tokens differ".to_owned(),
            (Verdict::Undecided, None) => "nothing could be compared".to_owned(),
        };
    };
    if let Some(diagnosis) = first.diagnosis.first() {
        return diagnosis.text.clone();
    }
    let evidence = || {
        let entry = report.checkpoints.iter().find(|entry| entry.id == first.checkpoint);
        entry.and_then(|entry| entry.evidence.clone())
    };
    let fallback = || first.verdict.meaning().to_owned();
    first.residual.clone().or_else(evidence).unwrap_or_else(fallback)
}

fn agreement(report: &Report) -> String {
    let compared = report.coverage.checkpoints_compared;
    let audited = report.checkpoints.iter().filter(|entry| entry.local.candidate.is_some()).count();
    if compared == 0 {
        return format!("{} within what rounding explains", count(audited, "node"));
    }
    let tokens = tokens_agree(report.tokens.as_ref());
    format!("{} within what rounding explains{tokens}", count(compared, "checkpoint"))
}

/// `, every token agrees`, where every one does: goes on a sentence.
pub fn tokens_agree(tokens: Option<&TokenReport>) -> &'static str {
    if tokens.is_some_and(|tokens| tokens.top1_agree >= 1.0) { ", every token agrees" } else { "" }
}

/// `(rope.base, explains 99.99999 %)`, where a fault was named; `(rope.base)` of a node that computes rightly what its
/// graph says, which is not what it should say.
pub fn diagnosis_note(report: &Report) -> Option<String> {
    let first = report.first_divergence.as_ref()?;
    let diagnosis = first.diagnosis.first()?;
    let entry = report.checkpoints.iter().find(|entry| entry.id == first.checkpoint);
    let local = entry.and_then(|entry| entry.local.candidate.as_ref());
    if first.verdict == CheckpointVerdict::Origin && local.is_some_and(|local| local.over_bound <= HEALTHY) {
        return Some(diagnosis.fault.clone());
    }
    Some(format!("{}, explains {}", diagnosis.fault, percent(diagnosis.explains)))
}

/// Further origins that are named in a sentence.
const NAMED_MAX: usize = 3;

/// The first divergence's surroundings: how its input fares and what follows from it.
pub fn surroundings(report: &Report) -> Option<String> {
    let first = report.first_divergence.as_ref()?;
    let at = report.checkpoints.iter().position(|entry| entry.id == first.checkpoint)?;
    let mut parts = Vec::new();
    let inputs = report.checkpoints[..at].iter().filter(|entry| first.inputs.contains(&entry.id));
    let inputs = inputs.filter_map(|entry| Some((entry.id, entry.numbers.as_ref()?.rel_l2)));
    if let Some((id, worst)) = inputs.max_by(|a, b| a.1.total_cmp(&b.1)) {
        parts.push(format!("its input {id} agrees to {}", number(worst)));
    }
    let later = &report.checkpoints[at + 1..];
    let inherited = later.iter().filter(|entry| entry.verdict == CheckpointVerdict::Inherited).count();
    if inherited > 0 {
        parts.push(format!("{} only inherit the error", count(inherited, "later checkpoint")));
    }
    let others: Vec<_> = report.origins.iter().filter(|id| **id != first.checkpoint).collect();
    let name = |id: &&Checkpoint| {
        let entry = report.checkpoints.iter().find(|entry| entry.id == **id);
        let fault = entry.and_then(|entry| entry.diagnosis.first()).map(|best| format!(" ({})", best.fault));
        format!("{id}{}", fault.unwrap_or_default())
    };
    let named: Vec<String> = others.iter().map(name).collect();
    match named.len() {
        0 => {}
        1 => parts.push(format!("wrong by itself too: {}", named[0])),
        n if n <= NAMED_MAX => parts.push(format!("wrong by themselves too: {}", named.join(", "))),
        n => parts.push(format!("{} are wrong by themselves", count(n, "more node"))),
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Commands to go on with, the most useful first, each once; where one is what was just typed, it is to keep its
/// pictures.
pub fn next_commands(report: &Report) -> Vec<String> {
    let reproduce = report.first_divergence.iter().filter_map(|first| first.reproduce.as_ref());
    let typed = report.command.as_deref().map(words_of);
    let mut commands: Vec<String> = Vec::new();
    for command in reproduce.chain(&report.next) {
        let command = match &typed {
            Some((words, kept)) if *words == words_of(command).0 => match kept {
                true => continue,
                false => format!("{command} --report report"),
            },
            _ => command.clone(),
        };
        if !commands.contains(&command) {
            commands.push(command);
        }
    }
    commands
}

/// Flags that say where a result goes, not what it is.
const OUTPUT_FLAGS: [&str; 3] = ["--report", "--format", "--dump"];

/// The words of a command but for [`OUTPUT_FLAGS`], whatever their order, and whether a report is kept.
fn words_of(command: &str) -> (Vec<&str>, bool) {
    let (mut out, mut kept) = (Vec::new(), false);
    let mut words = command.split_whitespace();
    while let Some(word) = words.next() {
        let flag = word.split_once('=').map_or(word, |(flag, _)| flag);
        kept |= flag == "--report";
        match OUTPUT_FLAGS.contains(&flag) {
            true if flag == word => drop(words.next()),
            true => {}
            false => out.push(word),
        }
    }
    out.sort_unstable();
    (out, kept)
}

/// One line that can be pasted into a bug report.
pub fn summary_line(report: &Report) -> String {
    let note = diagnosis_note(report).map(|note| format!(" ({note})")).unwrap_or_default();
    let reference = match &report.reference {
        Some(reference) => format!(" vs {}", producer(reference)),
        None => String::new(),
    };
    format!(
        "parity {}: {}: {}{note} · {} · {}{reference} · {}",
        env!("CARGO_PKG_VERSION"),
        answer(report),
        because(report),
        model(&report.candidate),
        producer(&report.candidate),
        tokens(&report.candidate),
    )
}

/// `qwen2.5-coder-1.5b (qwen2)`
pub fn model(side: &Side) -> String {
    let model = &side.model;
    let name = model.file.as_deref().or(model.name.as_deref()).unwrap_or("unnamed model");
    match &model.architecture {
        Some(architecture) => printable(&format!("{name} ({architecture})")).into_owned(),
        None => printable(name).into_owned(),
    }
}

/// `llama.cpp 0.5.0 cpu, llama-cpu kv=f16 flash=on`
pub fn producer(side: &Side) -> String {
    let producer = &side.producer;
    let mut words = vec![if producer.name.is_empty() { "unnamed engine" } else { &producer.name }];
    words.extend([&producer.version, &producer.backend].into_iter().flatten().map(String::as_str));
    let words = words.join(" ");
    match &producer.numerics {
        Some(numerics) => printable(&format!("{words}, {numerics}")).into_owned(),
        None => printable(&words).into_owned(),
    }
}

/// `7 + 8 decoded tokens`
pub fn tokens(side: &Side) -> String {
    let prefill: usize = side.steps.iter().filter(|&&step| step > 1).sum();
    let decoded = side.tokens.saturating_sub(prefill);
    match (prefill, decoded) {
        (0, _) | (_, 0) => count(side.tokens, "token"),
        _ => format!("{} + {} decoded tokens", thousands(prefill as u64), thousands(decoded as u64)),
    }
}

/// The candidate's local error over what rounding explains.
pub fn over_bound(entry: &Entry) -> Option<f64> {
    entry.local.candidate.as_ref().map(|local| local.over_bound)
}

/// `1 node`, `3 nodes`, `14 580 nodes`
pub fn count(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", thousands(n as u64), if n == 1 { "" } else { "s" })
}

/// Digits in groups of three.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(ascii).collect();
    groups.join(" ")
}

fn ascii(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

/// Two significant digits: `0`, `0.41`, `2.6`, `17`, `5.3e-8`, `2.6e6`, `NaN`.
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !value.is_finite() {
        format!("{value}")
    } else if (99.5..1000.0).contains(&magnitude) {
        format!("{value:.0}")
    } else if (0.0995..99.5).contains(&magnitude) {
        let decimals = if magnitude < 0.995 { 2 } else { usize::from(magnitude < 9.95) };
        format!("{value:.decimals$}")
    } else {
        format!("{value:.1e}")
    }
}

/// Six significant digits, to tell values apart that differ little.
pub fn precise(value: f64) -> String {
    const DIGITS: i32 = 6;
    let magnitude = value.abs();
    if value == 0.0 || !(1e-4..1e6).contains(&magnitude) {
        return if value == 0.0 { "0".to_owned() } else { format!("{value:.*e}", DIGITS as usize - 1) };
    }
    let decimals = (DIGITS - 1 - magnitude.log10().floor() as i32).max(0) as usize;
    format!("{value:.decimals$}")
}

/// [`number`], and `–` for what was not measured.
pub fn number_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), number)
}

/// As many nines as are true, never rounded up to 100: `99.99999 %`, `87.3 %`.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    let decimals = match 100.0 - percent {
        rest if rest <= 0.0 => 0,
        rest => (1.0 - rest.log10()).ceil().clamp(1.0, 7.0) as usize,
    };
    let scale = 10f64.powi(decimals as i32);
    // The last digit is cut: 99.99999996 must not read 100.
    let digits = format!("{:.decimals$}", (percent * scale + 1e-6).floor() / scale);
    let short =
        if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { &digits };
    format!("{short} %")
}

/// A mistake that was tried and is not named: `rope.sign (87.3 %)`. What comes so near to all that it reads as if it were
/// the answer says what it leaves.
pub fn tried(tried: &Tried) -> String {
    // Squares of an error of which half a percent is left.
    const NEARLY_ALL: f64 = 1.0 - 0.005 * 0.005;
    match tried.explains >= NEARLY_ALL {
        true => {
            let left = (1.0 - tried.explains).max(f64::EPSILON).sqrt();
            format!("{} (near, but leaves {} of the error, more than rounding)", tried.fault, number(left))
        }
        false => format!("{} ({})", tried.fault, percent(tried.explains)),
    }
}

/// `[3, 17]`
pub fn index(index: &[usize]) -> String {
    let words: Vec<String> = index.iter().map(ToString::to_string).collect();
    format!("[{}]", words.join(", "))
}

/// Breaks `text` into lines of at most `width` characters where it has spaces, but not before a `%`.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let tail =
            words.peek().filter(|next| next.starts_with('%')).map_or(0, |next| 1 + next.chars().count());
        match lines.last_mut() {
            Some(line)
                if word.starts_with('%')
                    || line.chars().count() + 1 + word.chars().count() + tail <= width =>
            {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn numbers_have_two_digits() {
        let cases = [
            (0.0, "0"),
            (0.4, "0.40"),
            (2.64, "2.6"),
            (17.3, "17"),
            (99.7, "100"),
            (412.0, "412"),
            (5.31e-8, "5.3e-8"),
            (2.6e6, "2.6e6"),
            (-0.02, "-2.0e-2"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
        assert_eq!(number(f64::NAN), "NaN");
    }

    #[test]
    fn percent_never_rounds_up_to_all() {
        assert_eq!(percent(0.999_999_9), "99.99999 %");
        assert_eq!(percent(0.873), "87.3 %");
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.999_999_999_999), "99.9999999 %");
        assert_eq!([percent(0.0), percent(0.8)], ["0 %", "80 %"]);
    }

    #[test]
    fn what_is_not_named_does_not_read_as_the_answer() {
        let of = |explains| tried(&Tried { fault: "rope.sign".into(), explains });
        assert_eq!(of(0.873), "rope.sign (87.3 %)");
        let near = "rope.sign (near, but leaves 1.0e-5 of the error, more than rounding)";
        assert_eq!(of(1.0 - 1e-10), near);
        assert!(!of(1.0).contains("100 %") && of(f64::NAN).contains("NaN"));
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(thousands(1_234_567), "1 234 567");
        assert_eq!(count(1, "node"), "1 node");
    }
}
