#!/usr/bin/env bash
# What recording costs: time and processor time of a whole process with the tap over those without, alternating within one run,
# and what is written: with outputs kept, node by node, hashes alone, one layer.
#
#   scripts/bench-record.sh MODEL [TOKENS] [ROUNDS]
#
#   LIBS              a folder of llama.cpp's shared libraries, driven by scripts/record/driver.c
#   LLAMA_COMPLETION  without LIBS: a dynamically linked llama-completion (default: the one on the PATH)
#   PARITY            the parity to record with (default: target/release/parity)
#   DUMPS             folder for the recordings (default: a temporary one)
#   LEVELS            which of them (default: all): own (outputs of the rows that the program itself wants logits of), outputs (of
#                     all rows, as record does by default), nodes hash layer none
#   STEPS             with LIBS: so many decode steps behind the tokens, and what one of them takes as the program sees it
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
parity=$(realpath "${PARITY:-target/release/parity}")
[ -x "$parity" ] || lacks "no $parity: cargo build --release, or PARITY=PATH"
work=${DUMPS:-$(mktemp -d)}
[ -n "${DUMPS:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
levels=${LEVELS:-own outputs nodes hash layer}

if [ -n "${LIBS:-}" ]; then
    cc -O1 -o "$work/driver" scripts/record/driver.c -ldl
    # Ids that every vocabulary has, no two neighbours alike.
    ids=$(for ((i = 1; i <= tokens + ${STEPS:-0}; i++)); do printf ' %d' $((3 + i * 73 % 300)); done)
    # shellcheck disable=SC2206
    program=("$work/driver" "$LIBS" "$model" "$tokens" $ids)
    export DRIVER_THREADS=${DRIVER_THREADS:-$(nproc)} DRIVER_TIMES=1
else
    completion=${LLAMA_COMPLETION:-llama-completion}
    command -v "$completion" >/dev/null || lacks "no $completion on the PATH: LLAMA_COMPLETION names one, scripts/build-llama.sh builds one"
    # About as many tokens as asked for: one for each word, in most vocabularies.
    prompt=$(for i in $(seq 1 "$tokens"); do printf ' the'; done)
    program=("$completion" -m "$model" -p "$prompt" -n 1 --temp 0 -no-cnv -t "$(nproc)")
fi

# Milliseconds, and those of processors, of a command.
took() { # command…
    # Nobody waits for a disk that is busy with what the run before wrote.
    sync
    local TIMEFORMAT='%R %U %S'
    { time "$@" </dev/null >"$work/out" 2>&1; } 2>&1 | awk '{ printf "%d %d\n", $1 * 1000, ($2 + $3) * 1000 }'
}
record() { # flags…
    rm -rf "$work/dump"
    took "$parity" record -o "$work/dump" "$@" -- "${program[@]}"
}
# What the program said of a decode step.
step() { sed -n 's/^a decode step takes \(.*\) ms$/\1/p' "$work/out"; }
flags() { # level
    case $1 in
    own) echo --own-rows ;;
    outputs) ;;
    nodes | none) echo "--observe $1" ;;
    hash) echo --hash ;;
    layer) echo --layer 0 ;;
    *) lacks "no level $1" ;;
    esac
}
for name in untapped $levels; do : >"$work/$name"; done
# Nobody pays for reading the file the first time.
took "${program[@]}" >/dev/null
for round in $(seq 1 "$rounds"); do
    for name in $levels; do
        took "${program[@]}" >>"$work/untapped"
        step >>"$work/step-untapped"
        # shellcheck disable=SC2046
        record $(flags "$name") >>"$work/$name"
        step >>"$work/step-$name"
        grep -h '^recorded' "$work/out" | sed 's/^recorded *//; s/ in [^ ]*$//' >"$work/what-$name"
    done
done
rm -rf "$work/dump"
median() { cut -d' ' -f"$2" "$work/$1" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
fastest() { cut -d' ' -f"$2" "$work/$1" | sort -n | head -n 1; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }
# The fastest of each is what a machine with other work on it can still say.
printf '%-9s %8s %6s %8s   %9s %6s %8s\n' '' 'wall ms' 'x' 'fastest' 'processor' 'x' 'fastest'
for name in untapped $levels; do
    printf '%-9s' "$name"
    for field in 1 2; do
        ms=$(median "$name" $field)
        printf ' %8d %6s %8s  ' "$ms" "$(ratio "$ms" "$(median untapped $field)")" \
            "$(ratio "$(fastest "$name" $field)" "$(fastest untapped $field)")"
    done
    printf ' %s\n' "$(cat "$work/what-$name" 2>/dev/null || true)"
done
printf 'median of %d (untapped: %d), %d tokens, %d cores, load %s\n' "$rounds" "$(wc -l <"$work/untapped")" "$tokens" "$(nproc)" \
    "$(cut -d' ' -f1 /proc/loadavg)"
if [ -n "${STEPS:-}" ]; then
    for name in untapped $levels; do
        printf '%s%s %s' "$([ "$name" = untapped ] && echo 'the fastest decode step, in ms: ' || echo ', ')" "$name" "$(sort -n "$work/step-$name" | head -n 1)"
    done
    printf '\n'
fi
