//! What was seen of an engine's output, and how well logits explain it. One file per kind.

mod chosen;
mod drawn;
mod logits;
mod said;
mod spelling;

pub use chosen::Chosen;
pub use drawn::{Drawn, Sampling};
pub use logits::Logits;
pub use said::SaidRows;
pub use spelling::Spelling;

use crate::jobs::guess::ways::{WAYS, Way};
use crate::ops::bound::CONFIDENCE;
use crate::random;

/// How many times more noise than the coarsest arithmetic leaves is tried where nothing known explains a healthy output:
/// by powers of two, up to logits that say nothing.
pub const DOUBLINGS: i32 = 12;

/// Probability that a token comes from something that nobody thought of, of any token alike.
const UNTHOUGHT: f64 = 1e-3;

/// What was seen.
pub trait Evidence: Sync {
    /// As a reader knows it: `tokens`, `logits`.
    fn kind(&self) -> &'static str;

    /// Rows of logits that it is about, at positions one behind the other.
    fn rows(&self) -> usize;

    /// Position of the first of them.
    fn first(&self) -> usize;

    /// The log-likelihood of logits that explain all of it.
    fn ceiling(&self, noise: &Noise) -> f64;

    /// How well the first rows of logits (n, V) explain it.
    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score;

    /// By what logits have to be multiplied to come nearest, of numbers alone.
    fn factor(&self, _logits: &[f32]) -> Option<f64> {
        None
    }

    /// A text of as many tokens as these in which the token of a row is another one, as [`Score::otherwise`] says.
    fn respelt(&self, _row: usize, _token: u32) -> Option<Box<dyn Evidence>> {
        None
    }

    /// Tokens that were seen behind the prompt.
    fn tokens(&self) -> &[u32] {
        &[]
    }
}

/// How far the rounding of each arithmetic moves a healthy model's logits.
pub struct Noise {
    /// V
    pub width: usize,
    /// By arithmetic of [`WAYS`] and row: root mean square over a row, absolute.
    pub by_way: Vec<Vec<f64>>,
    /// By row: root mean square of exact logits.
    pub size: Vec<f64>,
    /// By arithmetic: how far [`Score::digest`] lies from that of exact arithmetic.
    pub digests: Vec<f64>,
    /// How often more noise is tried than any arithmetic leaves, twice as much each time: for a healthy engine alone.
    pub doublings: i32,
}

/// How well logits explain what was seen.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// Rows that are explained.
    pub hits: usize,
    /// Rows that were looked at.
    pub of: usize,
    /// Which row is the first that is not.
    pub first_miss: Option<usize>,
    /// In the arithmetic that explains it best.
    pub log_likelihood: f64,
    /// The same under whatever amount of noise explains it best, up to logits that say nothing.
    pub generous: f64,
    /// Relative distance, root mean square over all rows; of numbers alone.
    pub distance: Option<f64>,
    /// The arithmetic that explains it best, among [`WAYS`].
    pub way: usize,
    /// Row of a text at which another token than the one that was forced is the likeliest, and begins the text as well, all
    /// rows before being explained: the rows behind it say nothing. And this token.
    pub otherwise: Option<(usize, u32)>,
    /// Whether it is of a text in other tokens than were seen.
    pub respelt: bool,
    /// Some numbers that differ where logits differ.
    pub digest: Vec<f64>,
}

impl Score {
    /// Of rows that are explained or not, and of what [`Noise::best`] found, where there is no distance.
    fn of(hit: &[bool], (way, log_likelihood, generous): (usize, f64, f64), digest: Vec<f64>) -> Score {
        let (hits, first_miss) = (hit.iter().filter(|hit| **hit).count(), hit.iter().position(|hit| !hit));
        let of = hit.len();
        Score { hits, of, first_miss, log_likelihood, generous, way, digest, ..Score::default() }
    }

    /// Whether nothing speaks against it.
    pub fn explains(&self) -> bool {
        self.of > 0 && self.hits == self.of
    }

    /// Share of the rows that are explained.
    pub fn share(&self) -> f64 {
        self.hits as f64 / self.of.max(1) as f64
    }

    /// Whether the logits are another's but for rounding in f32.
    pub fn is_same(&self, other: &Score, noise: &Noise) -> bool {
        apart(&self.digest, &other.digest) <= CONFIDENCE * noise.digests[0]
    }
}

impl Noise {
    /// Of exact logits (n, V), and those of each arithmetic.
    pub fn new(width: usize, exact: &[f32], ways: &[Vec<f32>]) -> Noise {
        let rows = |values: &[f32]| values.chunks(width).map(<[f32]>::to_vec).collect::<Vec<_>>();
        let exact_rows = rows(exact);
        let of_way =
            |way: &Vec<f32>| way.chunks(width).zip(&exact_rows).map(|(a, b)| deviation(a, b)).collect();
        let mut by_way: Vec<Vec<f64>> = ways.iter().map(of_way).collect();
        // A row that rounding happens to leave alone is no more exact than the others.
        for way in &mut by_way {
            let mean = (way.iter().map(|x| x * x).sum::<f64>() / way.len().max(1) as f64).sqrt();
            way.iter_mut().for_each(|sigma| *sigma = sigma.max(mean));
        }
        // One that cannot hold the values does not say how far rounding moves them.
        if let Some((sharpest, others)) = by_way.split_first_mut() {
            for (sigma, own) in others.iter_mut().flat_map(|way| way.iter_mut().zip(&*sharpest)) {
                *sigma = if sigma.is_finite() { *sigma } else { *own };
            }
        }
        let size = exact_rows.iter().map(|row| rms(row.iter().map(|x| f64::from(*x)))).collect();
        let own = digest(exact, width);
        let digests = ways.iter().map(|way| apart(&digest(way, width), &own)).collect();
        Noise { width, by_way, size, digests, doublings: 0 }
    }

    /// The noise of these logits: rounding moves smaller ones less, and larger ones more.
    pub fn of(&self, logits: &[f32]) -> Noise {
        let own = logits.chunks(self.width.max(1)).map(|row| rms(row.iter().map(|z| f64::from(*z))));
        let times = own.zip(&self.size).map(|(own, size)| own / size);
        let times: Vec<f64> = times.map(|times| if times.is_finite() { times } else { 1.0 }).collect();
        let scaled = |way: &Vec<f64>| way.iter().zip(&times).map(|(sigma, times)| sigma * times).collect();
        let by_way = self.by_way.iter().map(scaled).collect();
        let (size, digests) = (self.size.clone(), self.digests.clone());
        Noise { width: self.width, by_way, size, digests, doublings: self.doublings }
    }

    /// The amounts of noise that are tried, each by row: of every arithmetic, then ever more of the last, twice as much each
    /// time.
    pub fn levels(&self) -> impl Iterator<Item = (usize, f64)> {
        let last = WAYS.len() - 1;
        (0..WAYS.len())
            .map(|way| (way, 1.0))
            .chain((1..=self.doublings).map(move |k| (last, f64::from(k).exp2())))
    }

    /// The best of all levels: which arithmetic and its log-likelihood, and that of any amount of noise.
    pub fn best(&self, of: impl Fn(usize, f64) -> f64) -> (usize, f64, f64) {
        self.best_of(self.levels().map(|(way, times)| of(way, times)))
    }

    /// The same of what each level comes to, in their order.
    pub fn best_of(&self, all: impl Iterator<Item = f64>) -> (usize, f64, f64) {
        let (mut way, mut own, mut generous) = (0, f64::NEG_INFINITY, f64::NEG_INFINITY);
        for (number, found) in all.enumerate() {
            if number < WAYS.len() && found > own {
                (way, own) = (number, found);
            }
            generous = generous.max(found);
        }
        (way, own, generous)
    }
}

/// Root mean square of a - b around their mean: what all logits of a row have in common changes nothing.
fn deviation(a: &[f32], b: &[f32]) -> f64 {
    let apart = || a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let mean = apart().sum::<f64>() / a.len().max(1) as f64;
    rms(apart().map(|x| x - mean))
}

pub fn rms(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0usize, 0.0), |(n, sum), x| (n + 1, sum + x * x));
    (sum / n.max(1) as f64).sqrt()
}

/// Numbers of a row's digest.
const DIGEST: usize = 4;

/// Of each row (V,) some sums with signs of their own.
pub fn digest(logits: &[f32], width: usize) -> Vec<f64> {
    let signs = |i: usize| {
        let bits = random::mixed(i as u64);
        std::array::from_fn(|k| if bits >> k & 1 == 0 { 1.0 } else { -1.0 })
    };
    let signs: Vec<[f64; DIGEST]> = (0..width).map(signs).collect();
    let of_row = |row: &[f32]| {
        row.iter().zip(&signs).fold([0.0; DIGEST], |sums: [f64; DIGEST], (value, signs)| {
            std::array::from_fn(|k| sums[k] + signs[k] * f64::from(*value))
        })
    };
    logits.chunks(width.max(1)).flat_map(of_row).collect()
}

/// a - b; nothing where both are NaN.
pub fn difference((a, b): (&f32, &f32)) -> f64 {
    if a.is_nan() && b.is_nan() { 0.0 } else { f64::from(*a) - f64::from(*b) }
}

/// Root mean square distance; infinite where one is not finite, or they are of different sizes.
pub fn apart(a: &[f64], b: &[f64]) -> f64 {
    let distance = rms(a.iter().zip(b).map(|(a, b)| a - b));
    if a.len() == b.len() && distance.is_finite() { distance } else { f64::INFINITY }
}

/// What is tried first, for a reader: `f16`.
pub fn way_of(score: &Score) -> &'static Way {
    &WAYS[score.way.min(WAYS.len() - 1)]
}
