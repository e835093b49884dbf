#!/usr/bin/env bash
# Records the dumps in reference-dumps/ with a real llama.cpp.
#
#   LLAMA_COMPLETION  a dynamically linked llama-completion (default: the one on the PATH)
#   PARITY            the parity to record with (default: target/release/parity)
#   MODELS            folder with qwen2-tiny-py-*.gguf (default: reference-dumps/models)
#
# The reference is the cleanest that llama.cpp has: F32 cache, no flash attention, no repacked weights,
# logits of every row. One recording with llama.cpp's defaults stands beside it.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

completion=${LLAMA_COMPLETION:-llama-completion}
parity=${PARITY:-target/release/parity}
models=${MODELS:-reference-dumps/models}
out=reference-dumps

# name|prompt; 8 steps are decoded after each: the 9th token is only sampled.
prompts=(
    'read_lines|def read_lines(path):'
    $'class|class Stack:\n    def'
    $'unicode|x = "é\n27'
)
clean=(-ctk f32 -ctv f32 -fa off --no-repack)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
common=(-n 9 --temp 0 --ignore-eos -no-cnv --no-warmup -t 2)

record() { # dump model prompt flags…
    local dump=$1 model=$2 prompt=$3
    shift 3
    rm -rf "${out:?}/$dump"
    mkdir -p "$out/$dump"
    "$parity" record -o "$out/$dump" --verify -- \
        "$completion" -m "$models/$model.gguf" -p "$prompt" "${common[@]}" "$@" </dev/null 2>"$log" || { cat "$log" >&2; return 1; }
}

mkdir -p "$out/models"
for model in qwen2-tiny-py-F16 qwen2-tiny-py-Q4_K_M; do
    [ "$models" = "$out/models" ] || cp "$models/$model.gguf" "$out/models/"
    chmod 644 "$out/models/$model.gguf"
    for entry in "${prompts[@]}"; do
        record "$model/${entry%%|*}" "$model" "${entry#*|}" "${clean[@]}"
    done
done
record qwen2-tiny-py-F16/read_lines-defaults qwen2-tiny-py-F16 "${prompts[0]#*|}"
du -sh "$out"
