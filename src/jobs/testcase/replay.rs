//! What a node read and computed, in one safetensors file: `src0`, `src1`, … (the blocks of a weight as they are stored),
//! `recorded`, and `exact`; what the node is stands in its metadata.

use std::collections::HashMap;
use std::path::Path;

use parity_graph::{Op, Params};
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView, serialize};
use serde::{Deserialize, Serialize};

use crate::arithmetic::Arithmetic;
use crate::audit::{Held, Sight, hypotheses, judge};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::gguf::{DType, TensorInfo, TensorRef};
use crate::numerics::Storage;
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided, rule};
use crate::report::words::number;

/// Name and version of the file.
const SCHEMA: &str = "parity-testcase/1";
/// The key of the metadata that holds [`About`].
const ABOUT: &str = "parity";

/// Where a case is from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Of {
    /// The node.
    pub checkpoint: Checkpoint,
    /// What computes it, by ggml's description.
    pub op: String,
    /// The backend that computed it.
    pub backend: Option<String>,
    /// The step.
    pub step: usize,
    /// Who computed it.
    pub producer: String,
    /// In which version.
    pub version: Option<String>,
    /// With which model file.
    pub model: Option<String>,
}

/// What a file says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct About {
    schema: String,
    #[serde(flatten)]
    of: Of,
    /// The words of `op_params`.
    params: Vec<u32>,
    /// Extents of the result, slowest axis first.
    shape: [usize; 4],
    /// Its type by ggml's name.
    dtype: String,
    /// Which of a step's token rows are looked at, and of how many, where that is not all.
    tokens: Option<(Vec<usize>, usize)>,
    sources: Vec<Option<AboutSource>>,
}

/// What a source is.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct AboutSource {
    /// Slowest axis first.
    shape: [usize; 4],
    /// By ggml's name.
    dtype: String,
    /// Whether its blocks are stored as they are in the model file.
    weight: bool,
}

/// A tensor of the file.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A node with all that it takes to judge it again.
pub struct Case {
    about: About,
    tensors: Vec<(String, Tensor)>,
}

impl Case {
    /// What a node read, what was recorded of it, and the exact result, both contiguous in the shape of `args`.
    ///
    /// # Errors
    /// None so far.
    pub fn of(of: Of, args: &Args<'_, f64>, recorded: &[f64], exact: &[f64]) -> Result<Case> {
        let mut tensors = vec![
            ("recorded".to_owned(), values(args.shape, recorded)),
            ("exact".to_owned(), values(args.shape, exact)),
        ];
        let mut sources = Vec::new();
        for (slot, source) in args.sources.iter().enumerate() {
            let Some(source) = source else {
                sources.push(None);
                continue;
            };
            let (weight, tensor) = match &source.data {
                Data::Values(strided) => (false, values(strided.shape, &strided.to_vec())),
                Data::Weight(tensor) => {
                    let bytes = tensor.bytes.to_vec();
                    (true, Tensor { dtype: Dtype::U8, shape: vec![bytes.len()], bytes })
                }
            };
            sources.push(Some(AboutSource {
                shape: source.shape(),
                dtype: source.dtype.name().to_owned(),
                weight,
            }));
            tensors.push((format!("src{slot}"), tensor));
        }
        let about = About {
            schema: SCHEMA.to_owned(),
            of,
            params: args.params.0.to_vec(),
            shape: args.shape,
            dtype: args.dtype.name().to_owned(),
            tokens: args.tokens.map(|(some, of)| (some.to_vec(), of)),
            sources,
        };
        Ok(Case { about, tensors })
    }

    /// Writes the file under a temporary name, and renames it.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |e: &dyn std::fmt::Display| Error::file(path, format!("cannot be written: {e}"));
        let about = serde_json::to_string(&self.about).map_err(|e| failed(&e))?;
        let views: Vec<(String, TensorView<'_>)> = self
            .tensors
            .iter()
            .map(|(name, tensor)| {
                let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
                Ok((name.clone(), view.map_err(|e| failed(&e))?))
            })
            .collect::<Result<_>>()?;
        let metadata = HashMap::from([(ABOUT.to_owned(), about)]);
        let bytes = serialize(views, Some(metadata)).map_err(|e| failed(&e))?;
        let part = path.with_extension("part");
        std::fs::write(&part, bytes).map_err(|e| failed(&e))?;
        std::fs::rename(&part, path).map_err(|e| failed(&e))
    }
}

/// Values in f32 where each of them is one, and in f64 otherwise.
fn values(shape: [usize; 4], values: &[f64]) -> Tensor {
    let is_single = |x: &f64| x.is_nan() || f64::from(*x as f32) == *x;
    let shape = shape.to_vec();
    match values.iter().all(is_single) {
        true => {
            let bytes = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            Tensor { dtype: Dtype::F32, shape, bytes }
        }
        false => {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            Tensor { dtype: Dtype::F64, shape, bytes }
        }
    }
}

/// What came of judging a file again.
pub struct Replayed {
    /// In sentences.
    pub answer: Vec<String>,
    /// Whether rounding explains the recorded result.
    pub is_healthy: bool,
}

/// Judges the recorded result of a file again.
///
/// # Errors
/// A file that is no test case, or does not fit together; an op without a rule.
pub fn run(path: &Path) -> Result<Replayed> {
    let file = parity_dump::open_regular(path, "cannot be opened")?;
    // SAFETY: the map is read-only; a file that another process cuts short meanwhile ends the process with an error.
    let bytes = unsafe { memmap2::Mmap::map(&file) };
    let bytes = bytes.map_err(|e| Error::file(path, format!("cannot be mapped: {e}")))?;
    let wrong = |e: &dyn std::fmt::Display| {
        Error::file(path, format!("is no test case: {e}")).expected("a file that parity testcase wrote")
    };
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| wrong(&e))?;
    let about = header
        .metadata()
        .as_ref()
        .and_then(|all| all.get(ABOUT))
        .ok_or_else(|| wrong(&"it says nothing of a node"))?;
    let about: About = serde_json::from_str(about).map_err(|e| wrong(&e))?;
    if about.schema != SCHEMA {
        return Err(wrong(&format!("it is of another version, {}", about.schema)).expected(SCHEMA));
    }
    let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(&e))?;
    let loaded = Loaded::of(&about, &file).map_err(|e| wrong(&e))?;
    let op = Op::parse(&about.of.op);
    let rule = rule(&op).ok_or_else(|| wrong(&format!("there is no rule for {}", about.of.op)))?;
    let params = Params(about.params.clone().try_into().map_err(|_| wrong(&"op_params has 16 words"))?);
    let name = about.of.checkpoint.to_string();
    let args = Args {
        name: &name,
        params: &params,
        sources: loaded.sources(),
        shape: about.shape,
        dtype: loaded.dtype,
        arithmetic: &Arithmetic::EXACT,
        tokens: about.tokens.as_ref().map(|(some, of)| (&some[..], *of)),
    };
    let tried = hypotheses(&op, about.of.backend.as_deref(), &args);
    let carried = vec![None; args.sources.len()];
    let sight = Sight { looked_at: &|_| true, carried: &carried, row: None, norm: None };
    let held =
        judge(rule, &args, &loaded.recorded, &sight, &tried).map_err(|unknown| wrong(&unknown.reason))?;
    Ok(told(&about, &held))
}

fn told(about: &About, held: &Held) -> Replayed {
    let of = &about.of;
    let from = format!(
        "{} ({}) of step {}, by {} {}{}",
        of.checkpoint,
        of.op,
        of.step,
        of.producer,
        of.version.as_deref().unwrap_or("of an unknown version"),
        of.backend.as_deref().map_or_else(String::new, |backend| format!(" on {backend}")),
    );
    let is_healthy = held.nonfinite == 0 && held.is_healthy();
    let [error, exact, _] = held.squares;
    let size = format!(
        "its error over what rounding explains is {}, its distance from exact arithmetic rel L2 {}",
        number(held.over),
        number((error / exact).sqrt())
    );
    let verdict = match (is_healthy, held.nonfinite) {
        (true, _) => "HEALTHY: the recorded result is within what rounding explains".to_owned(),
        (false, 0) => format!("WRONG: {} elements are beyond what rounding explains", held.beyond.len()),
        (false, n) => format!("WRONG: {n} values are NaN or Inf, which exact arithmetic does not have there"),
    };
    Replayed { answer: vec![verdict, from, size], is_healthy }
}

/// The tensors of a file as a rule reads them.
struct Loaded {
    dtype: DType,
    recorded: Vec<f64>,
    /// By slot: type, shape, and values or blocks.
    sources: Vec<Option<(DType, [usize; 4], Held64)>>,
}

/// Values or blocks.
enum Held64 {
    Values(Vec<f64>),
    Weight(TensorInfo, Vec<u8>),
}

impl Loaded {
    fn of(about: &About, file: &SafeTensors<'_>) -> std::result::Result<Loaded, String> {
        let read = |name: &str, shape: [usize; 4]| -> std::result::Result<Vec<f64>, String> {
            let view = file.tensor(name).map_err(|e| format!("{name}: {e}"))?;
            let values: Vec<f64> = match view.dtype() {
                Dtype::F32 => view
                    .data()
                    .chunks_exact(4)
                    .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                    .collect(),
                Dtype::F64 => view
                    .data()
                    .chunks_exact(8)
                    .map(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
                    .collect(),
                other => return Err(format!("{name} is of type {other:?}")),
            };
            let wanted = shape.iter().try_fold(1usize, |all, extent| all.checked_mul(*extent));
            match wanted == Some(values.len()) {
                true => Ok(values),
                false => Err(format!("{name} has {} values, and not those of {shape:?}", values.len())),
            }
        };
        let mut sources = Vec::new();
        for (slot, source) in about.sources.iter().enumerate() {
            let Some(source) = source else {
                sources.push(None);
                continue;
            };
            let (name, dtype) = (format!("src{slot}"), named(&source.dtype)?);
            let held = match source.weight {
                false => Held64::Values(read(&name, source.shape)?),
                true => {
                    let view = file.tensor(&name).map_err(|e| format!("{name}: {e}"))?;
                    weight(&name, dtype, source.shape, view.data())?
                }
            };
            sources.push(Some((dtype, source.shape, held)));
        }
        Ok(Loaded { dtype: named(&about.dtype)?, recorded: read("recorded", about.shape)?, sources })
    }

    fn sources(&self) -> Vec<Option<Source<'_, f64>>> {
        self.sources.iter().map(|source| source.as_ref().map(source_of)).collect()
    }
}

/// A source as a rule reads it.
fn source_of((dtype, shape, held): &(DType, [usize; 4], Held64)) -> Source<'_, f64> {
    let data = match held {
        Held64::Values(values) => Data::Values(Strided::whole(values, *shape)),
        Held64::Weight(info, bytes) => Data::Weight(TensorRef { info, bytes }),
    };
    Source { dtype: *dtype, data }
}

/// A weight from its blocks.
fn weight(name: &str, dtype: DType, shape: [usize; 4], bytes: &[u8]) -> std::result::Result<Held64, String> {
    let elements = shape.iter().try_fold(1usize, |all, extent| all.checked_mul(*extent));
    let fits = elements.is_some_and(|n| {
        shape[3].is_multiple_of(dtype.block_len())
            && n / dtype.block_len() * dtype.block_bytes() == bytes.len()
    });
    if !fits || !dtype.is_decodable() {
        return Err(format!("{name} has {} bytes, which are no {shape:?} of {dtype}", bytes.len()));
    }
    // Weights have no leading axes of one: a vector is one axis.
    let lead = shape.iter().take(3).take_while(|extent| **extent == 1).count();
    let shape = shape[lead..].to_vec();
    let info = TensorInfo {
        name: name.to_owned(),
        dtype,
        shape,
        offset: 0,
        byte_len: bytes.len(),
        shard: 0,
        loaded: Storage::F32,
    };
    Ok(Held64::Weight(info, bytes.to_vec()))
}

fn named(name: &str) -> std::result::Result<DType, String> {
    DType::all().find(|dtype| dtype.name() == name).ok_or_else(|| format!("`{name}` is no type of ggml's"))
}
