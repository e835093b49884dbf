#!/usr/bin/env bash
# Records with llama.cpp releases of two years and with programs of three languages, and compares
# every recording with the CPU engine: the same checkpoints, none missing, each within rounding. Where ggml loads the
# recorder (--load), the files have to be the same byte by byte.
#
#   scripts/record-matrix.sh                 a release of each kind, Node, Python
#   scripts/record-matrix.sh all             every release known
#   scripts/record-matrix.sh 3.3.0 node …    only these: versions of @node-llama-cpp/linux-x64, node, python,
#                                            completion (every llama.cpp tool that is on the PATH)
#
#   PARITY    the parity to record with (default: target/release/parity)
#   MATRIX    folder for downloads and dumps, kept (default: a temporary one)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

parity=$(realpath "${PARITY:-target/release/parity}")
models=$(realpath reference-dumps/models)
model=$models/qwen2-tiny-py-F16.gguf
prompt='def read_lines(path):'
scripts=$PWD/scripts/record
if [ -n "${MATRIX:-}" ]; then work=$(mkdir -p "$MATRIX" && realpath "$MATRIX"); else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi

# b4234 (Dec 2024) to v0.5.0 (Sep 2026)
releases=(3.3.0 3.5.0 3.7.0 3.9.0 3.12.0 3.14.0 3.14.4 3.16.0 3.17.1 3.18.1 3.19.1 3.20.0 3.21.1 3.22.1)
some=(3.3.0 3.7.0 3.14.0 3.18.1 3.22.1 node python)
case "${1:-}" in
'') wanted=("${some[@]}") ;;
all) wanted=("${releases[@]}" node python completion) ;;
*) wanted=("$@") ;;
esac

failed=()

# Records a command and compares the dump with the engine: exit 0 means that no checkpoint is missing.
check() { # name command…
    local name=$1 dump=$work/dump-$1
    shift
    rm -rf "$dump"
    if ! "$parity" record -o "$dump" --verify -- "$@" >"$work/$name.log" 2>&1 </dev/null ||
        ! "$parity" run -m "$model" --reference "$dump" >"$work/$name.report" 2>&1; then
        failed+=("$name")
        printf '%-12s FAILED\n' "$name"
        tail -n 20 "$work/$name.log" "$work/$name.report" 2>/dev/null || true
        return
    fi
    printf '%-12s %s\n' "$name" "$(grep -h -m1 '^recorded' "$work/$name.log" | sed 's/^recorded *//; s/ in [^ ]*$//')"
    printf '%-12s %s\n' '' "$(grep -h -m1 '^PARITY' "$work/$name.report")"
}

# Records a command once more, with the recorder loaded by ggml, and compares it with a preloaded recording of the same.
loaded() { # name command…
    local name=$1 dump=$work/dump-$1 file
    shift
    rm -rf "$dump-preloaded" "$dump-loaded"
    if ! { "$parity" record -o "$dump-preloaded" -- "$@" && "$parity" record --load -o "$dump-loaded" -- "$@"; } \
        >"$work/$name-loaded.log" 2>&1 </dev/null; then
        failed+=("$name --load")
        printf '%-12s FAILED with --load\n' "$name"
        tail -n 20 "$work/$name-loaded.log"
        return
    fi
    for file in "$dump-preloaded"/*; do
        # The manifest says when it was made.
        [ "${file##*/}" = manifest.json ] || cmp "$file" "$dump-loaded/${file##*/}" || failed+=("$name --load ${file##*/}")
    done
    printf '%-12s loaded by ggml: %s files are the same\n' '' "$(ls "$dump-loaded" | wc -l)"
}

release() { # version
    local at=$work/npm-$1
    if [ ! -d "$at" ]; then
        mkdir -p "$at.part"
        (cd "$at.part" && npm pack --silent "@node-llama-cpp/linux-x64@$1" >/dev/null && tar xzf ./*.tgz && rm ./*.tgz)
        mv "$at.part" "$at"
    fi
    local model=$model
    # b4234 multiplies f16 weights by f32 activations in a prefill and by f16 ones in a decode step: no one
    # arithmetic could be declared of both.
    [ "$1" = 3.3.0 ] && model=$models/qwen2-tiny-py-Q4_K_M.gguf
    # Token ids of the prompt, then of what the model says after it.
    check "$1" "$work/driver" "$at/package/bins/linux-x64" "$model" 5 312 863 2039 1444 1518 285 314 511 435
    # Before January 2025 nothing has backends loaded.
    grep -q ggml_backend_load_all_from_path "$at"/package/bins/linux-x64/libggml.* || return 0
    cc -O1 -DLINKED -o "$work/linked-$1" "$scripts/driver.c" -Wl,--no-as-needed "$at"/package/bins/linux-x64/lib{llama,ggml}.* -ldl \
        -Wl,-rpath,"$at/package/bins/linux-x64" -Wl,--allow-shlib-undefined
    loaded "$1" "$work/linked-$1" "$at/package/bins/linux-x64" "$model" 5 312 863 2039 1444 1518 285 314 511 435
}

node_program() {
    local at=$work/node
    if [ ! -d "$at/node_modules" ]; then
        mkdir -p "$at"
        # Without what is optional: builds for every GPU and machine, a gigabyte of them.
        (cd "$at" && npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional \
            node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1 >/dev/null)
    fi
    cp "$scripts/generate.mjs" "$at/"
    check node node "$at/generate.mjs" "$model" "$prompt"
    loaded node node "$at/generate.mjs" "$model" "$prompt"
}

python_program() {
    local at=$work/python
    if [ ! -d "$at" ]; then
        python3 -m venv "$at"
        "$at/bin/pip" install --quiet xllamacpp==2026.10.11549
    fi
    check python "$at/bin/python" "$scripts/generate.py" "$model" "$prompt"
}

# The tools of a llama.cpp that is installed, e.g. one built from the PyPI source package llama-cpp-python.
tools() {
    for tool in llama-completion llama-eval-callback llama-debug; do
        if ! command -v "$tool" >/dev/null; then
            printf '%-12s SKIP: not on the PATH\n' "$tool"
            continue
        fi
        local more=()
        [ "$tool" = llama-completion ] && more=(-n 8 --temp 0 -no-cnv)
        check "$tool" "$tool" -m "$model" -p "$prompt" -t 2 "${more[@]}"
        loaded "$tool" "$tool" -m "$model" -p "$prompt" -t 2 "${more[@]}"
    done
}

[ -x "$work/driver" ] || cc -O1 -o "$work/driver" "$scripts/driver.c" -ldl
for one in "${wanted[@]}"; do
    case "$one" in
    node) node_program ;;
    python) python_program ;;
    completion) tools ;;
    *) release "$one" ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
