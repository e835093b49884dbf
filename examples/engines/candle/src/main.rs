//! A Qwen2 and Llama engine on candle that dumps every tensor through the crate `parity-dump`.
//!
//!     cargo run --release -- MODEL.gguf TOKEN,TOKEN,… [--decode N] [--dump FOLDER] [--dtype f32|f16] [--bug NAME]
//!
//! Bugs to try parity with: `rope-pairs` (candle has both rotations, one letter apart), `kv-head` (the heads of a
//! group repeated in the wrong order), `no-q-bias`.

use std::error::Error;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::{ops, rotary_emb};
use parity_dump::{Element, ModelInfo, Producer, Writer};

/// The version that Cargo.toml asks for.
const CANDLE: &str = "0.11.0";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The dump, where one was asked for.
struct Dump(Option<Writer>);

impl Dump {
    /// Writes `tensor` under the id `name`, slowest axis first, in the type that it has.
    fn put(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some(writer) = &mut self.0 else { return Ok(()) };
        let flat = tensor.flatten_all()?;
        let (element, bytes): (Element, Vec<u8>) = match tensor.dtype() {
            DType::F16 => (Element::F16, bytes(&flat.to_vec1::<half::f16>()?, |x| x.to_le_bytes())),
            DType::BF16 => (Element::Bf16, bytes(&flat.to_vec1::<half::bf16>()?, |x| x.to_le_bytes())),
            _ => (Element::F32, bytes(&flat.to_dtype(DType::F32)?.to_vec1::<f32>()?, |x| x.to_le_bytes())),
        };
        writer.tensor(name.parse()?, element, tensor.dims(), &bytes, None)?;
        Ok(())
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| of(x)).collect()
}

struct Engine {
    content: Content,
    file: File,
    architecture: String,
    dtype: DType,
    bug: String,
    layers: Vec<Layer>,
    embed: Tensor,
    output_norm: Tensor,
    output: Tensor,
    heads: usize,
    shared: usize,
    eps: f32,
    base: f32,
    cached: usize,
}

/// Weights by the end of their names, and the cache: (K, S, E) keys and values.
struct Layer {
    weights: std::collections::HashMap<&'static str, Tensor>,
    cache: Option<(Tensor, Tensor)>,
}

const LAYER_WEIGHTS: [&str; 12] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_q.bias",
    "attn_k.weight",
    "attn_k.bias",
    "attn_v.weight",
    "attn_v.bias",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];

impl Engine {
    fn open(path: &Path, dtype: DType, bug: String) -> Result<Engine> {
        let mut file = File::open(path)?;
        let content = Content::read(&mut file)?;
        let architecture = content.metadata["general.architecture"].to_string()?.clone();
        let number = |key: &str| {
            let key = format!("{architecture}.{key}");
            content.metadata.get(&key).ok_or(format!("the file has no {key}"))
        };
        let (heads, shared) =
            (number("attention.head_count")?.to_u32()?, number("attention.head_count_kv")?.to_u32()?);
        let (eps, base) =
            (number("attention.layer_norm_rms_epsilon")?.to_f32()?, number("rope.freq_base")?.to_f32()?);
        let count = number("block_count")?.to_u32()?;
        let empty = Tensor::zeros(1, dtype, &Device::Cpu)?;
        let mut engine = Engine {
            content,
            file,
            architecture,
            dtype,
            bug,
            layers: Vec::new(),
            embed: empty.clone(),
            output_norm: empty.clone(),
            output: empty,
            heads: heads as usize,
            shared: shared as usize,
            eps,
            base,
            cached: 0,
        };
        for layer in 0..count {
            let mut weights = std::collections::HashMap::new();
            for name in LAYER_WEIGHTS {
                let full = format!("blk.{layer}.{name}");
                if engine.content.tensor_infos.contains_key(&full) {
                    weights.insert(name, engine.weight(&full)?);
                }
            }
            engine.layers.push(Layer { weights, cache: None });
        }
        engine.embed = engine.weight("token_embd.weight")?;
        engine.output_norm = engine.weight("output_norm.weight")?;
        engine.output = engine.weight("output.weight").unwrap_or(engine.embed.clone());
        Ok(engine)
    }

    fn weight(&mut self, name: &str) -> Result<Tensor> {
        let stored = self.content.tensor(&mut self.file, name, &Device::Cpu)?;
        Ok(stored.dequantize(&Device::Cpu)?.to_dtype(self.dtype)?)
    }

    /// (T, E/2) cosines and sines of the positions from `cached` on.
    fn angles(&self, count: usize, width: usize) -> Result<(Tensor, Tensor)> {
        let (first, half) = (self.cached, width / 2);
        let angle = |i: usize| {
            (first + i / half) as f64 * f64::from(self.base).powf(-2.0 * (i % half) as f64 / width as f64)
        };
        let table = |of: fn(f64) -> f64| -> Result<Tensor> {
            let values: Vec<f32> = (0..count * half).map(|i| of(angle(i)) as f32).collect();
            Ok(Tensor::from_vec(values, (count, half), &Device::Cpu)?.to_dtype(self.dtype)?)
        };
        Ok((table(f64::cos)?, table(f64::sin)?))
    }

    /// (T, D) -> (T, H·E), the attention of layer `n` before the output matmul.
    fn attention(&mut self, n: usize, x: &Tensor, dump: &mut Dump) -> Result<Tensor> {
        let (count, width) = (x.dim(0)?, self.embed.dim(1)? / self.heads);
        let (cos, sin) = self.angles(count, width)?;
        let mut heads_of = |name: &str, heads: usize| -> Result<Tensor> {
            let weights = &self.layers[n].weights;
            let projected = x.matmul(&weights[format!("attn_{name}.weight").as_str()].t()?)?;
            dump.put(&format!("blk.{n}.{name}_proj"), &projected)?;
            let skipped = self.bug == "no-q-bias" && name == "q";
            let biased = match weights.get(format!("attn_{name}.bias").as_str()) {
                Some(bias) if !skipped => projected.broadcast_add(bias)?,
                _ => projected,
            };
            let biased = biased.reshape((count, heads, width))?;
            dump.put(&format!("blk.{n}.{name}"), &biased)?;
            let by_head = biased.transpose(0, 1)?.contiguous()?; // (H, T, E)
            if name == "v" {
                return Ok(by_head);
            }
            // The rows of q and k of a GGUF file of a Llama are ordered so that the pairs lie side by side.
            let pairs = (self.architecture == "llama") != (self.bug == "rope-pairs");
            let rope = if pairs { rotary_emb::rope_i } else { rotary_emb::rope };
            let rotated = rope(&by_head.unsqueeze(0)?, &cos, &sin)?.squeeze(0)?;
            dump.put(&format!("blk.{n}.{name}_rope"), &rotated.transpose(0, 1)?)?;
            Ok(rotated)
        };
        let (q, k, v) =
            (heads_of("q", self.heads)?, heads_of("k", self.shared)?, heads_of("v", self.shared)?);
        let (k, v) = match self.layers[n].cache.take() {
            Some((old_k, old_v)) => (Tensor::cat(&[&old_k, &k], 1)?, Tensor::cat(&[&old_v, &v], 1)?),
            None => (k, v),
        };
        self.layers[n].cache = Some((k.clone(), v.clone()));
        let (seen, group) = (k.dim(1)?, self.heads / self.shared);
        let repeated = |x: &Tensor| -> Result<Tensor> {
            let (axis, shape) = match self.bug.as_str() {
                "kv-head" => (0, (group, self.shared, seen, width)),
                _ => (1, (self.shared, group, seen, width)),
            };
            Ok(x.unsqueeze(axis)?.expand(shape)?.reshape((self.heads, seen, width))?)
        };
        let scores = (q.matmul(&repeated(&k)?.t()?)? * (1.0 / (width as f64).sqrt()))?;
        let first = self.cached;
        let mask: Vec<f32> = (0..count * seen)
            .map(|i| if i % seen > first + i / seen { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let mask = Tensor::from_vec(mask, (count, seen), &Device::Cpu)?.to_dtype(self.dtype)?;
        let probs = ops::softmax_last_dim(&scores.broadcast_add(&mask)?)?;
        let context = probs.matmul(&repeated(&v)?)?.transpose(0, 1)?.reshape((count, self.heads * width))?;
        dump.put(&format!("blk.{n}.attn_ctx"), &context)?;
        Ok(context)
    }

    /// (T, D) -> (T, D), the feed-forward block of layer `n`.
    fn feed_forward(&self, n: usize, x: &Tensor, dump: &mut Dump) -> Result<Tensor> {
        let weights = &self.layers[n].weights;
        let gate = x.matmul(&weights["ffn_gate.weight"].t()?)?;
        let up = x.matmul(&weights["ffn_up.weight"].t()?)?;
        dump.put(&format!("blk.{n}.ffn_gate"), &gate)?;
        dump.put(&format!("blk.{n}.ffn_up"), &up)?;
        let act = (ops::silu(&gate)? * up)?;
        dump.put(&format!("blk.{n}.ffn_act"), &act)?;
        let out = act.matmul(&weights["ffn_down.weight"].t()?)?;
        dump.put(&format!("blk.{n}.ffn_out"), &out)?;
        Ok(out)
    }

    /// One forward pass over `tokens`; returns the most likely next one.
    fn step(&mut self, tokens: &[u32], dump: &mut Dump) -> Result<u32> {
        let positions: Vec<u32> = (self.cached as u32..(self.cached + tokens.len()) as u32).collect();
        if let Some(writer) = &mut dump.0 {
            // embed, final_norm, logits, and 19 of each layer
            writer.begin_step(tokens, &positions, 3 + 19 * self.layers.len())?;
        }
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embed.index_select(&ids, 0)?;
        dump.put("embed", &x)?;
        for n in 0..self.layers.len() {
            let normed = ops::rms_norm(&x, &self.layers[n].weights["attn_norm.weight"], self.eps)?;
            dump.put(&format!("blk.{n}.attn_norm"), &normed)?;
            let context = self.attention(n, &normed, dump)?;
            let out = context.matmul(&self.layers[n].weights["attn_output.weight"].t()?)?;
            dump.put(&format!("blk.{n}.attn_out"), &out)?;
            x = (x + out)?;
            dump.put(&format!("blk.{n}.attn_residual"), &x)?;
            let normed = ops::rms_norm(&x, &self.layers[n].weights["ffn_norm.weight"], self.eps)?;
            dump.put(&format!("blk.{n}.ffn_norm"), &normed)?;
            x = (&x + self.feed_forward(n, &normed, dump)?)?;
            dump.put(&format!("blk.{n}.layer_out"), &x)?;
        }
        let x = ops::rms_norm(&x, &self.output_norm, self.eps)?;
        dump.put("final_norm", &x)?;
        let logits = x.matmul(&self.output.t()?)?;
        dump.put("logits", &logits)?;
        if let Some(writer) = &mut dump.0 {
            writer.end_step()?;
        }
        self.cached += tokens.len();
        Ok(logits.i(tokens.len() - 1)?.to_dtype(DType::F32)?.argmax(0)?.to_scalar()?)
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, options @ ..] = &arguments[..] else {
        return Err("usage: MODEL.gguf TOKEN,… [--dump FOLDER] …".into());
    };
    let option = |name: &str| options.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
    let tokens = tokens.split(',').map(str::parse).collect::<std::result::Result<Vec<u32>, _>>()?;
    let word = option("--dtype").unwrap_or("f32".into());
    let (dtype, numerics) = match word.as_str() {
        "f32" => (DType::F32, "f32"),
        "f16" => (DType::F16, "f16 storage=f16 kv=f16"),
        // candle has no matmul of bf16 on a CPU.
        other => return Err(format!("--dtype {other}: expected f32 or f16").into()),
    };
    let path = Path::new(model);
    let mut engine = Engine::open(path, dtype, option("--bug").unwrap_or_default())?;
    let writer = option("--dump").map(|folder| {
        let producer = Producer {
            name: "candle".into(),
            version: Some(CANDLE.into()),
            backend: Some("cpu".into()),
            numerics: Some(numerics.into()),
            ..Producer::default()
        };
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let model =
            ModelInfo { file, architecture: Some(engine.architecture.clone()), ..ModelInfo::default() };
        Writer::create(Path::new(&folder), producer, model)
    });
    let mut dump = Dump(writer.transpose()?);
    let mut next = engine.step(&tokens, &mut dump)?;
    for _ in 0..option("--decode").map_or(Ok(0), |n| n.parse())? {
        print!("{next} ");
        next = engine.step(&[next], &mut dump)?;
    }
    println!();
    if let Some(writer) = dump.0 {
        writer.finish()?;
    }
    Ok(())
}
