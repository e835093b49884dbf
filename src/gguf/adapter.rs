//! An adapter of low rank beside a model file (LoRA, arXiv 2106.09685): scale · B·A·x is added to products W·x.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::{Gguf, TensorInfo, TensorRef};
use crate::error::{Error, Result};
use parity_graph::weights::{LORA_A, LORA_B, TOKEN_EMBD, weight};

/// One of the two matrices of a pair, where it was found: what it is, and its bytes.
type Half = Option<(TensorInfo, Vec<u8>)>;

/// Both matrices of one weight.
#[derive(Debug)]
pub struct Pair {
    /// (rank, in), or one for each expert before it.
    pub a: (TensorInfo, Vec<u8>),
    /// (out, rank), or one for each expert before it.
    pub b: (TensorInfo, Vec<u8>),
    /// What is divided by the rank to scale B·A; 0 where it is not scaled.
    pub alpha: f32,
}

impl Pair {
    /// Columns of B.
    pub fn rank(&self) -> usize {
        self.b.0.cols()
    }

    /// One of the two matrices.
    pub fn half(&self, kind: &str) -> Option<TensorRef<'_>> {
        let (info, bytes) = match kind {
            LORA_A => &self.a,
            LORA_B => &self.b,
            _ => return None,
        };
        Some(TensorRef { info, bytes })
    }
}

/// Matrices by the weights that they are for.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    /// What the user scales all of it by.
    strength: f32,
    pairs: IndexMap<String, Pair>,
}

impl Adapter {
    /// Of pairs that were read, by the names of their weights.
    pub fn new(path: &Path, strength: f32, pairs: IndexMap<String, Pair>) -> Adapter {
        Adapter { path: path.to_owned(), strength, pairs }
    }

    /// Reads a GGUF file as llama.cpp's convert_lora_to_gguf.py writes it.
    ///
    /// # Errors
    /// A file that is no GGUF, or no adapter; half of a pair.
    pub fn open(path: &Path, strength: f32) -> Result<Adapter> {
        let gguf = Gguf::open(path)?;
        let kind = gguf.str("adapter.type")?.or(gguf.str("general.type")?).unwrap_or("a model");
        if kind != "lora" {
            return Err(Error::file(path, "is no adapter")
                .expected("general.type adapter, adapter.type lora")
                .found(kind)
                .hint("convert_lora_to_gguf.py of llama.cpp writes one; -m takes models"));
        }
        let alpha = gguf.f32("adapter.lora.alpha")?.unwrap_or(0.0);
        let mut halves: IndexMap<String, [Half; 2]> = IndexMap::new();
        for info in gguf.tensors() {
            // llama.cpp passes over norms.
            let Some((of, half)) =
                info.name.rsplit_once('.').filter(|(_, kind)| [LORA_A, LORA_B].contains(kind))
            else {
                continue;
            };
            let tensor = gguf.weight(&info.name)?;
            halves.entry(of.to_owned()).or_default()[usize::from(half == LORA_B)] =
                Some((info.clone(), tensor.bytes.to_vec()));
        }
        let whole = |(of, halves): (String, [Option<_>; 2])| match halves {
            [Some(a), Some(b)] => Ok((of, Pair { a, b, alpha })),
            _ => Err(Error::file(path, format!("has half of a pair for {of}")).expected("lora_a and lora_b")),
        };
        Ok(Adapter::new(path, strength, halves.into_iter().map(whole).collect::<Result<_>>()?))
    }

    /// Refuses an adapter of another model.
    ///
    /// # Errors
    /// No pair; a weight that the model lacks, or that has another shape; a type that is not decoded.
    pub fn check(&self, gguf: &Gguf) -> Result<()> {
        let wrong = |message: String| Error::file(&self.path, message);
        if self.pairs.is_empty() {
            return Err(
                wrong("holds no matrix of an adapter".to_owned()).expected("NAME.lora_a, NAME.lora_b")
            );
        }
        for (name, pair) in &self.pairs {
            let Some(of) = gguf.tensor(name) else {
                return Err(wrong(format!("is for {name}, which the model lacks"))
                    .expected(format!("an adapter of {}", gguf.path().display())));
            };
            if *name == weight(TOKEN_EMBD) {
                return Err(wrong(format!("changes {name}, which parity does not follow"))
                    .hint("merge the adapter into the model: llama-export-lora"));
            }
            let (a, b, rank) = (&pair.a.0, &pair.b.0, pair.rank());
            let matrices = |rows: usize, cols: usize| -> Vec<usize> {
                let experts = &of.info.shape[..of.info.shape.len().saturating_sub(2)];
                experts.iter().copied().chain([rows, cols]).collect()
            };
            let out = of.info.shape.iter().rev().nth(1).copied().unwrap_or(1);
            let wanted = [(a, matrices(rank, of.cols())), (b, matrices(out, rank))];
            for (info, shape) in wanted {
                if info.shape != shape || !info.dtype.is_decodable() {
                    return Err(wrong(format!("{} does not fit the model", info.name))
                        .expected(format!("{shape:?}, slowest axis first, of a type that parity decodes"))
                        .found(format!("{:?} {}", info.shape, info.dtype)));
                }
            }
        }
        Ok(())
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Pairs by the names of their weights.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (&str, &Pair)> {
        self.pairs.iter().map(|(name, pair)| (name.as_str(), pair))
    }

    /// What B·A of a weight is multiplied by: strength · alpha / rank; strength alone where there is no alpha
    /// (`llama_adapter_lora_weight::get_scale` of llama.cpp).
    pub fn scale(&self, pair: &Pair) -> f32 {
        if pair.alpha == 0.0 { self.strength } else { self.strength * pair.alpha / pair.rank() as f32 }
    }

    /// Whether a scale is the one that is `wanted`, of the same numbers in f32: alpha and the rank are divided on either side.
    pub fn is_scale(found: f32, wanted: f32) -> bool {
        const SAME: f32 = 4.0 * f32::EPSILON;
        (found - wanted).abs() <= SAME * wanted.abs()
    }

    /// The matrices for a weight.
    pub fn pair(&self, weight: &str) -> Option<&Pair> {
        self.pairs.get(weight)
    }

    /// How llama.cpp is told of it; nothing of one that it does not read.
    pub fn flags(&self) -> Option<[String; 2]> {
        let file = self.path.display();
        self.path.extension().filter(|extension| *extension == "gguf")?;
        Some(match self.strength == 1.0 {
            true => ["--lora".to_owned(), file.to_string()],
            false => ["--lora-scaled".to_owned(), format!("{file}:{}", self.strength)],
        })
    }

    /// In a line: file, number of matrices, ranks and scales.
    pub fn describe(&self) -> String {
        let range = |values: Vec<f32>| {
            let (least, most) = values.iter().fold((f32::INFINITY, 0f32), |(a, b), x| (a.min(*x), b.max(*x)));
            if least == most { format!("{least}") } else { format!("{least} to {most}") }
        };
        let ranks = range(self.pairs.values().map(|pair| pair.rank() as f32).collect());
        let scales = range(self.pairs.values().map(|pair| self.scale(pair)).collect());
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("with the adapter {file}: {} matrices of rank {ranks}, scaled by {scales}", self.pairs.len())
    }
}
