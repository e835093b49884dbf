#!/usr/bin/env bash
# How long `parity guess` takes on a GPU in the geometry of Qwen2.5-1.5B, and whether it answers as on the CPU: 40 greedy
# tokens of a healthy engine and of some with a mistake, all hypotheses.
#
#   scripts/gpu/guess.sh [OUT.json]     (default: reports/guess/gpu.json)
#
#   PARITY  the program, MEASURE  the example `gpu`, which makes the model (else both are built with cargo)
#   MODEL   a model in place of the made one        WITHOUT_CPU=1  on the GPU alone
set -euo pipefail
WITHOUT_CPU=${WITHOUT_CPU:-}
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
out=$(realpath -m "${1:-$(dirname "$0")/../../reports/guess/gpu.json}")
cd "$(dirname "$0")/../.."
[ -n "${PARITY:-}" ] || cargo build --release --bin parity --example gpu
parity=${PARITY:-target/release/parity} measure=${MEASURE:-target/release/examples/gpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=${MODEL:-}
if [ -z "$model" ]; then
    model=$work/geometry.gguf
    "$measure" synth "$model" 1.5B
fi
prompt=785,3974,13876,38835,34208
json() { python3 -c "import json, sys; told = json.load(open(sys.argv[1])); print($2)" "$1"; }

{
    echo "{\"device\": \"$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)\", \"cores\": $(nproc),"
    echo " \"commit\": \"${PARITY_COMMIT:-$(git describe --always --dirty 2>/dev/null)}\", \"cases\": ["
    first=1
    for mistake in healthy attn.kv_head norm.unit_offset rope.interleaved rope.base linear.no_bias; do
        inject=(--inject "$mistake")
        [ "$mistake" != healthy ] || inject=()
        rm -rf "$work/dump"
        "$parity" run -m "$model" --tokens "$prompt" -n 40 --no-audit --device cuda --checkpoint logits \
            --dump "$work/dump" --format json "${inject[@]}" >/dev/null || true
        seen=$(json "$work/dump/manifest.json" "','.join(map(str, told['tokens'][5:]))")
        for device in cuda cpu; do
            [ "$device$WITHOUT_CPU" != cpu1 ] || continue
            start=$(date +%s.%N)
            "$parity" guess -m "$model" --tokens "$prompt" --tokens-seen "$seen" --device "$device" --format json \
                >"$work/told.json" || true
            seconds=$(python3 -c "print(round($(date +%s.%N) - $start, 2))")
            [ -n "$first" ] || echo ","
            first=
            json "$work/told.json" "json.dumps({'engine': '$mistake', 'device': '$device', 'seconds': $seconds,
                'answer': told['answer'], 'aliases': told['aliases'], 'tried': told['tried'], 'notes': told['notes'],
                'text': told['text'][:200]})" | tr -d '\n'
            echo "$mistake on $device: $seconds s, $(json "$work/told.json" "told['answer']")" >&2
        done
    done
    echo "]}"
} >"$work/all.json"
python3 -m json.tool --indent 1 "$work/all.json" >"$out"
