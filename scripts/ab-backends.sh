#!/usr/bin/env bash
# llama.cpp on the CPU against another device: the tiny model in 14 types of weights, and ten other architectures, each with a
# batch, a smaller one and decode steps.
#
#   scripts/ab-backends.sh LIBS OUT [MODEL.gguf…]
#
# LIBS is a folder of llama.cpp's shared libraries, with CUDA's or Vulkan's among them. OUT/models are made where no models are
# named (a Python with gguf makes the ten); OUT/summary.txt gets what is said of each, and OUT/NAME.json the report. Exit code 1
# where a pair is not healthy.
#
#   PARITY   the parity to compare with (default: target/release/parity)
#   PYTHON   a python with numpy and gguf, to make models (default: python3)
#   A_ENV    variable of side A (default: hides all devices)
#   B_ENV    variable of side B, that shows the device: GGML_VK_VISIBLE_DEVICES=0, CUDA_VISIBLE_DEVICES=0 (default: that of the
#            library that is there; of Vulkan it takes llvmpipe too)
#   FLAGS    further flags of parity ab
#   JOBS     models at a time (default: cores)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
usage='usage: scripts/ab-backends.sh LIBS OUT [MODEL.gguf…]'
libs=$(realpath "${1:?$usage}") out=${2:?$usage}
shift 2
mkdir -p "$out"
out=$(realpath "$out")
parity=$(realpath "${PARITY:-$(dirname "$0")/../target/release/parity}")
for model in "$@"; do set -- "$@" "$(realpath "$model")"; shift; done
cd "$(dirname "$0")/.."
. scripts/record/models.sh

case $(ls "$libs") in
*ggml-cuda*) variable=CUDA_VISIBLE_DEVICES ;;
*ggml-vulkan*) variable=GGML_VK_VISIBLE_DEVICES ;;
*) echo "$libs: neither CUDA nor Vulkan is there" >&2; exit 2 ;;
esac
if [ $# = 0 ]; then
    mapfile -t models < <(ab_models "$libs" "$out")
    set -- "${models[@]}"
fi
cc -O1 -o "$out/driver" scripts/record/driver.c -ldl
variable_a=${A_ENV:-$variable=} variable_b=${B_ENV:-$variable=0} flags=${FLAGS:-}
export parity out libs variable_a variable_b flags
# What is said of one model.
one() {
    local model=$1 name code=0
    name=$(basename "$model" .gguf)
    # Ids that every vocabulary here has.
    # shellcheck disable=SC2086
    "$parity" ab --a-env "$variable_a" --b-env "$variable_b" $flags -o "$out/runs-$name" --force \
        --report "$out/report-$name" -- "$out/driver" "$libs" "$model" 12,4 3 17 91 42 8 120 64 5 33 77 101 9 55 13 86 23 7 68 111 \
        >"$out/$name.txt" 2>"$out/$name.log" || code=$?
    mv -f "$out/report-$name/report.json" "$out/$name.json" 2>/dev/null || true
    rm -rf "$out/runs-$name" "$out/report-$name"
    printf '%s: exit code %s\n' "$name" "$code"
    # The answer up to the table, and in which arithmetic each side computes.
    sed -n '/^PARITY\|^DIVERGES\|^UNDECIDED/,/^$/{/^$/!s/^ *//p}' "$out/$name.txt" | sed 's/^/    /'
    sed -n '/^note: .* computes with/,/^\(note\|$\)/{/^note: .*computes with\|^  /{s/^note: //;p}}' "$out/$name.txt" | sed 's/^ */    /'
    grep -h '^error' "$out/$name.log" | sed 's/^/    /' || true
}
export -f one
printf '%s\0' "$@" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" bash -c 'text=$(one "$0"); printf "%s\n" "$text"' | tee "$out/summary.txt"
grep -q ': exit code' "$out/summary.txt" && ! grep -q ': exit code [^0]' "$out/summary.txt"
