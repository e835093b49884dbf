//! How a mistake is mended in an engine that a dump names, where that is said otherwise than for all of them.

/// Part of a producer's name, a mistake, and its fix there.
const FIXES: &[(&str, &str, &str)] = &[
    ("transformers", "precision.bf16_frequencies", LOADED),
    ("transformers", "precision.f16_frequencies", LOADED),
    ("transformers", "precision.tf32", TORCH_TF32),
    ("torch", "precision.tf32", TORCH_TF32),
    (
        "llama.cpp",
        "rope.base",
        "--rope-freq-base, or {arch}.rope.freq_base in the file (gguf_set_metadata.py)",
    ),
    ("llama.cpp", "norm.eps", "{arch}.attention.layer_norm_rms_epsilon in the file (gguf_set_metadata.py)"),
    ("llama.cpp", "lora.scale", "--lora-scaled FILE:SCALE"),
    ("llama.cpp", "lora.missing", "--lora FILE, and no /lora-adapters request that scales it by 0"),
    ("llama.cpp", "data.f16_overflow", "ggml_mul_mat_set_prec(…, GGML_PREC_F32), or a BF16 or F32 file"),
    ("mlx", "rope.interleaved", "traditional of nn.RoPE: True rotates neighbours, False halves"),
    ("candle", "rope.interleaved", "candle_nn::rotary_emb: rope_i rotates neighbours, rope halves"),
];

const LOADED: &str = "load the model in its type (dtype=torch.bfloat16 in from_pretrained), or make the buffer again in f32 after the conversion";
const TORCH_TF32: &str = "torch.set_float32_matmul_precision(\"highest\"), or NVIDIA_TF32_OVERRIDE=0";

/// What mends a mistake in the engine of that name; `None` where nothing else than the catalogue's fix is known.
pub fn fix_in(producer: &str, fault: &str) -> Option<&'static str> {
    let producer = producer.to_lowercase();
    FIXES.iter().find(|(engine, of, _)| *of == fault && producer.contains(engine)).map(|(_, _, fix)| *fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixes_are_of_mistakes_of_the_catalogue() {
        for (engine, fault, fix) in FIXES {
            let entry = super::super::find(fault).unwrap_or_else(|| panic!("{fault}"));
            assert!(entry.name == *fault && entry.fix != *fix, "{engine} {fault}");
        }
        assert_eq!(fix_in("mlx-lm", "rope.interleaved"), Some(FIXES[9].2));
        assert_eq!(fix_in("mine", "rope.interleaved"), None);
    }
}
