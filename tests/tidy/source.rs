//! Rust sources, read far enough to check rules on them: comments and strings apart, tests cut away.

use std::path::{Path, PathBuf};

/// One file.
pub struct Source {
    /// Relative to the repository, with `/`.
    pub path: String,
    /// The whole text.
    pub text: String,
    /// The text without tests, with comments and the insides of strings as spaces; lines stay where they are.
    pub code: String,
    /// Strings outside tests, with the number of their line.
    pub strings: Vec<(usize, String)>,
}

/// All files below folders of the repository that have an extension, in the order of their paths.
pub fn files(folders: &[&str], extensions: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open: Vec<PathBuf> = folders.iter().map(|folder| root.join(folder)).collect();
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if extensions.iter().any(|wanted| path.extension().is_some_and(|found| found == *wanted)) {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
                files.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

impl Source {
    pub fn new(path: String, text: String) -> Source {
        let (mut code, mut strings) = lex(&text);
        for (start, end) in test_items(&code) {
            strings.retain(|(at, _)| !(start..end).contains(at));
            code[start..end].iter_mut().filter(|c| **c != '\n').for_each(|c| *c = ' ');
        }
        let line = |at: usize| code[..at].iter().filter(|c| **c == '\n').count() + 1;
        let strings = strings.into_iter().map(|(at, string)| (line(at), string)).collect();
        Source { path, text, code: code.into_iter().collect(), strings }
    }

    /// Where a word stands in the code, as numbers of lines.
    pub fn lines_with(&self, word: &str) -> Vec<usize> {
        let whole = |line: &str| {
            line.match_indices(word).any(|(at, _)| {
                let (before, after) =
                    (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
                let open = |c: Option<char>, edge: Option<char>| !(is_word(c) && is_word(edge));
                open(before, word.chars().next()) && open(after, word.chars().next_back())
            })
        };
        self.code.lines().enumerate().filter(|(_, line)| whole(line)).map(|(index, _)| index + 1).collect()
    }

    /// Names, first lines and numbers of lines of all functions.
    pub fn functions(&self) -> Vec<(String, usize, usize)> {
        let code: Vec<char> = self.code.chars().collect();
        let mut functions = Vec::new();
        for at in 0..code.len() {
            let keyword =
                code[at..].starts_with(&['f', 'n', ' ']) && !is_word(at.checked_sub(1).map(|i| code[i]));
            let name: String = code[at..].iter().skip(3).take_while(|c| is_word(Some(**c))).collect();
            if keyword
                && !name.is_empty()
                && let Some(end) = item_end(&code, at)
            {
                let lines = |range: &[char]| range.iter().filter(|c| **c == '\n').count() + 1;
                functions.push((name, lines(&code[..at]), lines(&code[at..end])));
            }
        }
        functions
    }

    /// Top-level modules of the crate that the code names: `crate::NAME` and `crate::{NAME, …}`.
    pub fn modules_named(&self) -> Vec<String> {
        let mut names = Vec::new();
        for (at, found) in self.code.match_indices("crate::") {
            if !is_word(self.code[..at].chars().next_back()) {
                let rest: String = self.code[at + found.len()..].split_whitespace().collect();
                match rest.strip_prefix('{') {
                    None => names.push(word_at(&rest)),
                    Some(list) => names.extend(list_heads(list)),
                }
            }
        }
        names
    }
}

fn is_word(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

fn word_at(text: &str) -> String {
    text.chars().take_while(|c| is_word(Some(*c))).collect()
}

/// First words of the entries of a `use` list, up to its closing brace.
fn list_heads(list: &str) -> Vec<String> {
    let mut heads = vec![word_at(list)];
    let mut depth = 0;
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(word_at(&list[at + 1..])),
            _ => {}
        }
    }
    heads.retain(|head| !head.is_empty());
    heads
}

/// The code with comments and strings blanked, and the strings with the places where they begin.
fn lex(text: &str) -> (Vec<char>, Vec<(usize, String)>) {
    let chars: Vec<char> = text.chars().collect();
    let mut code = chars.clone();
    let mut strings = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        let after_word = is_word(at.checked_sub(1).map(|i| chars[i]));
        let (len, string) = match rest {
            ['/', '/', ..] => (rest.iter().take_while(|c| **c != '\n').count(), None),
            ['/', '*', ..] => (block_comment(rest), None),
            ['"', ..] => quoted(rest),
            ['r', '"' | '#', ..] if !after_word => raw_string(rest),
            ['b', 'r', '"' | '#', ..] if !after_word => {
                let (len, string) = raw_string(&rest[1..]);
                (if len == 0 { 0 } else { len + 1 }, string)
            }
            ['\'', '\\', _, ..] => (rest.iter().skip(3).take_while(|c| **c != '\'').count() + 4, None),
            ['\'', _, '\'', ..] => (3, None),
            _ => (0, None),
        };
        let len = len.min(rest.len());
        code[at..at + len].iter_mut().filter(|c| **c != '\n').for_each(|c| *c = ' ');
        strings.extend(string.map(|string| (at, string)));
        at += len.max(1);
    }
    (code, strings)
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] if depth == 1 => return at + 2,
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn quoted(rest: &[char]) -> (usize, Option<String>) {
    let mut at = 1;
    while at < rest.len() && rest[at] != '"' {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1, Some(rest[1..at.min(rest.len())].iter().collect()))
}

/// `r"…"` and `r#"…"#`; nothing where it is a raw identifier.
fn raw_string(rest: &[char]) -> (usize, Option<String>) {
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return (0, None);
    }
    let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let inside = &rest[2 + hashes..];
    let len = inside.windows(close.len()).position(|w| w == close).unwrap_or(inside.len());
    (2 + hashes + len + close.len(), Some(inside[..len].iter().collect()))
}

/// Stretches of code that are built for tests only.
fn test_items(code: &[char]) -> Vec<(usize, usize)> {
    let mut items = Vec::new();
    let marks: [Vec<char>; 2] = ["#[cfg(test)]", "#[test]"].map(|mark| mark.chars().collect());
    let mut at = 0;
    while at < code.len() {
        let mark = marks.iter().find(|mark| code[at..].starts_with(mark));
        match mark.and_then(|mark| item_end(code, at + mark.len())) {
            Some(end) => {
                items.push((at, end));
                at = end;
            }
            None => at += 1,
        }
    }
    items
}

/// The end of the item that begins here: its closing brace, or a semicolon before any brace.
fn item_end(code: &[char], start: usize) -> Option<usize> {
    let (mut braces, mut others) = (0i32, 0i32);
    for (at, c) in code.iter().enumerate().skip(start) {
        match c {
            '(' | '[' => others += 1,
            ')' | ']' => others -= 1,
            '{' => braces += 1,
            '}' if braces <= 1 => return Some(at + 1),
            '}' => braces -= 1,
            ';' if braces == 0 && others == 0 => return Some(at + 1),
            _ => {}
        }
    }
    None
}
