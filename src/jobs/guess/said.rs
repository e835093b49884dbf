//! The answer as data and as text.

use std::fmt::Write as _;

use serde::Serialize;

use super::Known;
use super::answer::{Answer, Tried, unseen};
use super::discriminate::Apart;
use super::evidence::{Evidence, way_of};
use super::hypotheses::{HEALTHY, Hypothesis, Layers, Rows};
use crate::report::words::{count, number};
use crate::report::{Diagnosis, Verdict};
use crate::text::printable;

/// Hypotheses that are listed.
const LISTED: usize = 20;
/// Those that people are shown.
const SHOWN: usize = 5;

const SCHEMA: &str = "parity-guess/1";

/// The answer of `parity guess`, as `--format json` prints it.
#[derive(Serialize)]
pub struct Guess {
    schema: &'static str,
    /// A name of the catalogue, `healthy`, `tokens.*`; nothing where none explains the output, or several do.
    pub answer: Option<String>,
    /// Other names of the same thing on this model.
    aliases: Vec<String>,
    /// What was found, in a sentence.
    text: String,
    /// What was seen.
    evidence: Seen,
    /// Mistakes that a healthy output excludes.
    excluded: Option<Share>,
    /// Those that it does not: they may be there all the same.
    unseen: Vec<String>,
    /// The first row that a healthy engine does not explain.
    healthy_until: Option<usize>,
    /// What to type or look at next.
    next: Vec<String>,
    /// A prompt that tells apart what the output does not, where it was asked for and found.
    discriminate: Option<Apart>,
    /// Best first.
    hypotheses: Vec<Said>,
    /// How many were tried.
    tried: usize,
    /// What was not.
    pub notes: Vec<String>,
}

#[derive(Serialize)]
struct Seen {
    kind: &'static str,
    /// Tokens in front of it.
    prompt: usize,
    rows: usize,
}

#[derive(Serialize)]
struct Share {
    count: usize,
    of: usize,
}

/// One hypothesis.
#[derive(Serialize)]
struct Said {
    name: String,
    inject: Option<String>,
    aliases: Vec<String>,
    layers: Layers,
    rows: Rows,
    /// Of the rows that it was given.
    share: f64,
    hits: usize,
    of: usize,
    log_likelihood: Option<f64>,
    distance: Option<f64>,
    /// The arithmetic in which it explains most.
    arithmetic: &'static str,
    text: String,
}

impl Guess {
    /// Takes a prompt that tells the first so many hypotheses apart, if there is one.
    pub fn apart(&mut self, found: Option<Apart>, which: usize) {
        let Some(apart) = found else {
            self.next = vec![format!(
                "none of the prompts that were tried tells the first {which} apart; logits may: --logits"
            )];
            return;
        };
        let mut says: Vec<(String, Vec<&str>)> = Vec::new();
        for one in &apart.says {
            let text = one.text.as_ref().map_or(String::new(), |text| format!(" ({text:?})"));
            let token = format!("{}{text}", one.token);
            match says.iter_mut().find(|(known, _)| *known == token) {
                Some((_, names)) if names.contains(&one.name.as_str()) => {}
                Some((_, names)) => names.push(&one.name),
                None => says.push((token, vec![&one.name])),
            }
        }
        let says = says.iter().map(|(token, names)| format!("{token} of {}", names.join(", ")));
        let ids: Vec<String> = apart.tokens.iter().map(u32::to_string).collect();
        let prompt = apart.text.as_ref().map_or(String::new(), |text| format!(" ({text:?})"));
        let said = says.collect::<Vec<_>>().join("; ");
        self.next = vec![format!("ask it to go on behind tokens {}{prompt}: it says {said}", ids.join(","))];
        self.discriminate = Some(apart);
    }

    /// 0 healthy, 1 a mistake explains it, 2 nothing does.
    pub fn verdict(&self) -> Verdict {
        match self.answer.as_deref() {
            Some(HEALTHY) => Verdict::Parity,
            Some(_) => Verdict::Divergence,
            None => Verdict::Undecided,
        }
    }
}

/// What an audit of hidden states found.
pub struct Named {
    pub answer: Option<String>,
    pub text: String,
    pub layer: Option<u32>,
    pub diagnosis: Vec<Diagnosis>,
    pub next: Vec<String>,
}

/// The answer that an audit of hidden states of so many positions gives.
pub fn of_audit(found: Named, rows: usize) -> Guess {
    let layers = found.layer.map_or(Layers::All, Layers::One);
    let of_fault = |one: Diagnosis| Said {
        name: one.fault,
        inject: None,
        aliases: Vec::new(),
        layers,
        rows: Rows::All,
        share: one.explains,
        hits: rows,
        of: rows,
        log_likelihood: None,
        distance: Some((1.0 - one.explains).max(0.0).sqrt()),
        arithmetic: "the dump's",
        text: one.text,
    };
    Guess {
        schema: SCHEMA,
        answer: found.answer,
        aliases: Vec::new(),
        text: found.text,
        evidence: Seen { kind: "hidden states", prompt: rows, rows },
        excluded: None,
        unseen: Vec::new(),
        healthy_until: None,
        next: found.next,
        discriminate: None,
        tried: found.diagnosis.len(),
        notes: Vec::new(),
        hypotheses: found.diagnosis.into_iter().map(of_fault).collect(),
    }
}

/// The answer of healthy ones, each about another part of what was seen.
pub fn joined(all: Vec<Guess>) -> Option<Guess> {
    all.into_iter().reduce(|mut all, one| {
        all.tried += one.tried;
        all.excluded = all.excluded.zip(one.excluded).map(|(Share { count, of }, more)| Share {
            count: count + more.count,
            of: of + more.of,
        });
        all.unseen.extend(one.unseen);
        if let Some(Share { count, of }) = &all.excluded {
            all.text = format!(
                "HEALTHY: every hidden state follows from the one before it; {count} of {of} known mistakes would have shown"
            );
        }
        all
    })
}

/// Puts an answer into words; `tried` is sorted.
pub fn said(known: &Known<'_>, evidence: &dyn Evidence, answer: &Answer, tried: &[Tried]) -> Guess {
    let first: Vec<usize> = match answer {
        Answer::Mistake(best) => vec![*best],
        Answer::Several(all) => all.clone(),
        Answer::Healthy => tried
            .iter()
            .position(|one| one.hypothesis.name == HEALTHY && one.explains())
            .into_iter()
            .collect(),
        Answer::Nothing => Vec::new(),
    };
    let others = (0..tried.len()).filter(|i| !first.contains(i));
    let order: Vec<&Tried> = first.iter().copied().chain(others).map(|i| &tried[i]).collect();
    let healthy = || tried.iter().filter(|one| one.hypothesis.name == HEALTHY);
    let best_healthy = healthy().max_by(|a, b| a.score.hits.cmp(&b.score.hits));
    let named = first.first().map(|&i| &tried[i]);
    let is_named = matches!(answer, Answer::Mistake(_) | Answer::Healthy);
    Guess {
        schema: SCHEMA,
        answer: named.filter(|_| is_named).map(|one| one.hypothesis.name.clone()),
        aliases: named.filter(|_| is_named).map(|one| one.hypothesis.aliases.clone()).unwrap_or_default(),
        text: sentence(answer, tried, evidence),
        evidence: Seen { kind: evidence.kind(), prompt: known.prompt.len(), rows: evidence.rows() },
        excluded: (*answer == Answer::Healthy).then(|| excluded(tried)),
        unseen: match answer {
            Answer::Healthy => spelt(tried),
            _ => Vec::new(),
        },
        healthy_until: best_healthy.and_then(|one| one.score.first_miss),
        next: next(known, answer, tried),
        discriminate: None,
        hypotheses: order.iter().take(LISTED).map(|one| of_tried(one)).collect(),
        tried: tried.len(),
        notes: Vec::new(),
    }
}

fn of_tried(one: &Tried) -> Said {
    let (h, score) = (&one.hypothesis, &one.score);
    Said {
        name: h.name.clone(),
        inject: h.spelling.clone(),
        aliases: h.aliases.clone(),
        layers: h.layers,
        rows: h.rows,
        share: score.share(),
        hits: score.hits,
        of: score.of,
        log_likelihood: Some(score.log_likelihood).filter(|x| x.is_finite()),
        distance: score.distance.filter(|x| x.is_finite()),
        arithmetic: way_of(score).name,
        text: h.text.clone(),
    }
}

/// How many mistakes a healthy answer excludes, of those that were tried.
fn excluded(tried: &[Tried]) -> Share {
    let of = tried.iter().filter(|one| one.hypothesis.name != HEALTHY).count();
    Share { count: of - unseen(tried).count(), of }
}

/// The mistakes that it does not exclude, each once, with where it would be made.
fn spelt(tried: &[Tried]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for one in unseen(tried) {
        let Hypothesis { name, aliases, layers, rows, .. } = &one.hypothesis;
        let place = match (layers, rows) {
            (Layers::All, Rows::All) => String::new(),
            (Layers::One(layer), Rows::All) => format!("@{layer}"),
            _ => place(one),
        };
        for name in std::iter::once(name).chain(aliases) {
            let spelling = format!("{name}{place}");
            if !all.contains(&spelling) {
                all.push(spelling);
            }
        }
    }
    all
}

fn hits(one: &Tried) -> String {
    format!("{} of {}", one.score.hits, one.score.of)
}

fn place(one: &Tried) -> String {
    let layers = match one.hypothesis.layers {
        Layers::All => String::new(),
        Layers::First => " in the first layer alone".to_owned(),
        Layers::Last => " in the last layer alone".to_owned(),
        Layers::Odd => " in every second layer, from layer 1 on".to_owned(),
        Layers::Even => " in every second layer, from layer 0 on".to_owned(),
        Layers::One(layer) => format!(" in layer {layer} alone"),
    };
    let rows = match one.hypothesis.rows {
        Rows::All => "",
        Rows::Prefill => " in the prefill alone",
        Rows::Decode => " in decode steps alone",
    };
    layers + rows
}

fn sentence(answer: &Answer, tried: &[Tried], evidence: &dyn Evidence) -> String {
    let unit = if ["logits", "hidden states"].contains(&evidence.kind()) { "rows" } else { "tokens" };
    let healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY).max_by_key(|one| one.score.hits);
    let of_healthy = healthy.map(hits).unwrap_or_default();
    let next = |name: &str| {
        let looked_at = tried.iter().filter(|one| one.score.of > 0);
        let others = looked_at.filter(|one| ![name, HEALTHY].contains(&one.hypothesis.name.as_str()));
        let order = |one: &&Tried| (one.score.share(), one.score.log_likelihood);
        let best = others.max_by(|a, b| {
            let (a, b) = (order(a), order(b));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        best.map(|one| format!("; next: {} {}", one.hypothesis.name, hits(one))).unwrap_or_default()
    };
    match answer {
        Answer::Healthy => {
            let (Share { count, of }, open) = (excluded(tried), spelt(tried));
            let few = open.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
            let more = if open.len() > SHOWN { ", …" } else { "" };
            let but = if open.is_empty() { String::new() } else { format!(", {few}{more} would not") };
            format!(
                "HEALTHY: {of_healthy} {unit} are what the model says; {count} of {of} known mistakes would have shown in them{but}"
            )
        }
        Answer::Mistake(best) => {
            let one = &tried[*best];
            format!(
                "{}{}: {} (explains {} {unit}; healthy {of_healthy}{})",
                one.hypothesis.name,
                place(one),
                one.hypothesis.text,
                hits(one),
                next(&one.hypothesis.name)
            )
        }
        Answer::Several(all) => {
            format!(
                "UNDECIDED between {}: the output does not tell them apart (healthy {of_healthy} {unit})",
                names(all.iter().map(|&i| &tried[i])).join(", ")
            )
        }
        Answer::Nothing if tried.iter().any(Tried::explains) => {
            let all = names(tried.iter().filter(|one| one.explains()));
            let more = if all.len() > SHOWN { ", …" } else { "" };
            format!(
                "UNDECIDED: {}{more}: each explains all {} {unit}, but a healthy engine {of_healthy}: of {} hypotheses \
                 one may be so much better by chance",
                all[..all.len().min(SHOWN)].join(", "),
                evidence.rows(),
                tried.len()
            )
        }
        Answer::Nothing => {
            let from = healthy.and_then(|one| one.score.first_miss).map_or(String::new(), |row| {
                format!("; a healthy engine's fails from {} {} on", unit.trim_end_matches('s'), row)
            });
            format!("UNDECIDED: none of {} hypotheses explains the output{from}{}", tried.len(), next(""))
        }
    }
}

/// The names of hypotheses, and of what is the same on this model, each once.
fn names<'t>(which: impl Iterator<Item = &'t Tried>) -> Vec<&'t str> {
    let mut out: Vec<&str> = Vec::new();
    for one in which {
        let Hypothesis { name, aliases, .. } = &one.hypothesis;
        for name in std::iter::once(name).chain(aliases) {
            if !out.contains(&name.as_str()) {
                out.push(name);
            }
        }
    }
    out
}

fn next(known: &Known<'_>, answer: &Answer, tried: &[Tried]) -> Vec<String> {
    let model = known.gguf.path().display();
    let ids: Vec<String> = known.prompt.iter().map(ToString::to_string).collect();
    let ids = ids.join(",");
    match answer {
        Answer::Mistake(best) => {
            let inject = tried[*best].hypothesis.injected().map(|s| format!("see it in parity's own engine: parity run -m {model} --tokens {ids} --inject {s}"));
            inject.into_iter().collect()
        }
        Answer::Several(_) => vec![
            "--discriminate looks for a prompt that tells them apart; a longer output may, too".to_owned(),
        ],
        Answer::Nothing if tried.iter().any(Tried::explains) => {
            vec!["a longer output tells more, and so do --logits and --logprobs".to_owned()]
        }
        Answer::Nothing => vec![
            "the one tensor to dump next: the layer outputs of the prompt (hidden states), for --hidden; they name the layer".to_owned(),
        ],
        Answer::Healthy => Vec::new(),
    }
}

/// For people.
pub fn render(guess: &Guess) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", printable(&guess.text));
    if !guess.aliases.is_empty() {
        let _ = writeln!(out, "  the same on this model: {}", guess.aliases.join(", "));
    }
    for line in &guess.next {
        let _ = writeln!(out, "  next: {}", printable(line));
    }
    let _ = writeln!(
        out,
        "  {} hypotheses on {} of {}",
        guess.tried,
        count(guess.evidence.rows, "row"),
        guess.evidence.kind
    );
    for note in &guess.notes {
        let _ = writeln!(out, "  note: {}", printable(note));
    }
    let _ = writeln!(out);
    let _ = writeln!(out, "{:28} {:>9} {:>10} {:>9}", "hypothesis", "explained", "log-lik.", "distance");
    let mut healthy = 0;
    let shown = guess.hypotheses.iter().filter(|one| {
        healthy += usize::from(one.name == HEALTHY);
        one.name != HEALTHY || healthy == 1
    });
    for one in shown.take(SHOWN) {
        let name = one.inject.as_ref().unwrap_or(&one.name);
        let distance = one.distance.map_or("–".to_owned(), number);
        let likelihood = one.log_likelihood.map_or("–".to_owned(), |x| format!("{x:.1}"));
        let explained = format!("{}/{}", one.hits, one.of);
        let line =
            format!("{name:28} {explained:>9} {likelihood:>10} {distance:>9}  {}", printable(&one.text));
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}
