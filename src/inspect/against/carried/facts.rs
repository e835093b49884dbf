//! The settings of config.json, each compared with the key of a model file that carries it.

use super::Carried;
use super::config::{Config, Converted};
use super::setting::{Setting, plain};
use super::table::{Default, FACTS, Fact, Neutral};
use crate::gguf::TensorRef;
use parity_graph::weights::{self, weight};

/// Compares every setting of the table, and those that need more than a line.
pub fn compare(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    // Latent attention has one head of keys and values in the cache, of the rank's width.
    let latent = config.number(&["kv_lora_rank"]).is_some_and(|rank| rank > 0.0);
    for fact in FACTS {
        let of_heads = ["config.num_key_value_heads", "config.head_dim", "config.head_dim_of_values"];
        // Another number of heads makes the widths that follow from it others too.
        let follows = converted.get(fact.key).is_none()
            && out.differences.iter().any(|known| known.name == "config.num_attention_heads");
        if !((latent || follows) && of_heads.contains(&fact.name)) {
            one(fact, config, converted, out);
        }
    }
    feed_forward(config, converted, out);
    routing(config, converted, out);
    partial_rotary(config, converted, out);
    scale_of_queries(config, converted, out);
    activation(config, converted, out);
    tied(config, converted, out);
    if let (Some(original), Some(own)) = (
        config.number(&["max_position_embeddings", "n_ctx", "n_positions"]),
        converted.number("context_length"),
    ) && original != own
    {
        let place = place("max_position_embeddings", converted, "context_length");
        let effect =
            "no logit differs within both lengths; llama.cpp uses the file's for its default context";
        out.note("config.max_position_embeddings", place, (plain(original), plain(own)), effect);
    }
}

/// `config.json KEY, ARCHITECTURE.KEY`
pub fn place(theirs: &str, converted: &Converted<'_>, own: &str) -> String {
    format!("config.json {theirs}, {}", converted.key(own))
}

fn one(fact: &Fact, config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let found = config.find(fact.keys);
    let stated = converted.get(fact.key);
    let (key, original) = match (found, fact.neutral) {
        (Some((key, original)), _) => (key, original),
        (None, Neutral::Absent)
            if fact.keys.iter().any(|key| config.get(key).is_some()) || stated.is_some() =>
        {
            (fact.keys[0], Setting::Number(0.0))
        }
        (None, _) => return silent(fact, converted, stated, out),
    };
    if matches!((&original, fact.name), (Setting::List(_), "config.num_experts")) {
        return;
    }
    let neutral = |setting: Setting| match (fact.neutral, setting.number()) {
        (Neutral::Zero, Some(0.0)) => Setting::Number(1.0),
        _ => setting,
    };
    let (own, said) = match (stated, fact.default) {
        (Some(own), _) => (Some(neutral(own.clone())), own.to_string()),
        (None, Default::Unknown) => return,
        (None, Default::Fails) => (None, "nothing: llama.cpp does not load it".to_owned()),
        (None, default) => {
            let value = match default {
                Default::Is(value) => Some(value),
                Default::By(of) => of(config, converted),
                Default::Fails | Default::Unknown => None,
            };
            let Some(value) = value else { return };
            let said =
                format!("{}, llama.cpp's own: the file has no {}", plain(value), converted.key(fact.key));
            (Some(Setting::Number(value)), said)
        }
    };
    let ours = neutral(original.clone());
    let next = config.number(&["num_nextn_predict_layers"]).unwrap_or(0.0);
    let with_next = |own: &Setting| {
        fact.name == "config.num_hidden_layers"
            && own.number().zip(ours.number()).is_some_and(|(own, ours)| own == ours + next)
    };
    if own.is_some_and(|own| own.is(&ours) || with_next(&own)) {
        return;
    }
    out.differs(fact.name, place(key, converted, fact.key), (original.to_string(), said), fact.effect);
}

/// What transformers takes where config.json does not say it: a note, because classes differ in it.
fn silent(fact: &Fact, converted: &Converted<'_>, stated: Option<Setting>, out: &mut Carried) {
    let Some(own) = stated.and_then(|own| own.number()) else { return };
    if fact.name == "config.rope_theta" && own != 10000.0 {
        let original = "nothing: the default of its class, mostly 10000".to_owned();
        out.note(fact.name, place("rope_theta", converted, fact.key), (original, plain(own)), fact.effect);
    }
}

/// Names of a feed-forward width.
pub(super) const FEED_FORWARD: [&str; 9] = [
    "intermediate_size",
    "prefix_dense_intermediate_size",
    "dense_intermediate_size",
    "n_inner",
    "hidden_dim",
    "ffn_dim",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
];

/// Widths of feed-forward matrices have several names, and one of them must be the file's.
fn feed_forward(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Some(Setting::Number(own)) =
        converted.get("feed_forward_length").filter(|own| own.number() != Some(0.0))
    else {
        return;
    };
    let said: Vec<_> = FEED_FORWARD.iter().filter_map(|key| config.find(&[key])).collect();
    if let Some((key, original)) = said.first()
        && !said.iter().any(|(_, said)| said.is(&Setting::Number(own)) || matches!(said, Setting::List(_)))
        // Models that give twice the width of a gate and its values in one, or a width before it is rounded up.
        && config.get("block_auto_adjust_ff_dim").is_none()
    {
        let place = place(key, converted, "feed_forward_length");
        out.differs(
            "config.intermediate_size",
            place,
            (original.to_string(), plain(own)),
            "matrices are read in other shapes, or the file does not load",
        );
    }
}

/// The function that makes scores of experts weights.
fn routing(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    const KEYS: [&str; 6] = [
        "scoring_func",
        "score_function",
        "score_func",
        "moe_router_activation",
        "moe_router_activation_func",
        "expert_selection_fn",
    ];
    // Graphs that take a sigmoid where a file does not say.
    const SIGMOID: [&str; 9] =
        ["afmoe", "cohere2moe", "glm4moe", "glm-dsa", "hy-v3", "laguna", "step35", "llama4", "minimax"];
    const NAMES: [&str; 5] = ["none", "softmax", "sigmoid", "softmax of the chosen", "sqrtsoftplus"];
    let Some((key, Setting::Text(original))) = config.find(&KEYS) else { return };
    let own = converted.number("expert_gating_func").filter(|number| *number != 0.0);
    let number = own.unwrap_or(if converted.is_a(&SIGMOID) { 2.0 } else { 1.0 });
    let name = NAMES.get(number as usize).copied().unwrap_or("unknown");
    if original != name {
        let said = match own {
            Some(_) => name.to_owned(),
            None => {
                format!("{name}, llama.cpp's own: the file has no {}", converted.key("expert_gating_func"))
            }
        };
        let place = place(key, converted, "expert_gating_func");
        out.differs(
            "config.scoring_func",
            place,
            (original, said),
            "experts get other weights, and others are chosen",
        );
    }
}

/// How many of a head's dimensions are rotated.
fn partial_rotary(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Some(width) = converted.head_width() else { return };
    let part = config.find(&["partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"]);
    let part = part.and_then(|(key, part)| Some((key, (part.number()? * width).floor())));
    let all = config.find(&["qk_rope_head_dim", "rotary_dim"]).and_then(|(key, n)| Some((key, n.number()?)));
    let Some((key, wanted)) = all.or(part) else { return };
    let own = converted.number("rope.dimension_count");
    if own.unwrap_or(width) != wanted {
        let said = match own {
            Some(own) => format!("{} dimensions", plain(own)),
            None => format!("{} dimensions, llama.cpp's own: all of a head", plain(width)),
        };
        let place = place(key, converted, "rope.dimension_count");
        let effect = "another part of every head is rotated: queries and keys differ at every position but 0";
        out.differs(
            "config.partial_rotary_factor",
            place,
            (format!("{} dimensions", plain(wanted)), said),
            effect,
        );
    }
}

/// Gemma's scale of scores, which llama.cpp takes from the size of the model.
fn scale_of_queries(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    // The layers of the two models of 27B, whose scale is of another width.
    const OF_27B: [f64; 2] = [46.0, 62.0];
    let (Some(wanted), true) =
        (config.number(&["query_pre_attn_scalar"]), converted.is_a(&["gemma2", "gemma3"]))
    else {
        return;
    };
    if converted.architecture == "gemma3n" {
        return;
    }
    let large = converted.number("block_count").is_some_and(|layers| OF_27B.contains(&layers));
    let own = match large {
        true => converted
            .number("embedding_length")
            .zip(converted.number("attention.head_count"))
            .map(|(d, h)| d / h),
        false => converted.head_width(),
    };
    if let Some(own) = own.filter(|own| *own != wanted) {
        let said = format!("{}, llama.cpp's own for a model of this size", plain(own));
        let place = place("query_pre_attn_scalar", converted, "attention.key_length");
        out.differs(
            "config.query_pre_attn_scalar",
            place,
            (plain(wanted), said),
            "scores of attention have another factor",
        );
    }
}

/// The activation, which no key carries: the graph of the architecture has it.
fn activation(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    const SILU: [&str; 8] = ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "deepseek2", "olmo2"];
    const GELU: [&str; 4] = ["gemma", "gemma2", "gemma3", "gemma3n"];
    // Gemma's first files say hidden_act gelu and mean its tanh form, as the class of today reads them.
    let Some((key, Setting::Text(original))) = config.find(&["hidden_activation", "hidden_act"]) else {
        return;
    };
    let is = |names: &[&str]| names.contains(&converted.architecture);
    let (own, fits) = match (is(&SILU), is(&GELU)) {
        (true, _) => ("silu", matches!(original.as_str(), "silu" | "swish")),
        (_, true) => ("gelu, its tanh form", original.starts_with("gelu")),
        _ => return,
    };
    if !fits {
        let said = format!("{own}: the graph of {} has no other", converted.architecture);
        let place = format!("config.json {key}");
        out.differs(
            "config.hidden_act",
            place,
            (original, said),
            "every feed-forward differs: the architecture is another",
        );
    }
}

/// Whether the output matrix is the table of embeddings.
fn tied(config: &Config, converted: &Converted<'_>, out: &mut Carried) {
    let Some((key, Setting::Flag(tied))) = config.find(&["tie_word_embeddings"]) else { return };
    let head = |name: &str| converted.gguf.tensor(name);
    let Some(own) = head(&weight(weights::OUTPUT)) else {
        if !tied && !converted.is_a(&["gemma", "command-r", "cohere"]) {
            let said = "tied: the file has no output.weight, so llama.cpp multiplies by token_embd.weight"
                .to_owned();
            out.differs(
                "config.tie_word_embeddings",
                format!("config.json {key}"),
                ("false".to_owned(), said),
                "logits are of another matrix",
            );
        }
        return;
    };
    let same = head(&weight(weights::TOKEN_EMBD)).is_some_and(|table| {
        let known = own.info.dtype.is_decodable() && table.info.dtype.is_decodable();
        // Types may differ: a sample of rows tells another matrix from one that was rounded otherwise.
        !known || (own.info.shape == table.info.shape && alike(own, table))
    });
    if tied && !same {
        let said = "an output.weight of its own, which llama.cpp uses".to_owned();
        out.differs(
            "config.tie_word_embeddings",
            format!("config.json {key}"),
            ("true".to_owned(), said),
            "logits are of another matrix",
        );
    }
}

/// Rows of a matrix that are compared.
const SAMPLED: usize = 16;

/// Whether rows of two matrices point the same way: rounded ones do, others are at right angles.
fn alike(a: TensorRef<'_>, b: TensorRef<'_>) -> bool {
    let (rows, cols) = (a.rows(), a.cols());
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    let (mut left, mut right) = (vec![0f32; cols], vec![0f32; cols]);
    for row in (0..rows).step_by((rows / SAMPLED).max(1)) {
        a.decode_rows(row..row + 1, &mut left);
        b.decode_rows(row..row + 1, &mut right);
        for (a, b) in left.iter().zip(&right).map(|(a, b)| (f64::from(*a), f64::from(*b))) {
            (ab, aa, bb) = (ab + a * b, aa + a * a, bb + b * b);
        }
    }
    // Half way between equal and unrelated: types of two bits stay above it.
    aa == bb || ab / (aa * bb).sqrt() > 0.5
}
