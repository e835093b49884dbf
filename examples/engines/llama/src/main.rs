//! An engine of the `llama` architecture in plain Rust (TinyLlama, SmolLM2, Llama 2), in f32, from a Hugging Face folder;
//! it writes every tensor that it computes as a dump.
//!
//!     cargo run --release -- HF_FOLDER 312,863,2039 --decode 4 --dump out
//!
//! Weights stay as Hugging Face lays them out: the rows of q and k are in another order than in a GGUF file, and RoPE
//! turns halves. parity recognises that.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use parity_dump::{Element, Producer, Writer};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "llama-example HF_FOLDER TOKENS [--decode N] --dump OUT [--bug rope-pairs|rope-base|kv-head|no-residual]
  HF_FOLDER  config.json and .safetensors files of a llama model, as save_pretrained writes them
  TOKENS     token ids with commas between them
  --decode N greedy steps after the prompt (4)
  --bug B    one mistake, to see what parity says of it";

/// What the command line asks for.
struct Options {
    folder: PathBuf,
    tokens: Vec<u32>,
    decode: usize,
    dump: PathBuf,
    bug: Option<String>,
}

fn options() -> Result<Options> {
    let (mut plain, mut decode, mut dump, mut bug) = (Vec::new(), 4, None, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value\n{USAGE}"));
        match arg.as_str() {
            "--help" | "-h" => {
                println!("{USAGE}");
                std::process::exit(0);
            }
            "--decode" => decode = value()?.parse()?,
            "--dump" => dump = Some(PathBuf::from(value()?)),
            "--bug" => bug = Some(value()?),
            _ => plain.push(arg),
        }
    }
    let [folder, tokens] = &plain[..] else { return Err(USAGE.into()) };
    let tokens = tokens.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let known = ["rope-pairs", "rope-base", "kv-head", "no-residual"];
    if let Some(bug) = bug.as_ref().filter(|bug| !known.contains(&bug.as_str())) {
        return Err(format!("no bug is called {bug}\n{USAGE}").into());
    }
    Ok(Options { folder: folder.into(), tokens, decode, dump: dump.ok_or(USAGE)?, bug })
}

/// Numbers of config.json.
struct Config {
    layers: usize,
    heads: usize,
    kv_heads: usize,
    width: usize,
    eps: f32,
    base: f64,
}

impl Config {
    fn read(folder: &Path) -> Result<Config> {
        let config: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?)?;
        let number = |key: &str| config[key].as_u64().map(|n| n as usize);
        let heads = number("num_attention_heads").ok_or("config.json lacks num_attention_heads")?;
        let model = number("hidden_size").ok_or("config.json lacks hidden_size")?;
        let base = config["rope_theta"].as_f64().or(config["rope_parameters"]["rope_theta"].as_f64());
        Ok(Config {
            layers: number("num_hidden_layers").ok_or("config.json lacks num_hidden_layers")?,
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            width: number("head_dim").unwrap_or(model / heads),
            eps: config["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
            base: base.unwrap_or(1e4),
        })
    }
}

/// A matrix (rows, cols), or a vector of one row.
struct Matrix {
    cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// out[t, o] = Σ x[t, i]·w[o, i]
    fn times(&self, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
        x.chunks_exact(self.cols)
            .flat_map(|x| self.values.chunks_exact(self.cols).map(move |row| dot(row, x)))
            .collect()
    }
}

fn weights(folder: &Path) -> Result<BTreeMap<String, Matrix>> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path)?;
        for (name, view) in SafeTensors::deserialize(&bytes)?.tensors() {
            let element = match view.dtype() {
                Dtype::F32 => Element::F32,
                Dtype::F16 => Element::F16,
                Dtype::BF16 => Element::Bf16,
                other => return Err(format!("{name} is {other:?}").into()),
            };
            let mut values = vec![0.0; view.shape().iter().product()];
            element.decode(view.data(), &mut values);
            out.insert(name, Matrix { cols: view.shape().last().copied().unwrap_or(1), values });
        }
    }
    Ok(out)
}

struct Engine {
    config: Config,
    weights: BTreeMap<String, Matrix>,
    bug: Option<String>,
    /// Turned keys, and values, of each layer: (S, K·E).
    cache: Vec<[Vec<f32>; 2]>,
    dump: Writer,
}

impl Engine {
    fn weight(&self, name: &str) -> Result<&Matrix> {
        self.weights.get(name).ok_or_else(|| format!("the folder has no {name}").into())
    }

    fn has(&self, bug: &str) -> bool {
        self.bug.as_deref() == Some(bug)
    }

    /// Writes a tensor under its id; `row` is the shape of one token row.
    fn put(&mut self, id: &str, row: &[usize], values: &[f32]) -> Result<()> {
        let rows = values.len() / row.iter().product::<usize>();
        let shape: Vec<usize> = std::iter::once(rows).chain(row.iter().copied()).collect();
        Ok(self.dump.tensor_f32(id.parse()?, &shape, values)?)
    }

    /// x / sqrt(mean(x²) + eps) · w
    fn norm(&self, name: &str, x: &[f32]) -> Result<Vec<f32>> {
        let weight = self.weight(name)?;
        let one = |x: &[f32]| {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean as f32 + self.config.eps).sqrt();
            x.iter().zip(&weight.values).map(|(x, w)| x * scale * w).collect::<Vec<f32>>()
        };
        Ok(x.chunks_exact(weight.cols).flat_map(one).collect())
    }

    /// Turns pairs that lie half a head apart, as the rows of Hugging Face's files want it.
    fn rope(&self, x: &[f32], heads: usize, first: usize) -> Vec<f32> {
        let (width, half) = (self.config.width, self.config.width / 2);
        let base = if self.has("rope-base") { 5e5 } else { self.config.base };
        let mut out = x.to_vec();
        for (t, row) in out.chunks_exact_mut(heads * width).enumerate() {
            for head in row.chunks_exact_mut(width) {
                for i in 0..half {
                    let angle = (first + t) as f64 * base.powf(-2.0 * i as f64 / width as f64);
                    let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
                    let (a, b) = if self.has("rope-pairs") { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
                }
            }
        }
        out
    }

    /// Softmax of scaled scores over the cached positions, times values: (T, H·E).
    fn attend(&self, layer: usize, q: &[f32], first: usize) -> Vec<f32> {
        let Config { heads, kv_heads, width, .. } = self.config;
        let [keys, values] = &self.cache[layer];
        let scale = 1.0 / (width as f32).sqrt();
        let mut out = Vec::with_capacity(q.len());
        for (t, row) in q.chunks_exact(heads * width).enumerate() {
            for (head, q) in row.chunks_exact(width).enumerate() {
                let kv = if self.has("kv-head") { head % kv_heads } else { head / (heads / kv_heads) };
                let at = |of: &[f32], s: usize| {
                    let start = (s * kv_heads + kv) * width;
                    of[start..start + width].to_vec()
                };
                let dot = |s: usize| q.iter().zip(at(keys, s)).map(|(q, k)| q * k).sum::<f32>() * scale;
                let scores: Vec<f32> = (0..=first + t).map(dot).collect();
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exp: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f32 = exp.iter().sum();
                let mut context = vec![0.0; width];
                for (s, p) in exp.iter().enumerate() {
                    context.iter_mut().zip(at(values, s)).for_each(|(out, v)| *out += p / sum * v);
                }
                out.extend(context);
            }
        }
        out
    }

    /// One forward pass; the logits of the last row.
    fn step(&mut self, tokens: &[u32], first: usize) -> Result<Vec<f32>> {
        let positions: Vec<u32> = (first..first + tokens.len()).map(|position| position as u32).collect();
        self.dump.begin_step(tokens, &positions, 4 + 20 * self.config.layers)?;
        let table = self.weight("model.embed_tokens.weight")?;
        let model = table.cols;
        let mut x: Vec<f32> = Vec::with_capacity(tokens.len() * model);
        for &token in tokens {
            let row = table.values.chunks_exact(model).nth(token as usize);
            x.extend_from_slice(row.ok_or(format!("token {token} is not in the vocabulary"))?);
        }
        self.put("embed", &[model], &x)?;
        for layer in 0..self.config.layers {
            x = self.layer(layer, x, first)?;
        }
        let normed = self.norm("model.norm.weight", &x)?;
        self.put("final_norm", &[model], &normed)?;
        let head = self.weight("lm_head.weight").or(self.weight("model.embed_tokens.weight"))?;
        let logits = head.times(&normed);
        let vocabulary = logits.len() / tokens.len();
        self.put("logits", &[vocabulary], &logits)?;
        self.dump.end_step()?;
        Ok(logits[logits.len() - vocabulary..].to_vec())
    }

    fn layer(&mut self, layer: usize, x: Vec<f32>, first: usize) -> Result<Vec<f32>> {
        let Config { heads, kv_heads, width, .. } = self.config;
        let (id, of) = (|name: &str| format!("blk.{layer}.{name}"), |name: &str| format!("model.layers.{layer}.{name}"));
        let model = x.len() / (x.len() / self.weight(&of("input_layernorm.weight"))?.cols);
        let add = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        let normed = self.norm(&of("input_layernorm.weight"), &x)?;
        self.put(&id("attn_norm"), &[model], &normed)?;
        let mut projected = Vec::new();
        for (name, heads) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
            let values = self.weight(&of(&format!("self_attn.{name}_proj.weight")))?.times(&normed);
            self.put(&id(name), &[heads, width], &values)?;
            projected.push(values);
        }
        let (q, k) = (self.rope(&projected[0], heads, first), self.rope(&projected[1], kv_heads, first));
        self.put(&id("q_rope"), &[heads, width], &q)?;
        self.put(&id("k_rope"), &[kv_heads, width], &k)?;
        self.cache[layer][0].extend(k);
        self.cache[layer][1].extend(&projected[2]);
        let context = self.attend(layer, &q, first);
        self.put(&id("attn_ctx"), &[heads * width], &context)?;
        let attended = self.weight(&of("self_attn.o_proj.weight"))?.times(&context);
        self.put(&id("attn_out"), &[model], &attended)?;
        let x = if self.has("no-residual") { attended } else { add(&attended, &x) };
        self.put(&id("attn_residual"), &[model], &x)?;
        let normed = self.norm(&of("post_attention_layernorm.weight"), &x)?;
        self.put(&id("ffn_norm"), &[model], &normed)?;
        let gate = self.weight(&of("mlp.gate_proj.weight"))?.times(&normed);
        let up = self.weight(&of("mlp.up_proj.weight"))?.times(&normed);
        let ffn = gate.len() / (normed.len() / model);
        self.put(&id("ffn_gate"), &[ffn], &gate)?;
        self.put(&id("ffn_up"), &[ffn], &up)?;
        let acted: Vec<f32> = gate.iter().zip(&up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        self.put(&id("ffn_act"), &[ffn], &acted)?;
        let out = self.weight(&of("mlp.down_proj.weight"))?.times(&acted);
        self.put(&id("ffn_out"), &[model], &out)?;
        let x = add(&out, &x);
        self.put(&id("layer_out"), &[model], &x)?;
        Ok(x)
    }
}

fn main() -> Result<()> {
    let Options { folder, tokens, decode, dump, bug } = options()?;
    let config = Config::read(&folder)?;
    let producer = Producer {
        name: "llama-example".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        backend: Some("cpu".to_owned()),
        numerics: Some("f32".to_owned()),
        ..Producer::default()
    };
    let cache = (0..config.layers).map(|_| [Vec::new(), Vec::new()]).collect();
    let dump = Writer::create(&dump, producer, Default::default())?;
    let mut engine = Engine { weights: weights(&folder)?, config, bug, cache, dump };
    let mut logits = engine.step(&tokens, 0)?;
    for number in 0..decode {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(token, _)| token as u32);
        logits = engine.step(&[best], tokens.len() + number)?;
    }
    Ok(engine.dump.finish()?)
}
