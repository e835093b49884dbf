//! Which token rows are audited: all, or a sample that a large run can afford.

use std::fmt;
use std::str::FromStr;

use parity_dump::manifest::Step;

/// How many token rows are audited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditRows {
    /// Every one.
    All,
    /// At most so many: the first and the last, the first of every step, others spread between them.
    Sample(usize),
    /// The same rows and no others, where it is only asked whether an arithmetic explains a node: what is wrong in a sample is
    /// not looked at in all rows.
    Only(usize),
}

impl Default for AuditRows {
    fn default() -> Self {
        AuditRows::Sample(SAMPLE)
    }
}

/// Rows of the default sample: the others are screened, and audited where one is suspicious.
const SAMPLE: usize = 4;

impl fmt::Display for AuditRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AuditRows::All => f.write_str("all"),
            AuditRows::Sample(count) | AuditRows::Only(count) => write!(f, "{count}"),
        }
    }
}

impl FromStr for AuditRows {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(AuditRows::All),
            _ => match text.parse() {
                Ok(count) if count > 0 => Ok(AuditRows::Sample(count)),
                _ => Err(format!("`{text}` is neither `all` nor a number of rows")),
            },
        }
    }
}

impl AuditRows {
    /// The sample alone, as [`AuditRows::Only`] has it.
    pub fn only(self) -> AuditRows {
        match self {
            AuditRows::Sample(count) => AuditRows::Only(count),
            other => other,
        }
    }

    /// How many rows are judged in full.
    pub fn count(self) -> usize {
        match self {
            AuditRows::All => usize::MAX,
            AuditRows::Sample(count) | AuditRows::Only(count) => count,
        }
    }

    /// Whether a node that is wrong in the sample is judged in all rows: a diagnosis wants to know which are.
    pub fn are_followed(self) -> bool {
        !matches!(self, AuditRows::Only(_))
    }

    /// Positions that are audited of a recording in `steps`, ascending.
    pub fn positions(self, steps: &[Step]) -> Vec<u32> {
        let mut all: Vec<u32> = steps.iter().flat_map(|step| step.positions.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        match self {
            AuditRows::All => all,
            AuditRows::Sample(count) | AuditRows::Only(count) if all.len() <= count => all,
            AuditRows::Sample(count) | AuditRows::Only(count) => sample(&all, steps, count),
        }
    }
}

/// `count` of `all`, the most telling first.
fn sample(all: &[u32], steps: &[Step], count: usize) -> Vec<u32> {
    let starts = steps.iter().filter_map(|step| step.positions.iter().min().copied());
    let ends = steps.iter().filter_map(|step| step.positions.iter().max().copied());
    let mut chosen: Vec<u32> = Vec::with_capacity(count);
    // Both ends of the run, the last row of the prompt and the first decoded one, where masks, positions and
    // the cache go wrong, the second row, then rows at ever finer fractions of the whole.
    let mut wanted: Vec<u32> = vec![all[0], all[all.len() - 1]];
    wanted.extend(ends.clone().next());
    wanted.extend(starts.clone().nth(1));
    wanted.extend(all.get(1));
    let mut parts = 2;
    while wanted.len() < 4 * count + 8 {
        wanted.extend((1..parts).map(|part| all[part * (all.len() - 1) / parts]));
        parts += 1;
    }
    for position in wanted {
        if chosen.len() < count && !chosen.contains(&position) {
            chosen.push(position);
        }
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(lengths: &[u32]) -> Vec<Step> {
        let mut start = 0;
        lengths
            .iter()
            .map(|&length| {
                start += length;
                Step { file: String::new(), positions: (start - length..start).collect(), ..Step::default() }
            })
            .collect()
    }

    #[test]
    fn a_sample_has_both_ends_and_the_seam_to_decoding() {
        let sample = AuditRows::Sample(6).positions(&steps(&[290, 1, 1]));
        assert_eq!(sample.len(), 6);
        for position in [0, 1, 289, 290, 291] {
            assert!(sample.contains(&position), "{position} is missing in {sample:?}");
        }
    }

    #[test]
    fn few_rows_are_all_audited() {
        assert_eq!(AuditRows::Sample(6).positions(&steps(&[3, 1])), [0, 1, 2, 3]);
        assert_eq!(AuditRows::All.positions(&steps(&[9])).len(), 9);
        assert_eq!(AuditRows::Sample(1).positions(&steps(&[9])), [0]);
    }
}
