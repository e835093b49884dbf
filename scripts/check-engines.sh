#!/usr/bin/env bash
# The ways in for other people's engines with the real packages: transformers and torch, MLX and tinygrad on the CPU,
# llama.cpp's prebuilt libraries, candle, mistral.rs. Healthy ones are at parity without a flag, mistakes are located and
# none is named wrongly, maps are found by values, conversions are judged from weights and from tensors. It downloads torch
# where PYTHON has none; fails where one of them does.
#
#   scripts/check-engines.sh [--candle] [--mistralrs]     also builds and runs these of examples/engines; mistral.rs takes
#                                                         half an hour on two cores
#
#   PARITY   the parity to test (default: target/release/parity, built)
#   PYTHON   a python with torch, transformers, gguf, mlx-lm and tinygrad, which compiles with clang (default: one is set up
#            in target/engines)
#   LIBS     folder of llama.cpp's shared libraries (default: those of an npm package)
#   LLAMA    a GGUF file of the llama architecture, such as SmolLM2's (default: that part is left out, and said)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

if [ -z "${PARITY:-}" ]; then cargo build --release --quiet; fi
PARITY=$(realpath "${PARITY:-target/release/parity}")
export PARITY
work=$PWD/target/engines
mkdir -p "$work"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$work/venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet torch transformers gguf numpy safetensors "mlx[cpu]" mlx-lm tinygrad
    fi
fi
if [ -z "${LIBS:-}" ]; then
    LIBS=$work/npm/package/bins/linux-x64
    if [ ! -d "$LIBS" ]; then
        mkdir -p "$work/npm"
        (cd "$work/npm" && npm pack --silent @node-llama-cpp/linux-x64@3.22.1 >/dev/null && tar xzf ./*.tgz && rm ./*.tgz)
    fi
fi

failed=()
check() { # name command…
    echo "== $1"
    "${@:2}" || failed+=("$1")
}
check "the package" env -C python "$PYTHON" -m unittest discover -s tests
check "healthy models" "$PYTHON" python/tests/healthy.py
check "other families" "$PYTHON" python/tests/families.py
check "mistakes in f32" "$PYTHON" python/tests/mistakes.py --dtype f32
check "mistakes in bf16" "$PYTHON" python/tests/mistakes.py --dtype bf16
check "outputs of modules, hidden states, logits" env DEV=CPU "$PYTHON" python/tests/engines.py
check "maps by values" "$PYTHON" python/tests/maps.py
check "conversions" env DRIVER_CACHE=0 "$PYTHON" python/tests/conversions.py --libraries "$LIBS"
if [ -n "${LLAMA:-}" ]; then
    check "Hugging Face's order of rows" "$PYTHON" python/tests/smollm2.py "$LLAMA"
else
    echo "SKIP: LLAMA names no model of the llama architecture" >&2
fi
tiny=$PWD/reference-dumps/models/qwen2-tiny-py-F16.gguf
if [[ " $* " == *" --candle "* ]]; then
    check "candle runs" cargo run --release --locked --quiet --manifest-path examples/engines/candle/Cargo.toml -- \
        "$tiny" 312,863,2039,1444,1518 --decode 8 --dump "$work/candle"
    check "candle" "$PARITY" diff "$work/candle" reference-dumps/qwen2-tiny-py-F16/read_lines -m "$tiny"
    check "candle's hidden states and logits alone" "$PYTHON" python/tests/engines.py candle-f32 \
        --candle "${CARGO_TARGET_DIR:-examples/engines/candle/target}/release/candle-example"
fi
if [[ " $* " == *" --mistralrs "* ]]; then
    check "mistral.rs runs" examples/engines/mistralrs/run.sh "$tiny" 312,863,2039,1444,1518 --decode 8 --dump "$work/mistralrs"
    check "mistral.rs" "$PARITY" diff "$work/mistralrs" reference-dumps/qwen2-tiny-py-F16/read_lines -m "$tiny"
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
