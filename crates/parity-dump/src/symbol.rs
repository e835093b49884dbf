//! Names beyond the fixed ids, kept once for the whole process so that an id stays small and `Copy`.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Bytes of the longest name. ggml's own names have at most 63.
pub const NAME_MAX: usize = 80;
/// How many names a process keeps. The largest graphs known have some hundreds.
const SYMBOLS_MAX: usize = 1 << 18;

static SYMBOLS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// A name of letters, digits, `_`, `-`, `.` and `#`. Ordered as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Symbol(&'static str);

impl Symbol {
    /// The symbol of a name; `None` where it is empty, too long, or has other characters.
    pub fn new(name: &str) -> Option<Symbol> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.#".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(plain) {
            return None;
        }
        let mut symbols = SYMBOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = symbols.get(name) {
            return Some(Symbol(known));
        }
        if symbols.len() >= SYMBOLS_MAX {
            return None;
        }
        let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
        symbols.insert(kept);
        Some(Symbol(kept))
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once() {
        let (a, b) = (Symbol::new("ffn_moe_probs#2").unwrap(), Symbol::new("ffn_moe_probs#2").unwrap());
        assert!(std::ptr::eq(a.name(), b.name()));
        assert_ne!(Symbol::new("ffn_moe_probs"), Some(a));
    }

    #[test]
    fn what_could_not_be_written_everywhere_is_no_name() {
        let long = "x".repeat(NAME_MAX + 1);
        for name in ["", " ", "a b", "a/b", "a\"b", "é", "a\n", &long] {
            assert_eq!(Symbol::new(name), None, "{name:?}");
        }
        assert!(Symbol::new(&long[1..]).is_some());
    }
}
