//! How rotary angles are scaled for longer texts.
//!
//! From transformers' modeling_rope_utils.py and llama.cpp's converter, llama-model.cpp and llama-context.cpp.

use super::Carried;
use super::config::{Config, Converted};
use super::facts::place;
use super::setting::{Setting, plain};
use parity_graph::weights::{self, weight};

/// Roundings in f32 between the parameters and a factor of a dimension, on both sides: a power, a quotient, three
/// steps of the interpolation, and the quotient that is stored.
const ROUNDINGS: f64 = 2.0 * 6.0;

/// Compares the scaling of RoPE.
pub fn compare(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Scaling { kind, factor } = Scaling::of(config);
    sections(config, converted, out);
    local(config, converted, out);
    let own = converted.get("rope.scaling.type").map_or_else(|| "linear".to_owned(), |kind| kind.to_string());
    let own_factor = converted
        .number("rope.scaling.factor")
        .or_else(|| converted.number("rope.scale_linear"))
        .filter(|factor| *factor != 0.0)
        .unwrap_or(1.0);
    let has_factors = converted.gguf.tensor(&weight(weights::ROPE_FREQS)).is_some();
    let own_kind = match own.as_str() {
        "linear" if has_factors => "llama3",
        "none" if has_factors => "llama3",
        "linear" if own_factor == 1.0 => "none",
        other => other,
    };
    let far = "rotary angles differ, the more the further a token is from the start";
    if kind == "dynamic" {
        let effect = "llama.cpp never changes the angles with the length: logits differ beyond max_position_embeddings only";
        let says = (format!("dynamic, factor {}", plain(factor)), own_kind.to_owned());
        return out.note(
            "config.rope_scaling.type",
            place("rope_scaling", converted, "rope.scaling.type"),
            says,
            effect,
        );
    }
    if kind != own_kind {
        let says = (
            kind.clone(),
            match own_kind {
                "none" => "none: angles are not scaled".to_owned(),
                other => other.to_owned(),
            },
        );
        return out.differs(
            "config.rope_scaling.type",
            place("rope_scaling", converted, "rope.scaling.type"),
            says,
            far,
        );
    }
    match kind.as_str() {
        "linear" | "yarn" => {
            if !Setting::Number(factor).is(&Setting::Number(own_factor)) {
                let place = place("rope_scaling.factor", converted, "rope.scaling.factor");
                out.differs("config.rope_scaling.factor", place, (plain(factor), plain(own_factor)), far);
            }
            if kind == "yarn" {
                yarn(config, converted, factor, out);
            }
        }
        "llama3" => factors_of_llama3(config, converted, factor, out),
        "longrope" => longrope(config, converted, out),
        _ => {}
    }
}

/// LongRoPE: divisors for long and for short texts, and what they are made up for with.
fn longrope(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let lists = [("long_factor", weights::ROPE_FACTORS_LONG), ("short_factor", weights::ROPE_FACTORS_SHORT)];
    for (list, tensor) in lists {
        if let Some(Setting::List(wanted)) = config.rope.get(list).and_then(Setting::from_json) {
            let name = format!("config.rope_scaling.{list}");
            let about = (&*name, &*weight(tensor), &*format!("rope_scaling.{list}"));
            factors(converted, about, &wanted, 1.0, out);
        }
    }
    original_length(config, converted, out);
    let given = config.rope.get("attention_factor").and_then(|factor| factor.as_f64());
    let trained = original(config);
    let by_length = config.number(&["max_position_embeddings"]).zip(trained).and_then(|(longer, trained)| {
        let factor = longer / trained;
        (factor > 1.0).then(|| (1.0 + factor.ln() / trained.ln()).sqrt())
    });
    if let Some(wanted) = given.or(by_length) {
        magnitude(converted, wanted, converted.number("rope.scaling.attn_factor").unwrap_or(1.0), out);
    }
}

/// Kind and factor, as config.json has them.
struct Scaling {
    kind: String,
    factor: f64,
}

impl Scaling {
    fn of(config: &Config) -> Scaling {
        let text = |key: &str| config.rope.get(key).and_then(|kind| kind.as_str());
        let kind = text("rope_type").or(text("type")).unwrap_or("none").to_lowercase();
        let factor = config.rope.get("factor").and_then(|factor| factor.as_f64());
        let kind = match kind.as_str() {
            "default" | "mrope" | "none" => "none",
            "su" | "longrope" => "longrope",
            // A factor of 1 changes nothing.
            "linear" if factor.unwrap_or(1.0) == 1.0 => "none",
            other => other,
        };
        Scaling { kind: kind.to_owned(), factor: factor.unwrap_or(1.0) }
    }
}

/// The length that was trained before it was stretched.
fn original(config: &Config) -> Option<f64> {
    let own = config.rope.get("original_max_position_embeddings").and_then(|length| length.as_f64());
    own.or_else(|| config.number(&["original_max_position_embeddings"]))
}

fn original_length(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let wanted = original(config).or_else(|| config.number(&["max_position_embeddings"]));
    let (own, said) = match converted.number("rope.scaling.original_context_length") {
        Some(own) => (Some(own), plain(own)),
        None => {
            let own = converted.number("context_length");
            (
                own,
                format!("{}, llama.cpp's own: the context's length", own.map_or("nothing".to_owned(), plain)),
            )
        }
    };
    if let Some(wanted) = wanted.filter(|wanted| own != Some(*wanted)) {
        let place = place(
            "rope_scaling.original_max_position_embeddings",
            converted,
            "rope.scaling.original_context_length",
        );
        let effect = "dimensions are stretched from another one on";
        out.differs(
            "config.rope_scaling.original_max_position_embeddings",
            place,
            (plain(wanted), said),
            effect,
        );
    }
}

fn yarn(config: &Config, converted: &Converted<'_>, factor: f64, out: &mut Carried) {
    original_length(config, converted, out);
    let number = |key: &str| config.rope.get(key).and_then(|value| value.as_f64());
    for (name, key, own, default) in [
        ("config.rope_scaling.beta_fast", "beta_fast", "rope.scaling.yarn_beta_fast", 32.0),
        ("config.rope_scaling.beta_slow", "beta_slow", "rope.scaling.yarn_beta_slow", 1.0),
    ] {
        let (wanted, own_value) = (number(key).unwrap_or(default), converted.number(own).unwrap_or(default));
        if !Setting::Number(wanted).is(&Setting::Number(own_value)) {
            let place = place(&format!("rope_scaling.{key}"), converted, own);
            out.differs(
                name,
                place,
                (plain(wanted), plain(own_value)),
                "dimensions are stretched from another one on",
            );
        }
    }
    // 0.1 m ln s + 1: what YaRN multiplies cosine and sine with.
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let all = number("mscale_all_dim").filter(|m| *m != 0.0);
    if let (Some(all), true) = (all, config.number(&["kv_lora_rank"]).is_some()) {
        let own = converted.number("rope.scaling.yarn_log_multiplier").unwrap_or(0.0);
        if !Setting::Number(0.1 * all).is(&Setting::Number(own)) {
            let place = place("rope_scaling.mscale_all_dim", converted, "rope.scaling.yarn_log_multiplier");
            out.differs(
                "config.rope_scaling.mscale_all_dim",
                place,
                (plain(0.1 * all), plain(own)),
                MAGNITUDE,
            );
        }
        return;
    }
    let by_both = number("mscale").filter(|m| *m != 0.0).zip(all).map(|(m, all)| scale(m) / scale(all));
    let wanted = number("attention_factor").or(by_both).unwrap_or_else(|| scale(1.0));
    // llama.cpp divides by what a file's own multiplier of the logarithm gives.
    let divisor = converted.number("rope.scaling.yarn_log_multiplier").map_or(1.0, scale);
    let more = converted.number("rope.scaling.attn_factor").unwrap_or(1.0);
    magnitude(converted, wanted, scale(1.0) / divisor * more, out);
}

const MAGNITUDE: &str = "rotated queries and keys have another length: scores of attention another factor";

fn magnitude(converted: &Converted<'_>, wanted: f64, own: f64, out: &mut Carried) {
    // Both come of a logarithm and a square root, one of them stored as f32.
    if !((wanted - own).abs() <= ROUNDINGS * f64::from(f32::EPSILON) * own.abs()) {
        let place = place("rope_scaling.attention_factor", converted, "rope.scaling.attn_factor");
        let says = (format!("{wanted:.6}"), format!("{own:.6}, as llama.cpp computes it"));
        out.differs("config.rope_scaling.attention_factor", place, says, MAGNITUDE);
    }
}

/// Llama 3's divisors of the angles: long waves are divided by the factor, short ones not, those between in part.
fn factors_of_llama3(config: &Config, converted: &Converted<'_>, factor: f64, out: &mut Carried) {
    let number = |key: &str, default: f64| config.rope.get(key).and_then(|v| v.as_f64()).unwrap_or(default);
    let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
    let length = original(config).unwrap_or(8192.0);
    let base = config.number(&["rope_theta"]).unwrap_or(10000.0);
    let dims = converted.number("rope.dimension_count").or_else(|| converted.head_width()).unwrap_or(0.0);
    let wanted: Vec<f64> = (0..(dims / 2.0) as usize)
        .map(|pair| {
            let wave = 2.0 * std::f64::consts::PI * base.powf(2.0 * pair as f64 / dims);
            if wave < length / high {
                1.0
            } else if wave > length / low {
                factor
            } else {
                let smooth = (length / wave - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        })
        .collect();
    // A rounding of a wave's length moves a divisor between the two limits by so much more.
    let amplified = 1.0 + factor * high / (high - low);
    let about = ("config.rope_scaling.factor", &*weight(weights::ROPE_FREQS), "rope_scaling");
    factors(converted, about, &wanted, amplified, out);
}

/// A tensor of divisors against those that config.json asks for.
fn factors(
    converted: &Converted<'_>,
    (name, tensor, key): (&str, &str, &str),
    wanted: &[f64],
    amplified: f64,
    out: &mut Carried,
) {
    let place = format!("config.json {key}, {tensor}");
    let found = converted.gguf.tensor(tensor).filter(|tensor| tensor.info.dtype.is_decodable());
    let Some(found) = found else {
        return out.differs(
            name,
            place,
            (format!("{} factors", wanted.len()), "no such tensor".to_owned()),
            "rotary angles differ",
        );
    };
    let own = found.decode();
    let near = |(own, wanted): (&f32, &f64)| {
        (f64::from(*own) - wanted).abs() <= ROUNDINGS * amplified * f64::from(f32::EPSILON) * wanted.abs()
    };
    let wrong = own.iter().zip(wanted).position(|pair| !near(pair));
    let says = match (own.len() == wanted.len(), wrong) {
        (false, _) => (format!("{} factors", wanted.len()), own.len().to_string()),
        (true, Some(at)) => (format!("{:.6} for pair {at}", wanted[at]), format!("{:.6}", own[at])),
        (true, None) => return,
    };
    out.differs(name, place, says, "rotary angles differ, the more the further a token is from the start");
}

/// Which dimensions turn with time, height and width.
fn sections(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Some(Setting::List(mut wanted)) = config.rope.get("mrope_section").and_then(Setting::from_json)
    else {
        return;
    };
    wanted.resize(4, 0.0);
    let own = converted.get("rope.dimension_sections");
    if own != Some(Setting::List(wanted.clone())) {
        let says =
            (Setting::List(wanted).to_string(), own.map_or("nothing".to_owned(), |own| own.to_string()));
        let place = place("rope_scaling.mrope_section", converted, "rope.dimension_sections");
        out.differs("config.rope_scaling.mrope_section", place, says, "dimensions turn with other axes");
    }
}

/// The base of layers with a window, where newer files have it among their parameters of RoPE.
fn local(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Some(wanted) = config.rope_of_window.get("rope_theta").and_then(|base| base.as_f64()) else { return };
    let own = converted
        .number("rope.freq_base_swa")
        .or_else(|| converted.number("rope.freq_base"))
        .unwrap_or(10000.0);
    if !Setting::Number(wanted).is(&Setting::Number(own)) {
        let place = place("rope_parameters.sliding_attention.rope_theta", converted, "rope.freq_base_swa");
        let effect = "rotary angles of the layers with a window differ";
        out.differs("config.rope_local_base_freq", place, (plain(wanted), plain(own)), effect);
    }
}
