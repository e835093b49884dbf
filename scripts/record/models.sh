#!/usr/bin/env bash
# Small models for comparisons of backends: the tiny one in 14 types of weights, and ten other architectures. To be sourced in
# the repository's root, for its function ab_models LIBS OUT.
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

# Ten of those that tests/data/archs/fill.py makes: experts, windows, sinks, states, hybrids, a fused matmul. Latent attention
# (deepseek2) is not among them: llvmpipe compiles its shaders for longer than twelve minutes.
AB_ARCHS=(qwen3moe-moe gemma3-dense gpt-oss-moe mamba2-dense qwen35-dense llama-dense falcon-h1-dense lfm2-dense phi3-dense
    granite-moe)

# Types of weights that are made of the shipped F16, by llama.cpp's number.
AB_TYPES=(F32:0 BF16:32 Q4_0:2 Q4_1:3 Q5_0:8 Q5_1:9 Q8_0:7 Q2_K:10 Q3_K_M:12 Q5_K_M:17 Q6_K:18 IQ4_XS:30)

# Prints the paths of the tiny model in 14 types and of the ten others; makes those that are not there, with the llama.cpp of a
# folder and, the ten, with a Python that has numpy and gguf. Where that has not, they are left out with a line.
ab_models() { # LIBS OUT
    local made=$2/models type name
    mkdir -p "$made"
    cc -O1 -o "$2/quantize" scripts/record/quantize.c -ldl
    cp -n reference-dumps/models/qwen2-tiny-py-F16.gguf reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf "$made/" || true
    for type in "${AB_TYPES[@]}"; do
        name=$made/qwen2-tiny-py-${type%%:*}.gguf
        [ -e "$name" ] || { "$2/quantize" "$1" "$made/qwen2-tiny-py-F16.gguf" "$name.part" "${type##*:}" >&2 && mv "$name.part" "$name"; }
    done >"$2/quantize.log" 2>&1
    for name in "${AB_ARCHS[@]}"; do
        [ -e "$made/$name.gguf" ] || "${PYTHON:-python3}" -W ignore tests/data/archs/fill.py "$made" "$name" >>"$2/fill.log" 2>&1 ||
            echo "$name: not made, see $2/fill.log" >&2
    done
    ls "$made"/*.gguf
}
