//! The numbers that fix what a node computes: what each is called, and which fault another number is.

use parity_graph::Op;
use parity_graph::params::Field;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// In the words of a report.
    pub words: &'static str,
    /// The catalogue's name for another number than the model's.
    pub fault: Option<&'static str>,
    /// Whether it is the same in all nodes of a layer, which is then enough to name.
    pub of_layer: bool,
    /// The key of the model file that holds it, behind the architecture's name.
    pub key: Option<&'static str>,
    /// Options of a run that set it as well.
    pub flags: &'static [&'static str],
}

impl Parameter {
    /// Whether options of a run set it as well.
    pub fn is_option(&self) -> bool {
        !self.flags.is_empty()
    }

    const fn of_key(self, key: &'static str) -> Parameter {
        Parameter { key: Some(key), ..self }
    }
}

/// Columns of a head that RoPE rotates some of.
pub const ROPE_WIDTH: Parameter = plain("head width");
/// Heads that RoPE rotates.
pub const HEADS: Parameter = plain("heads");
/// Columns that a norm divides by.
pub const NORM_WIDTH: Parameter = plain("width of the norm");
/// Heads of an attention's queries.
pub const QUERY_HEADS: Parameter = plain("query heads");
/// Heads of its keys.
pub const KEY_HEADS: Parameter = plain("key heads");

/// What B·A of an adapter is multiplied by.
pub const ADAPTER_SCALE: Parameter =
    Parameter { fault: Some("lora.scale"), flags: &["--lora-scaled"], ..plain("scale of the adapter") };

/// The same, where it is alpha.
pub const ADAPTER_ALPHA: Parameter = Parameter { fault: Some("lora.alpha"), ..ADAPTER_SCALE };

const fn plain(words: &'static str) -> Parameter {
    Parameter { words, fault: None, of_layer: false, key: None, flags: &[] }
}

const fn layer(words: &'static str, fault: &'static str) -> Parameter {
    Parameter { words, fault: Some(fault), of_layer: true, key: None, flags: &[] }
}

const fn option(words: &'static str, fault: &'static str, flags: &'static [&'static str]) -> Parameter {
    Parameter { flags, ..layer(words, fault) }
}

/// What a word of `op_params` is.
pub fn parameter(op: &Op, field: &Field) -> Parameter {
    match (op, field.name) {
        (Op::Norm | Op::RmsNorm, "eps") => {
            let of_mean = "attention.layer_norm_epsilon";
            let key = if *op == Op::Norm { of_mean } else { "attention.layer_norm_rms_epsilon" };
            Parameter { fault: Some("norm.eps"), ..plain("epsilon") }.of_key(key)
        }
        (Op::Rope | Op::RopeBack, name) => match name {
            "n_dims" => layer("RoPE columns", "rope.partial").of_key("rope.dimension_count"),
            "mode" => layer("RoPE mode", "rope.interleaved"),
            "n_ctx_orig" => option("RoPE original context", "rope.yarn_ramp", &["--yarn-orig-ctx"])
                .of_key("rope.scaling.original_context_length"),
            "freq_base" => option("RoPE base", "rope.base", &["--rope-freq-base"]).of_key("rope.freq_base"),
            "freq_scale" => {
                let flags = &["--rope-freq-scale", "--rope-scale", "--rope-scaling"];
                option("RoPE scale", "rope.scale", flags).of_key("rope.scaling.factor")
            }
            "ext_factor" => option("YaRN share", "rope.yarn", &["--yarn-ext-factor", "--rope-scaling"]),
            "attn_factor" => option("YaRN factor", "rope.yarn", &["--yarn-attn-factor", "--rope-scaling"])
                .of_key("rope.scaling.attn_factor"),
            "beta_fast" => option("YaRN fast limit", "rope.yarn_ramp", &["--yarn-beta-fast"]),
            "beta_slow" => option("YaRN slow limit", "rope.yarn_ramp", &["--yarn-beta-slow"]),
            "section0" | "section1" | "section2" | "section3" => {
                Parameter { fault: Some("rope.sections"), ..plain(field.name) }
            }
            name => plain(name),
        },
        (Op::FlashAttn, "scale") => layer("attention scale", "attn.scale"),
        (Op::FlashAttn, "max_bias") => layer("ALiBi slope", "attn.alibi"),
        (Op::FlashAttn, "softcap") => layer("attention soft cap", "attn.softcap"),
        (Op::SwigluOai | Op::SwigluClamp, "alpha") => plain("slope of the gate"),
        (Op::SwigluOai | Op::SwigluClamp, "limit") => plain("limit of the gate"),
        (_, name) => plain(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_those_of_the_catalogue() {
        for op in Op::all() {
            for field in parity_graph::params::fields(op) {
                let fault = parameter(op, field).fault;
                let is_known = |fault| parity_graph::fault::find(fault).is_some();
                assert!(fault.is_none_or(is_known), "{op} {}: {fault:?}", field.name);
            }
        }
    }
}
