#!/usr/bin/env bash
# What recording costs: whole-process time with the tap over that without, alternating within one run.
#
#   scripts/bench-record.sh MODEL [TOKENS] [ROUNDS]
#
#   LLAMA_COMPLETION  a dynamically linked llama-completion (default: the one on the PATH)
#   PARITY            the parity to record with (default: target/release/parity)
#   DUMPS             folder for the recordings (default: a temporary one)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

lacks() {
    echo "bench-record.sh: $1" >&2
    exit 2
}
model=${1:-}
[ -n "$model" ] || lacks "no model: scripts/bench-record.sh MODEL [TOKENS] [ROUNDS]"
[ -f "$model" ] || lacks "no file $model"
tokens=${2:-290}
rounds=${3:-5}
completion=${LLAMA_COMPLETION:-llama-completion}
command -v "$completion" >/dev/null || lacks "no $completion on the PATH: LLAMA_COMPLETION names one, scripts/build-llama.sh builds one"
parity=$(realpath "${PARITY:-target/release/parity}")
[ -x "$parity" ] || lacks "no $parity: cargo build --release, or PARITY=PATH"
work=${DUMPS:-$(mktemp -d)}
[ -n "${DUMPS:-}" ] || trap 'rm -rf "$work"' EXIT

# About as many tokens as asked for: one for each word, in most vocabularies.
prompt=$(for i in $(seq 1 "$tokens"); do printf ' the'; done)
program=("$completion" -m "$model" -p "$prompt" -n 1 --temp 0 -no-cnv -t "$(nproc)")

seconds() { # command…
    local start
    start=$(date +%s%N)
    "$@" </dev/null >"$work/out" 2>&1
    echo $((($(date +%s%N) - start) / 1000000))
}
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

for name in untapped all layer; do : >"$work/$name"; done
for round in $(seq 1 "$rounds"); do
    seconds "${program[@]}" >>"$work/untapped"
    rm -rf "$work/dump"
    seconds "$parity" record -o "$work/dump" -- "${program[@]}" >>"$work/all"
    grep -h '^recorded' "$work/out" | sed 's/ in [^ ]*$//' >"$work/what"
    rm -rf "$work/dump"
    seconds "$parity" record -o "$work/dump" --layer 0 -- "${program[@]}" >>"$work/layer"
done
rm -rf "$work/dump"
cat "$work/what"
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }
fastest() { sort -n "$1" | head -n 1; }
# The fastest of each is what a machine with other work on it can still say.
for name in untapped all layer; do
    ms=$(median <"$work/$name")
    printf '%-9s %6d ms  %s x  fastest %s x   (%s)\n' "$name" "$ms" "$(ratio "$ms" "$(median <"$work/untapped")")" \
        "$(ratio "$(fastest "$work/$name")" "$(fastest "$work/untapped")")" "$(sort -n "$work/$name" | tr '\n' ' ')"
done
printf 'median of %d, %d cores, load %s\n' "$rounds" "$(nproc)" "$(cut -d' ' -f1 /proc/loadavg)"
