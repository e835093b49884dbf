//! Annotations for GitHub Actions: lines that the runner shows beside the run.

use super::{Report, Verdict, finding, words};

/// Whether the process runs under GitHub Actions.
pub fn is_active() -> bool {
    std::env::var_os("GITHUB_ACTIONS").is_some_and(|value| value == "true")
}

/// Workflow commands, one per line; empty where there is nothing to say. `title` names the run.
pub fn render(report: &Report, title: &str) -> String {
    let mut out = String::new();
    match report.verdict {
        Verdict::Parity => {}
        Verdict::Divergence => out += &annotation("error", title, &message(report)),
        Verdict::Undecided => out += &annotation("error", title, &message(report)),
    }
    for note in &finding::notes(report) {
        out += &annotation("notice", title, note);
    }
    out
}

fn message(report: &Report) -> String {
    let mut message = format!("{}: {}", words::answer(report), words::because(report));
    if let Some(command) = words::next_commands(report).first() {
        message += &format!("\nnext: {command}");
    }
    message
}

/// One workflow command. Escapes are those of actions/toolkit `command.ts`.
pub fn annotation(level: &str, title: &str, message: &str) -> String {
    let data = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let title = data(title).replace(':', "%3A").replace(',', "%2C");
    format!("::{level} title={title}::{}\n", data(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_are_escaped() {
        assert_eq!(annotation("error", "a: b, c", "50 %\nx"), "::error title=a%3A b%2C c::50 %25%0Ax\n");
    }
}
