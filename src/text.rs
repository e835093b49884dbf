//! Text that comes from files and goes to people: shown so that it can only be read.

use std::borrow::Cow;
use std::io::Write;

/// Whether a character moves the cursor, changes colours, hides or reorders text: C0 and C1 controls, line and
/// paragraph separators, marks of writing direction.
fn is_hidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Foreign text on one line: what would not be read but obeyed is spelt out, `\u{1b}` for an escape.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let spelt = |c: char| if is_hidden(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(spelt).collect())
}

/// Foreign text of several lines: as [`printable`], but for the ends of lines.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    if !text.contains(|c| is_hidden(c) && c != '\n') {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.split('\n').map(printable).collect::<Vec<_>>().join("\n"))
}

/// Says something on standard error, if there is anything to say. Whether anybody is there to read it decides
/// nothing.
pub fn tell(text: impl std::fmt::Display) {
    let text = text.to_string();
    if !text.is_empty() {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// What GitHub Actions would take for a command of ours at the start of a line.
const COMMANDS: [&str; 2] = ["::", "##["];

/// Output whose lines are no commands to GitHub Actions' runner, whatever a file made them say: those that would be
/// begin with a bar.
pub fn without_commands(text: &str) -> Cow<'_, str> {
    let is_command = |line: &str| COMMANDS.iter().any(|command| line.trim_start().starts_with(command));
    if !text.lines().any(is_command) {
        return Cow::Borrowed(text);
    }
    let lines = text
        .split_inclusive('\n')
        .map(|line| if is_command(line) { format!("| {line}") } else { line.to_owned() });
    Cow::Owned(lines.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_obeyed_is_spelt_out() {
        assert_eq!(printable("qwen2 · 4 layers"), "qwen2 · 4 layers");
        assert_eq!(printable("\u{1b}[31mred\u{7}\n::error::x"), r"\u{1b}[31mred\u{7}\n::error::x");
        assert_eq!(printable("a\u{9b}31m\u{202e}b"), r"a\u{9b}31m\u{202e}b");
        assert_eq!(printable_lines("a\r\nb"), "a\\r\nb");
    }

    #[test]
    fn no_line_is_a_command_to_a_runner() {
        assert_eq!(without_commands("a\nb ::c\n"), "a\nb ::c\n");
        assert_eq!(without_commands("a\n ::error::x\n##[set-env]y"), "a\n|  ::error::x\n| ##[set-env]y");
    }
}
