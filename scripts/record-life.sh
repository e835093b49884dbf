#!/usr/bin/env bash
# Records the whole life of a context in a real llama.cpp, on the CPU: rollback, context shift, two and five sequences in one
# cache and in one each, batches that mix them, copies, states that are saved and loaded; a model with attention, one with
# windows, two with recurrent states, one with experts; states that are gone back to, drafts, embeddings, encoders; slots of a
# llama-server. Every recording is audited and has to be PARITY; then mistakes are injected, which have to be found at their
# node, under their name.
#
#   scripts/record-life.sh [GLOB…]      only cases MODEL/LIFE whose names match
#
#   PARITY    the parity to test (default: target/release/parity)
#   LIBS      folder of llama.cpp's shared libraries (required)
#   SERVER    a llama-server, for its slots (default: they are left out)
#   OUT       folder for models and dumps, kept (default: a temporary one)
#   PYTHON    a python with numpy and gguf, to make the models (default: python3)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
parity=$(realpath "${PARITY:-target/release/parity}")
libs=$(realpath "${LIBS:?LIBS is the folder of llama.cpp\'s shared libraries}")
if [ -n "${OUT:-}" ]; then out=$(mkdir -p "$OUT" && realpath "$OUT"); else
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out/models"
driver=$out/driver python=${PYTHON:-python3}
cc -O1 -o "$driver" scripts/record/driver.c -ldl
for name in gemma3-dense mamba2-dense qwen3next-moe qwen3moe-moe qwen35-dense lfm2-dense nemotron_h-dense bailingmoe3-moe; do
    [ -e "$out/models/$name.gguf" ] ||
        "$python" -W ignore tests/data/archs/fill.py "$out/models" "$name" >"$out/fill.log" 2>&1
done
cp -n reference-dumps/models/qwen2-tiny-py-F16.gguf "$out/models/qwen2.gguf"
cp -n reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf "$out/models/draft.gguf"
[ -e "$out/models/t5.gguf" ] || "$python" scripts/record/encoders.py "$out/models"

# The lives: words of driver.c, and what the context is made with.
rollback='b0:9 b0:1 b0:3 r0@10 b0:2 b0:1'
shift='b0:12 b0:1 s0@1,6 b0:1 b0:1'
two='b0:7,1:5 b0:1,1:1 b0:1,1:1'
short='b0:1 b1:1 b0:1 b1:1 b0:2'
five='b0:4,1:3 b2:5,0:1,1:1 b3:2,4:6 b0:1,1:1,2:1,3:1,4:1'
copy='b0:8 c0>1 b0:1,1:1 r1@6 b1:2,0:1 k1 b1:1'
fork='b0:8 c0>1 b0:1,1:1 b1:2,0:1'
state='b0:8 w0 l1 b0:1,1:1 W b1:2 L b1:1'
# A draft of four tokens, of which two are rejected, and the next.
draft='b0:8 m1 b0:8 b0:1 b0:1 b0:1 m0 b0:4 r0@10 m1 r0@10 b0:1 b0:1 b0:1 m0 b0:4 r0@13'
again='b0:7,1:2 b0:1 x b0:3 b0:1,1:2'
pooled='b0:5,1:3 b0:2'
encode='e0:7 e0:3,1:4'
translate='e0:7 b0:3 b0:1 x e0:5 b0:2'
# Requests to a server: two at once, then one that begins like one of them.
slots='3,17,91,42,8,120,64:6+5,33,77,101,9:6 3,17,91,42,8,120,64,1,2:4'

words=(PARITY DIVERGES UNDECIDED)
bad=0 healthy=0 named=0
# Records and audits one life; FLAGS are parity's.
life() { # model life sequences unified wanted FLAGS…
    local model=$1 of=$2 name=$1/$2 dump
    [ "$4" = 1 ] && name=$name-unified
    [ -z "${DRIVER_FLASH:-}" ] || name=$name-scores
    [ -z "${DRIVER_EMBEDDINGS:-}" ] || name=$name-$DRIVER_EMBEDDINGS
    local flags=("${@:6}") wanted=$5
    if [ ${#flags[@]} -gt 0 ]; then name=$name@${flags[1]}; fi
    # shellcheck disable=SC2053
    if [ -n "$globs" ]; then
        local glob match=
        for glob in $globs; do [[ $name == $glob ]] && match=1; done
        [ -n "$match" ] || return 0
    fi
    dump=$out/dumps/$name
    rm -rf "$dump" && mkdir -p "$(dirname "$dump")"
    local command=("$parity" record -o "$dump" "${flags[@]}" -- "$driver" "$libs" "$out/models/$model.gguf" "${!of}"
        3 17 91 42 8 120 64 5 33 77 101 9 55 13 86)
    # What has no vocabulary gets one, of which no word is used.
    [ "$of" != slots ] || command=("$python" scripts/record/requests.py "$slots" "$parity" record -o "$dump" "${flags[@]}" --
        "$SERVER" -m "$out/models/$model.gguf" --port '{port}' -t 1 -ngl 0 --no-warmup -c 512 -np "$3"
        "$([ "$4" = 1 ] && echo --kv-unified || echo --no-kv-unified)" --override-kv
        "tokenizer.ggml.model=str:$([ "$model" = qwen2 ] && echo gpt2 || echo llama)")
    if ! DRIVER_SEQUENCES=$3 DRIVER_UNIFIED=$4 DRIVER_THREADS=1 "${command[@]}" >"$dump.record" 2>&1 </dev/null; then
        printf '%-56s NOT-RECORDED\n' "$name"
        tail -n 3 "$dump.record" | sed 's/^/    /'
        bad=1
        return 0
    fi
    if judge "$name" "$dump" "$model" "$wanted" &&
        { [ "$of" != draft ] || judge "$name/context-1" "$dump/context-1" draft PARITY; }; then
        rm -rf "$dump"
    fi
}
# Audits a dump and says whether the answer is the wanted one.
judge() { # name dump model wanted
    local audit=0 dump=$2
    "$parity" audit "$dump" -m "$out/models/$3.gguf" --format json >"$dump.json" 2>"$dump.audit" || audit=$?
    local found=${words[$audit]:-FAILED}
    # The first divergence and its name.
    [ "$found" != DIVERGES ] || found=$("$python" -c 'import json, sys
first = json.load(open(sys.argv[1]))["first_divergence"]
print(first["checkpoint"], (first["diagnosis"] or [{"fault": "no-name"}])[0]["fault"])' "$dump.json")
    printf '%-56s %s\n' "$1" "$found"
    if [ "$found" = "$4" ]; then
        [ "$found" = PARITY ] && healthy=$((healthy + 1)) || named=$((named + 1))
        return 0
    fi
    echo "    wanted: $4"
    tail -n 3 "$dump.audit" | sed 's/^/    /'
    bad=1
    return 1
}
globs=$*

for model in qwen2 gemma3-dense qwen3moe-moe; do
    for of in rollback shift; do life "$model" "$of" 1 0 PARITY; done
done
for model in qwen2 gemma3-dense mamba2-dense qwen3next-moe qwen3moe-moe; do
    for unified in 0 1; do
        life "$model" two 2 "$unified" PARITY
        life "$model" five 5 "$unified" PARITY
        life "$model" short 2 "$unified" PARITY
        life "$model" state 3 "$unified" PARITY
        life "$model" fork 3 "$unified" PARITY
        life "$model" again 3 "$unified" PARITY
        DRIVER_FLASH=off life "$model" again 3 "$unified" PARITY
    done
done
for model in qwen2 gemma3-dense qwen3moe-moe; do life "$model" copy 3 1 PARITY; done
for model in qwen35-dense lfm2-dense nemotron_h-dense bailingmoe3-moe; do DRIVER_ROLLBACK=4 life "$model" rollback 1 0 PARITY; done
for model in qwen2 qwen3moe-moe; do DRIVER_DRAFT=$out/models/draft.gguf life "$model" draft 1 0 PARITY; done
for pooling in 0 1 2 3; do
    for model in qwen2 gemma3-dense qwen3moe-moe; do DRIVER_EMBEDDINGS=$pooling life "$model" pooled 2 0 PARITY; done
    for model in bert nomic-bert; do DRIVER_EMBEDDINGS=$pooling life "$model" encode 2 0 PARITY; done
done
life t5 translate 1 0 PARITY
if [ -n "${SERVER:-}" ]; then
    for model in qwen2 mamba2-dense qwen3moe-moe; do
        for unified in 0 1; do life "$model" slots 2 "$unified" PARITY; done
    done
fi

# Mistakes, made in llama.cpp: model, life, sequences, one cache or several, node and name.
wrong() { life "$1" "$2" "$3" "$4" "$5 $6" --inject "$6@$5"; }
wrong qwen2 shift 1 0 blk.1.cache_k cache.no_shift
wrong gemma3-dense shift 1 0 blk.0.cache_k cache.no_shift
wrong qwen2 rollback 1 0 blk.2.attn_ctx cache.stale_cell
wrong qwen3moe-moe rollback 1 0 blk.0.attn_ctx cache.stale_cell
wrong qwen2 five 5 1 blk.1.attn_ctx cache.wrong_sequence
wrong gemma3-dense two 2 0 blk.0.attn_ctx cache.wrong_sequence
wrong qwen2 five 5 1 blk.1.attn_ctx attn.mask_shift
wrong qwen2 rollback 1 0 blk.1.attn_ctx attn.stale_cache
wrong qwen2 two 2 0 blk.2.attn_ctx attn.self_only
wrong qwen2 two 2 1 blk.2.q_rope rope.decode_shift
wrong gemma3-dense rollback 1 0 blk.1.k_rope rope.decode_shift
wrong mamba2-dense five 5 0 blk.1.ssm_conv1d state.not_carried
wrong qwen3next-moe two 2 0 blk.0.conv_output_raw state.not_carried
DRIVER_ROLLBACK=4 wrong qwen35-dense rollback 1 0 blk.0.conv_output_raw state.no_rollback
DRIVER_ROLLBACK=4 wrong qwen35-dense rollback 1 0 blk.0.gated_delta_net state.no_rollback
DRIVER_ROLLBACK=4 wrong lfm2-dense rollback 1 0 blk.1.model.layers.__.conv.conv state.no_rollback
DRIVER_ROLLBACK=4 wrong nemotron_h-dense rollback 1 0 blk.1.ssm_scan state.no_rollback
DRIVER_ROLLBACK=4 wrong bailingmoe3-moe rollback 1 0 blk.1.ssm_conv state.no_rollback
DRIVER_DRAFT=$out/models/draft.gguf wrong qwen2 draft 1 0 blk.1.attn_ctx cache.stale_cell
DRIVER_EMBEDDINGS=1 wrong bert encode 2 0 blk.1.attn_ctx attn.no_scale
DRIVER_EMBEDDINGS=1 wrong qwen2 pooled 2 0 result_embd_pooled data.scaled
[ -z "${SERVER:-}" ] || wrong qwen2 slots 2 1 blk.1.attn_ctx cache.wrong_sequence
echo "$healthy healthy, $named mistakes at their node and under their name"
exit "$bad"
