#!/usr/bin/env bash
# llama.cpp on the CPU against another device: the tiny model in every quantisation, and models of other architectures.
#
#   scripts/ab-backends.sh LLAMA_COMPLETION OUT [MODEL.gguf…]     e.g. a build with CUDA, or Vulkan on llvmpipe
#
# OUT gets a report for each model; the answers are printed, one line each. Exit code 1 where a pair is not healthy.
#
#   PARITY   the parity to compare with (default: target/release/parity)
#   FLAGS_A  flags of side A (default: -ngl 0)
#   FLAGS_B  flags of side B (default: -ngl 99)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

llama=${1:?usage: scripts/ab-backends.sh LLAMA_COMPLETION OUT [MODEL.gguf…]}
out=${2:?usage: scripts/ab-backends.sh LLAMA_COMPLETION OUT [MODEL.gguf…]}
shift 2
parity=${PARITY:-target/release/parity}
mkdir -p "$out"
[ $# -gt 0 ] || set -- reference-dumps/models/*.gguf
status=0
for model in "$@"; do
    name=$(basename "$model" .gguf)
    code=0
    "$parity" ab --a "${FLAGS_A:--ngl 0}" --b "${FLAGS_B:--ngl 99}" -o "$out/$name" --force --report "$out/$name.report" \
        --format markdown -- "$llama" -m "$model" -p 'def read_lines(path):' -n 8 --temp 0 --ignore-eos -no-cnv --no-warmup \
        >"$out/$name.md" 2>"$out/$name.log" || code=$?
    [ "$code" = 0 ] || status=1
    printf '%-32s %s  %s\n' "$name" "$code" "$(sed -n '3p' "$out/$name.md")"
    rm -rf "${out:?}/$name"
done
exit "$status"
