#!/usr/bin/env bash
# Records the whole life of a context in a real llama.cpp, on the CPU: rollback, context shift, two and five sequences in one
# cache and in one each, batches that mix them, copies, states that are saved and loaded; a model with attention, one with
# windows, two with recurrent states, one with experts. Every recording is audited and has to be PARITY; then mistakes are
# injected, which have to be found at their node, under their name.
#
#   scripts/record-life.sh [GLOB…]      only cases MODEL/LIFE whose names match
#
#   PARITY    the parity to test (default: target/release/parity)
#   LIBS      folder of llama.cpp's shared libraries (required)
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
driver=$out/driver
cc -O1 -o "$driver" scripts/record/driver.c -ldl
for name in gemma3-dense mamba2-dense qwen3next-moe qwen3moe-moe; do
    [ -e "$out/models/$name.gguf" ] ||
        "${PYTHON:-python3}" -W ignore tests/data/archs/fill.py "$out/models" "$name" >"$out/fill.log" 2>&1
done
cp -n reference-dumps/models/qwen2-tiny-py-F16.gguf "$out/models/qwen2.gguf"

# The lives: words of driver.c, and what the context is made with.
rollback='b0:9 b0:1 b0:3 r0@10 b0:2 b0:1'
shift='b0:12 b0:1 s0@1,6 b0:1 b0:1'
two='b0:7,1:5 b0:1,1:1 b0:1,1:1'
five='b0:4,1:3 b2:5,0:1,1:1 b3:2,4:6 b0:1,1:1,2:1,3:1,4:1'
copy='b0:8 c0>1 b0:1,1:1 r1@6 b1:2,0:1 k1 b1:1'
fork='b0:8 c0>1 b0:1,1:1 b1:2,0:1'
state='b0:8 w0 l1 b0:1,1:1 W b1:2 L b1:1'

words=(PARITY DIVERGES UNDECIDED)
bad=0 healthy=0
# Records and audits one life; FLAGS are parity's.
life() { # model life sequences unified wanted FLAGS…
    local model=$1 of=$2 name=$1/$2 dump audit=0
    [ "$4" = 1 ] && name=$name-unified
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
    if ! DRIVER_SEQUENCES=$3 DRIVER_UNIFIED=$4 DRIVER_THREADS=1 "$parity" record -o "$dump" "${flags[@]}" -- \
        "$driver" "$libs" "$out/models/$model.gguf" "${!of}" 3 17 91 42 8 120 64 5 33 77 101 9 55 13 86 \
        >"$dump.record" 2>&1 </dev/null; then
        printf '%-44s NOT-RECORDED\n' "$name"
        tail -n 3 "$dump.record" | sed 's/^/    /'
        bad=1
        return 0
    fi
    "$parity" audit "$dump" -m "$out/models/$model.gguf" >"$dump.audit" 2>&1 || audit=$?
    local found=${words[$audit]:-FAILED} fault
    fault=$(sed -n 's/^DIVERGES at \([^:]*\):.*(\([a-z_.0-9=]*\)[,)].*/\1 \2/p' "$dump.audit" | head -n 1)
    printf '%-44s %-10s %s\n' "$name" "$found" "$fault"
    case $wanted in
    PARITY) [ "$found" = PARITY ] && healthy=$((healthy + 1)) || bad=1 ;;
    *) [ "$found" = DIVERGES ] && [[ $fault == "$wanted" ]] || { echo "    wanted: $wanted"; bad=1; } ;;
    esac
    if [ "$found" != "${wanted%% *}" ] && [ "$found" != DIVERGES -o "$wanted" = PARITY ]; then
        grep -m 2 -A2 -E '^(DIVERGES|UNDECIDED)|error' "$dump.audit" | sed 's/^/    /' || true
    fi
}
globs=$*

for model in qwen2 gemma3-dense qwen3moe-moe; do
    for of in rollback shift; do life "$model" "$of" 1 0 PARITY; done
done
for model in qwen2 gemma3-dense mamba2-dense qwen3next-moe qwen3moe-moe; do
    for unified in 0 1; do
        life "$model" two 2 "$unified" PARITY
        life "$model" five 5 "$unified" PARITY
        life "$model" state 3 "$unified" PARITY
        life "$model" fork 3 "$unified" PARITY
    done
done
for model in qwen2 gemma3-dense qwen3moe-moe; do life "$model" copy 3 1 PARITY; done
echo "$healthy healthy"
exit "$bad"
