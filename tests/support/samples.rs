//! How much of the long tests is run: with `PARITY_TESTS=all`, as in `.ci/run`, all of it; else a sample of their cases.

use std::io::Write as _;
use std::sync::Once;

/// Whether all cases are to be run. Where not, that is said once, past the runner, which keeps what passing tests say.
pub fn is_all() -> bool {
    static SAID: Once = Once::new();
    let chosen = std::env::var("PARITY_TESTS").unwrap_or_default();
    assert!(matches!(&*chosen, "" | "all"), "PARITY_TESTS is `{chosen}`: `all`, or not set");
    if chosen.is_empty() {
        let said = "SAMPLE: of long tests some cases alone; PARITY_TESTS=all runs all of them\n";
        SAID.call_once(|| drop(std::io::stderr().write_all(said.as_bytes())));
    }
    chosen == "all"
}

/// So many of the cases of a test, from the first to the last of them; or all.
pub fn sample<T>(what: &str, count: usize, cases: impl IntoIterator<Item = T>) -> Vec<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let of = cases.len();
    if count >= of || is_all() {
        return cases;
    }
    eprintln!("SAMPLE: {count} of {of} {what}");
    let is_taken = |place: usize| place * count % of < count;
    cases.into_iter().enumerate().filter(|(place, _)| is_taken(*place)).map(|(_, case)| case).collect()
}
