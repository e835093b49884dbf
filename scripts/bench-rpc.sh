#!/usr/bin/env bash
# What the proxy of ggml's RPC costs in decode: what a step takes as the client sees it, and the processor time of client, proxy and
# server, over those without the proxy, alternating within one run.
#
#   scripts/bench-rpc.sh MODEL [STEPS] [ROUNDS]
#
#   LIBS      folder of llama.cpp's shared libraries with libggml-rpc and ggml-rpc-server (required)
#   PARITY    the parity to record with (default: target/release/parity)
#   DUMPS     folder for the recordings (default: a temporary one)
#   LEVELS    which of nodes (every node by itself), outputs (whole graphs, nodes kept), none (whole graphs as they are); default: all
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
model=$(realpath "${1:?MODEL is a model file}") steps=${2:-32} rounds=${3:-3}
parity=$(realpath "${PARITY:-target/release/parity}")
libs=$(realpath "${LIBS:?LIBS is the folder of llama.cpp\'s shared libraries and ggml-rpc-server}")
work=${DUMPS:-$(mktemp -d)} levels=${LEVELS:-nodes outputs none}
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null || true; }
trap 'stop; [ -n "${DUMPS:-}" ] || rm -rf "$work"' EXIT
mkdir -p "$work"
cc -O1 -o "$work/driver" scripts/record/driver.c -ldl

# Clock ticks of a process so far.
ticks() { sed 's/.*) //' "/proc/$1/stat" | awk '{ print $12 + $13 }'; }
# A decode step and all processor time of a run, in ms; what is decoded are the tokens behind the first eight.
took() { # level decoded
    local port ids i command processor
    port=$((20000 + RANDOM % 12000))
    "$libs/ggml-rpc-server" --host 127.0.0.1 --port "$port" --device CPU --threads 1 >"$work/server.log" 2>&1 &
    server=$!
    while sleep 0.2 && kill -0 "$server"; do ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break; done
    ids=$(for ((i = 1; i <= 8 + $2; i++)); do printf ' %d' $((3 + i * 73 % 300)); done)
    # shellcheck disable=SC2206
    command=("$work/driver" "$libs" "$model" 8 $ids)
    if [ "$1" = plain ]; then command=(env "LLAMA_ARG_RPC=127.0.0.1:$port" "${command[@]}"); else
        command=("$parity" record --force --rpc --server "127.0.0.1:$port" --observe "$1" -m "$model" -o "$work/dump" --
            env 'LLAMA_ARG_RPC={rpc}' "${command[@]}")
    fi
    local TIMEFORMAT='%U %S'
    processor=$( { time DRIVER_TIMES=1 DRIVER_THREADS=1 "${command[@]}" </dev/null >"$work/out" 2>"$work/err"; } 2>&1) ||
        { tail "$work/err" >&2; exit 1; }
    processor=$(awk -v ticks="$(ticks "$server")" -v hz="$(getconf CLK_TCK)" '{ print 1000 * ($1 + $2 + ticks / hz) }' <<<"$processor")
    echo "$(sed -n 's/^a decode step takes \(.*\) ms$/\1/p' "$work/out") $processor"
    stop
}
for level in plain $levels; do : >"$work/steps-$level"; : >"$work/processor-$level"; done
took plain 9 >/dev/null
for round in $(seq 1 "$rounds"); do
    for level in plain $levels; do
        # What a model costs to send is in both.
        read -r _ short < <(took "$level" 9)
        read -r step long < <(took "$level" $((9 + steps)))
        echo "$step" >>"$work/steps-$level"
        awk -v a="$long" -v b="$short" -v n="$steps" 'BEGIN { print (a - b) / n }' >>"$work/processor-$level"
    done
done
fastest() { sort -n "$work/$1" | head -n 1; }
ratio() { awk -v a="$(fastest "$1-$2")" -v b="$(fastest "$1-plain")" 'BEGIN { printf "%.2f", a / b }'; }
printf '%-9s %12s %6s %14s %6s\n' '' 'ms a step' x 'processor ms' x
for level in plain $levels; do
    printf '%-9s %12.2f %6s %14.2f %6s\n' "$level" "$(fastest "steps-$level")" "$(ratio steps "$level")" \
        "$(fastest "processor-$level")" "$(ratio processor "$level")"
done
printf 'the fastest of %d, %d steps of %s, %d cores, load %s\n' "$rounds" "$steps" "$(basename "$model")" "$(nproc)" \
    "$(cut -d' ' -f1 /proc/loadavg)"
