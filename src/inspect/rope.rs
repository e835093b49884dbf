//! Which columns of a head RoPE turns together, by architecture: `llama_model_rope_type` of llama.cpp 0.5.0.

use crate::model::graph::Pairing;

/// Pairs i and i + dims/2.
const HALF: [&str; 72] = [
    "falcon", "falcon-h1", "grok", "dbrx", "bert", "jina-bert-v3", "modern-bert", "nomic-bert", "nomic-bert-moe",
    "eurobert", "stablelm", "bitnet", "qwen", "qwen2", "dream", "qwen2moe", "qwen3", "qwen3moe", "llada-moe", "rnd1",
    "olmo2", "olmoe", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "gemma", "gemma2", "gemma3", "gemma3n",
    "gemma4", "gemma4-assistant", "gemma-embedding", "starcoder2", "openelm", "gptneox", "codeshell", "orion",
    "nemotron", "exaone", "exaone4", "exaone-moe", "minicpm3", "bailingmoe2", "dots1", "hunyuan-moe", "jais2",
    "gpt-oss", "hunyuan-dense", "hy_v3", "lfm2", "lfm2moe", "smallthinker", "seed_oss", "grovemoe", "apertus",
    "minimax-01", "minimax-m2", "minimax-m3", "cogvlm", "pangu-embedded", "afmoe", "laguna", "qwen3next", "mimo2",
    "step35", "spark2_5", "talkie", "mellum", "maple",
];

/// Pairs 2i and 2i + 1.
const INTERLEAVED: [&str; 44] = [
    "llama", "llada", "llama4", "deci", "baichuan", "starcoder", "internlm2", "minicpm", "xverse", "command-r",
    "cohere2", "cohere2moe", "olmo", "arctic", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4",
    "muse-glimmer", "plm", "chatglm", "granite", "granitemoe", "granitehybrid", "graniteswitch", "granite_swa",
    "chameleon", "bailingmoe", "neo-bert", "smollm3", "arcee", "ernie4_5", "ernie4_5-moe", "mistral3", "eagle3",
    "mistral4", "llama-embed", "maincoder", "glm-dsa", "dots3note", "nanbeige", "pockettts", "hy_v4",
];

/// `None` for architectures without RoPE, with several kinds of it, or unknown.
pub fn pairing(architecture: &str) -> Option<Pairing> {
    if HALF.contains(&architecture) {
        Some(Pairing::Half)
    } else if INTERLEAVED.contains(&architecture) {
        Some(Pairing::Interleaved)
    } else {
        None
    }
}
