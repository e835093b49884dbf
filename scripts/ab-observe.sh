#!/usr/bin/env bash
# Whether nodes that are kept until a graph was computed have the bits of nodes that are asked for one by one: what has to be
# shown on a backend before parity record keeps outputs there by itself (crates/parity-record/src/kept.rs lists them).
#
#   scripts/ab-observe.sh LIBS OUT [MODEL.gguf…]    default: the tiny model in 14 types, and ten other architectures
#
# LIBS is a folder of llama.cpp's shared libraries; of Vulkan, a device that is a CPU (llvmpipe) is taken with
# GGML_VK_VISIBLE_DEVICES=0. Prints a line for each model: the prefill, a second batch and decode steps, compared bit by bit, and the
# logits of a run that nobody looks at. Exit code 1 where bits of kept nodes differ.
#
#   PARITY    the parity to record with (default: target/release/parity)
#   PYTHON    a python with numpy and gguf, to make models (default: python3)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
libs=$(realpath "${1:?usage: scripts/ab-observe.sh LIBS OUT [MODEL.gguf…]}") out=${2:?usage: scripts/ab-observe.sh LIBS OUT [MODEL.gguf…]}
shift 2
mkdir -p "$out"
out=$(realpath "$out")
parity=$(realpath "${PARITY:-$(dirname "$0")/../target/release/parity}")
cd "$(dirname "$0")/.."
. scripts/record/models.sh

if [ $# = 0 ]; then
    mapfile -t models < <(ab_models "$libs" "$out")
    set -- "${models[@]}"
fi
cc -O1 -o "$out/driver" scripts/record/driver.c -ldl

bad=0
for model in "$@"; do
    name=$(basename "$model" .gguf) said=
    for level in outputs nodes none; do
        rm -rf "$out/$level"
        # Twelve tokens in a batch, four in another, and three by themselves; ids that every vocabulary here has.
        if ! "$parity" record --observe "$level" -o "$out/$level" -- "$out/driver" "$libs" "$(realpath "$model")" 12,4 \
            3 17 91 42 8 120 64 5 33 77 101 9 55 13 86 23 7 68 111 >"$out/$name.$level.log" 2>&1 </dev/null; then
            said="not recorded ($level): $(grep -v '^[a-z_]*:' "$out/$name.$level.log" | tail -n 1 | cut -c -90)"
            break
        fi
    done
    if [ -z "$said" ]; then
        level=$(sed -n 's/.*"observed": "\(.*\)".*/\1/p' "$out/outputs/manifest.json")
        said="observed: $level" code=0
        "$parity" diff --bitwise "$out/outputs" "$out/nodes" >"$out/$name.txt" 2>&1 || code=$?
        said+=", $(sed -n 's/.*note: bits: //p' "$out/$name.txt" | head -n 1)"
        if [ "$code" != 0 ] || [ "$level" != outputs ]; then bad=1 said="FAILED ($code) $said"; fi
        "$parity" diff --bitwise "$out/none" "$out/nodes" --checkpoint logits >"$out/$name.none.txt" 2>&1 &&
            said+="; logits unseen: equal" || said+="; logits unseen: other bits"
    fi
    printf '%-32s %s\n' "$name" "$said"
    grep -hE '^parity: (computed|read as|to keep)' "$out/$name.outputs.log" | sed 's/^/    /' || true
done
rm -rf "$out/outputs" "$out/nodes" "$out/none"
exit "$bad"
