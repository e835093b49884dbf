//! The numbers that fix a model's graph, read from GGUF metadata as llama.cpp reads them.

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};

use super::keys::{flags, refuse_unknown, uniform};
use parity_graph::weights;

/// What sets one family apart in how its metadata are read.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `general.architecture`
    pub name: &'static str,
    /// RoPE's mode: 0 rotates neighbours, 2 halves (llama.cpp: `llama_model_rope_type`).
    pub rope_mode: i32,
    /// Whether layers may look through a sliding window.
    pub window: Window,
}

/// How a family's sliding windows are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// There are none.
    Never,
    /// Where the file has a window: all but every n-th layer, their RoPE with a base of 10000 unless the file says
    /// otherwise, unscaled.
    Optional(u32),
    /// Always: all but every n-th layer, RoPE as elsewhere unless the file says otherwise.
    Always(u32),
}

/// RoPE of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Columns of a head that are rotated.
    pub dims: usize,
    /// 0 or 2, see [`Family::rope_mode`].
    pub mode: i32,
    /// Positions before scaling.
    pub original: usize,
    /// Base.
    pub base: f32,
    /// Factor of all angles.
    pub scale: f32,
    /// Share of YaRN's interpolation.
    pub ext: f32,
    /// Factor of the result.
    pub attn: f32,
}

/// YaRN's limits: llama.cpp's defaults, which these architectures cannot change.
pub const YARN_BETA: [f32; 2] = [32.0, 1.0];

/// A model's numbers. Letters as in DESIGN: D model width, H heads, K key/value heads, E head width, F feed-forward
/// width, V vocabulary.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The family.
    pub family: Family,
    /// Layers.
    pub layers: usize,
    /// D
    pub model: usize,
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// E
    pub head_width: usize,
    /// F, 0 where all feed-forward layers are experts' and the file does not say.
    pub ffn: usize,
    /// V
    pub vocab: usize,
    /// Positions that the model was trained for.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub eps: f32,
    /// RoPE of layers that see everything.
    pub rope: Rope,
    /// RoPE of layers with a window.
    pub rope_sliding: Rope,
    /// How many positions a layer with a window sees, itself included.
    pub window: Option<usize>,
    /// By layer: whether it has a window.
    pub sliding: Vec<bool>,
    /// Experts, 0 where there are none.
    pub experts: usize,
    /// How many of them a token uses.
    pub experts_used: usize,
}

/// No axis of a real model is longer; a hostile file must not overflow a product of two.
const LONGEST_AXIS: u32 = 1 << 24;

/// More layers than any model has.
const LAYERS_MAX: usize = 4096;

/// llama.cpp's `rope_freq_base_train` where a file gives none.
const DEFAULT_BASE: f32 = 10_000.0;

impl Facts {
    /// Reads and checks the metadata of a model.
    ///
    /// # Errors
    /// Names the key, what was expected and what was found.
    pub fn read(gguf: &Gguf, family: Family) -> Result<Facts> {
        refuse_unknown(gguf, family.name)?;
        let keys = Keys { gguf, arch: family.name };
        let (layers, model) = (keys.size("block_count")?, keys.size("embedding_length")?);
        let heads = keys.size("attention.head_count")?;
        if layers > LAYERS_MAX {
            return Err(keys.unsupported("block_count", format!("up to {LAYERS_MAX}"), layers));
        }
        let kv_heads = keys.or("attention.head_count_kv", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.unsupported(
                "attention.head_count_kv",
                format!("a divisor of {heads}"),
                kv_heads,
            ));
        }
        let head_width = keys.or("attention.key_length", model / heads)?;
        let rope_dims = keys.or("rope.dimension_count", head_width)?;
        for (key, expected) in [
            ("attention.value_length", head_width),
            ("attention.key_length_swa", head_width),
            ("attention.value_length_swa", head_width),
            ("rope.dimension_count_swa", rope_dims),
        ] {
            let found = keys.or(key, expected)?;
            if found != expected {
                return Err(keys.unsupported(key, expected, found));
            }
        }
        if head_width == 0 || rope_dims > head_width || !rope_dims.is_multiple_of(2) {
            let expected = format!("an even number up to {head_width}");
            return Err(keys.unsupported("rope.dimension_count", expected, rope_dims));
        }
        let table = gguf.tensor(&weights::weight(weights::TOKEN_EMBD)).ok_or_else(|| no_embedding(gguf))?;
        let rope = keys.rope(rope_dims, family.rope_mode)?;
        let (window, sliding) = keys.window(family.window, layers)?;
        let (experts, experts_used) = keys.experts()?;
        Ok(Facts {
            family,
            layers,
            model,
            heads,
            kv_heads,
            head_width,
            ffn: keys.count("feed_forward_length")?,
            vocab: table.rows(),
            context: keys.size("context_length")?,
            eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            rope,
            rope_sliding: keys.rope_sliding(rope, family.window)?,
            window,
            sliding,
            experts,
            experts_used,
        })
    }

    /// RoPE of layer `layer`.
    pub fn rope_of(&self, layer: usize) -> Rope {
        if self.sliding[layer] { self.rope_sliding } else { self.rope }
    }
}

/// The keys of one architecture in a file.
pub struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'a str,
}

impl<'a> Keys<'a> {
    /// Those of `arch`.
    pub fn new(gguf: &'a Gguf, arch: &'a str) -> Self {
        Keys { gguf, arch }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// A size, 0 where absent.
    pub fn count(&self, name: &str) -> Result<usize> {
        let value = uniform(self.gguf, &self.key(name))?.unwrap_or(0);
        match value <= LONGEST_AXIS {
            true => Ok(value as usize),
            false => Err(self.unsupported(name, format!("up to {LONGEST_AXIS}"), value)),
        }
    }

    fn size(&self, name: &str) -> Result<usize> {
        if self.gguf.get(&self.key(name)).is_none() {
            return self.gguf.require_u32(&self.key(name)).map(|value| value as usize);
        }
        match self.count(name)? {
            0 => Err(self.unsupported(name, format!("1 to {LONGEST_AXIS}"), 0)),
            value => Ok(value),
        }
    }

    /// A size that may be absent.
    fn or(&self, name: &str, default: usize) -> Result<usize> {
        if self.gguf.get(&self.key(name)).is_none() { Ok(default) } else { self.size(name) }
    }

    fn float(&self, name: &str) -> Result<Option<f32>> {
        self.gguf.f32(&self.key(name))
    }

    /// A number above zero; `default` where the key is absent.
    fn positive(&self, name: &str, default: Option<f32>) -> Result<f32> {
        let value = match (self.float(name)?, default) {
            (Some(value), _) | (None, Some(value)) => value,
            (None, None) => self.gguf.require_f32(&self.key(name))?,
        };
        match value.is_finite() && value > 0.0 {
            true => Ok(value),
            false => Err(self.unsupported(name, "a positive number", value)),
        }
    }

    /// A number that is absent where it is 0.
    pub fn nonzero(&self, name: &str) -> Result<Option<f32>> {
        match self.float(name)? {
            None => Ok(None),
            Some(0.0) => Ok(None),
            Some(_) => self.positive(name, None).map(Some),
        }
    }

    fn experts(&self) -> Result<(usize, usize)> {
        let (experts, used) = (self.count("expert_count")?, self.count("expert_used_count")?);
        match (experts, used) {
            (0, _) => Ok((0, 0)),
            (experts, used) if (1..=experts).contains(&used) => Ok((experts, used)),
            _ => Err(self.unsupported("expert_used_count", format!("1 to {experts}"), used)),
        }
    }

    /// llama.cpp's reading of `rope.*` (llama-model.cpp, llama-context.cpp).
    fn rope(&self, dims: usize, mode: i32) -> Result<Rope> {
        let context = self.size("context_length")?;
        let original = match self.count("rope.scaling.original_context_length")? {
            0 => context,
            original => original,
        };
        let kind = self.gguf.str(&self.key("rope.scaling.type"))?.unwrap_or("linear");
        if !["none", "linear", "yarn"].contains(&kind) {
            return Err(self.unsupported("rope.scaling.type", "none, linear or yarn", kind));
        }
        let ext = if kind == "yarn" { 1.0 } else { 0.0 };
        let scale = if kind == "none" { 1.0 } else { self.trained_scale()? };
        let mut attn = 1.0f32;
        if ext != 0.0 {
            // The kernel multiplies by 1 + 0.1 ln(factor) itself; llama.cpp takes that out of its own factor.
            let factor = 1.0 / scale;
            let grown = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            attn = grown * (1.0 / (1.0 + 0.1 * factor.ln()));
        }
        attn *= self.positive("rope.scaling.attn_factor", Some(1.0))?;
        let base = self.positive("rope.freq_base", Some(DEFAULT_BASE))?;
        Ok(Rope { dims, mode, original, base, scale, ext, attn })
    }

    fn trained_scale(&self) -> Result<f32> {
        let scaling = "rope.scaling.factor";
        let name = if self.float(scaling)?.is_some() { scaling } else { "rope.scale_linear" };
        Ok(self.nonzero(name)?.map_or(1.0, |factor| 1.0 / factor))
    }

    fn rope_sliding(&self, rope: Rope, window: Window) -> Result<Rope> {
        let (base, scale) = match window {
            Window::Never => return Ok(rope),
            Window::Optional(_) => (DEFAULT_BASE, 1.0),
            Window::Always(_) => (rope.base, self.trained_scale()?),
        };
        Ok(Rope { base: self.positive("rope.freq_base_swa", Some(base))?, scale, ..rope })
    }

    /// The width of the window, and which layers have it.
    fn window(&self, window: Window, layers: usize) -> Result<(Option<usize>, Vec<bool>)> {
        let none = (None, vec![false; layers]);
        let period = match window {
            Window::Never => return Ok(none),
            Window::Optional(period) | Window::Always(period) => period,
        };
        let width = self.count("attention.sliding_window")?;
        if width == 0 {
            return match window {
                Window::Always(_) => Err(self.unsupported("attention.sliding_window", "1 or more", 0)),
                _ => Ok(none),
            };
        }
        let name = "attention.sliding_window_pattern";
        let sliding = match self.gguf.get(&self.key(name)) {
            Some(Value::Array(array)) => {
                flags(array).filter(|flags| flags.len() == layers).ok_or_else(|| {
                    self.unsupported(name, format!("{layers} flags"), format!("{} values", array.len()))
                })?
            }
            _ => {
                let period = self.gguf.u32(&self.key(name))?.unwrap_or(period) as usize;
                (0..layers).map(|layer| period == 0 || layer % period < period - 1).collect()
            }
        };
        Ok((Some(width), sliding))
    }

    /// An error for a value that no graph is known for.
    pub fn unsupported(&self, name: &str, expected: impl ToString, found: impl ToString) -> Error {
        Error::file(self.gguf.path(), format!("{} has a value that parity has no graph for", self.key(name)))
            .expected(expected.to_string())
            .found(found.to_string())
    }
}

fn no_embedding(gguf: &Gguf) -> Error {
    Error::file(gguf.path(), "the file holds no model")
        .expected("a tensor token_embd.weight")
        .found(format!("{} tensors, none of that name", gguf.tensors().len()))
        .hint("a vocabulary-only or projector file cannot be run")
}
