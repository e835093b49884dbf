//! Numbers and sources in which two runs of one model differ: which key of the file holds them, and which flag set them.

use std::ffi::OsString;

use crate::gguf::Gguf;
use crate::model::diff::{Aspect, Group, Whose};
use crate::report::Finding;

/// A difference of two runs as a finding; `commands` are those of the candidate and the reference.
pub fn finding(group: &Group, gguf: &Gguf, [candidate, reference]: [&[OsString]; 2]) -> Finding {
    let has = |side: Whose| {
        let found = group.has.iter().find(|(known, _)| *known == side);
        found.and_then(|(_, value)| value.clone())
    };
    let (key, flags) = match &group.aspect {
        Aspect::Number(parameter) => (parameter.key, parameter.flags),
        _ => (None, &[][..]),
    };
    let key = key.map(|key| {
        let architecture = gguf.str("general.architecture").ok().flatten().unwrap_or_default();
        format!("{architecture}.{key}")
    });
    let mut effect = vec![said(group, &has)];
    if let Some(key) = &key {
        effect.push(format!("the file's key is {key}"));
    }
    let set = |name: &str, command: &[OsString]| {
        flag_of(command, flags, key.as_deref()).map(|flag| format!("{flag} of {name} sets it"))
    };
    let by_flag: Vec<String> = [set("A", reference), set("B", candidate)].into_iter().flatten().collect();
    effect.push(match by_flag.is_empty() {
        true => "no flag of either command asks for it".to_owned(),
        false => by_flag.join(", "),
    });
    Finding {
        name: key.map_or_else(|| "graph".to_owned(), |key| format!("config.{key}")),
        location: group.nodes.first().map(ToString::to_string).unwrap_or_default(),
        original: has(Whose::Reference),
        converted: has(Whose::Candidate),
        effect: effect.join("; "),
    }
}

/// Who has what, in the words of two sides.
fn said(group: &Group, has: &dyn Fn(Whose) -> Option<String>) -> String {
    let value = |side: Whose| has(side).unwrap_or_else(|| "nothing".to_owned());
    let what = match &group.aspect {
        Aspect::Number(parameter) => parameter.words.to_owned(),
        Aspect::Source(slot) => format!("source {slot}"),
        _ => "the graph".to_owned(),
    };
    let node = group.nodes.first().map(ToString::to_string).unwrap_or_default();
    let more = match group.nodes.len() {
        0 | 1 => String::new(),
        n => format!(" and {} more nodes", n - 1),
    };
    let file = match group.has.iter().any(|(side, _)| *side == Whose::File) {
        true => format!(", {} by the file", value(Whose::File)),
        false => String::new(),
    };
    format!(
        "{what} of {node}{more} is {} in A and {} in B{file}",
        value(Whose::Reference),
        value(Whose::Candidate)
    )
}

/// The flag of a command that sets a number: one of its own, or an override of its key.
fn flag_of(command: &[OsString], flags: &[&str], key: Option<&str>) -> Option<String> {
    let words: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let at = words.iter().position(|word| {
        let flag = word.split_once('=').map_or(word.as_str(), |(flag, _)| flag);
        flags.contains(&flag)
    });
    let own = at.map(|at| match words.get(at + 1) {
        Some(value) if !words[at].contains('=') => format!("{} {value}", words[at]),
        _ => words[at].clone(),
    });
    own.or_else(|| {
        let overridden =
            words.iter().find(|word| key.is_some_and(|key| word.starts_with(&format!("{key}="))));
        overridden.map(|word| format!("--override-kv {word}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_found_with_its_value_and_so_is_an_override() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let of = |text: &str| flag_of(&words(text), &["--rope-freq-base"], Some("qwen2.rope.freq_base"));
        assert_eq!(of("x --rope-freq-base 10000 -n 1").as_deref(), Some("--rope-freq-base 10000"));
        assert_eq!(of("x --rope-freq-base=10000").as_deref(), Some("--rope-freq-base=10000"));
        let overridden = of("x --override-kv qwen2.rope.freq_base=float:10000");
        assert_eq!(overridden.as_deref(), Some("--override-kv qwen2.rope.freq_base=float:10000"));
        assert_eq!(of("x -n 1"), None);
    }
}
