#!/bin/sh
# Compares parity's tokens with llama.cpp's on every model given: recorded texts, source code, every
# assigned character, bytes that are not UTF-8, and llama.cpp's own vectors (MODEL.inp, MODEL.out) where
# they lie beside a model.
#
#   scripts/check-tokenizer.sh path/to/llama-tokenize model.gguf llama.cpp/models/ggml-vocab-qwen2.gguf …
set -eu
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

if [ $# -lt 2 ]; then
    echo "usage: $0 LLAMA_TOKENIZE MODEL.gguf…" >&2
    exit 2
fi
PARITY_LLAMA_TOKENIZE=$(realpath "$1")
shift
PARITY_TOKENIZER_MODELS=$(realpath "$@")
export PARITY_LLAMA_TOKENIZE PARITY_TOKENIZER_MODELS

checks=equals_llama_tokenize
for model in "$@"; do
    if [ -e "$model.inp" ]; then
        checks="$checks equals_llama_cpp_vectors"
        break
    fi
done
cd "$(dirname "$0")/.."
# shellcheck disable=SC2086 # one argument per test
exec cargo test --release --test files -- --ignored --nocapture $checks
