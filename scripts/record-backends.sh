#!/usr/bin/env bash
# Records llama.cpp's CUDA, Vulkan or other libraries on small models, for what docs/backends.md says of their arithmetic:
# every weight type in prefill, small batches and decode (tiny: with flash attention, plain: without), heads of several sizes with flash attention and without, long contexts, caches
# of other types, and five other architectures.
#
#   scripts/record-backends.sh LIBS OUT [PART…]     parts: tiny plain heads long caches archs (default: all)
#
# LIBS is a folder of llama.cpp's shared libraries; a CPU-type Vulkan device (llvmpipe) is only taken with
# GGML_VK_VISIBLE_DEVICES=0. OUT/models and OUT/dumps are made. What could not be recorded is said, and is no failure.
#
#   PARITY    the parity to record with (default: target/release/parity)
#   PYTHON    a python with numpy and gguf, to make the models (default: python3)
#   JOBS      recordings at a time (default: 4)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
libs=$(realpath "${1:?usage: scripts/record-backends.sh LIBS OUT}") out=${2:?usage: scripts/record-backends.sh LIBS OUT}
shift 2
mkdir -p "$out/models" "$out/dumps" "$out/logs" "$out/bin"
out=$(realpath "$out")
parity=$(realpath "${PARITY:-$(dirname "$0")/../target/release/parity}")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
parts=${*:-tiny plain heads long caches archs}

for tool in driver quantize; do cc -O1 -o "$out/bin/$tool" scripts/record/$tool.c -ldl; done
export out libs parity

# The types of weights, by llama.cpp's number.
types=(F32:0 BF16:32 Q4_0:2 Q4_1:3 Q5_0:8 Q5_1:9 Q8_0:7 Q2_K:10 Q3_K_M:12 Q4_K_M:15 Q5_K_M:17 Q6_K:18 IQ4_XS:30)

quantise() { # model out type
    [ -e "$2" ] || "$out/bin/quantize" "$libs" "$1" "$2.part" "$3" >"$out/logs/quantize" 2>&1 && mv -f "$2.part" "$2"  2>/dev/null || [ -e "$2" ]
}

list=$out/list
: >"$list"
plan() { # name model batches tokens flash cache checkpoints
    printf '%s\n' "$*" >>"$list"
}
tokens() { # count: ids below 320, no two neighbours alike
    local i text=
    for ((i = 1; i <= $1; i++)); do text+=${text:+,}$((3 + (i * 73 + i / 7 * 11) % 300)); done
    echo "$text"
}

for part in $parts; do
    case $part in
    tiny | plain)
        cp -n reference-dumps/models/qwen2-tiny-py-F16.gguf "$out/models/" || true
        cp -n reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf "$out/models/" || true
        for type in F16 "${types[@]}"; do
            name=qwen2-tiny-py-${type%%:*}
            quantise reference-dumps/models/qwen2-tiny-py-F16.gguf "$out/models/$name.gguf" "${type##*:}" || continue
            case $part$name in
            tiny*) plan "$name" "$name" 20,9,3 "$(tokens 33)" on - - ;;
            *) plan "$name-plain" "$name" 20,9,3 "$(tokens 33)" off - - ;;
            esac
        done ;;
    heads | long | caches)
        for shape in 64-8-2 64-4-4 80-4-2 96-4-4 112-4-2 128-4-1 128-8-1 128-2-2 256-2-1; do
            model=random-$shape
            # shellcheck disable=SC2086
            [ -e "$out/models/$model.gguf" ] ||
                "$python" scripts/record/random-model.py "$out/models/$model.gguf" ${shape//-/ } || continue
            case $part in
            heads)
                plan "$model" "$model" 40,5 "$(tokens 47)" on - -
                case $shape in 64-8-2 | 128-4-1) plan "$model-plain" "$model" 40,5 "$(tokens 47)" off - - ;; esac ;;
            long)
                case $shape in 64-8-2 | 128-4-1 | 128-2-2 | 256-2-1)
                    plan "$model-long" "$model" 300,20 "$(tokens 322)" on - attn ;;
                esac
                [ "$shape" != 128-2-2 ] || plan "$model-long-plain" "$model" 300,20 "$(tokens 322)" off - attn ;;
            caches)
                # Keys and values, by llama.cpp's numbers: F32 0, F16 1, Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8,
                # IQ4_NL 20, BF16 30. One and two queries have kernels of their own.
                case $shape in
                64-8-2) caches=(0 30 8 2 3 6 7 20 8,1 1,8 8,2 7,3) long=(8 2 7) plain=(8,1 2,1) ;;
                128-2-2 | 256-2-1) caches=(8 2) long=(8) plain=() ;;
                96-4-4) caches=(8 7) long=() plain=() ;;
                *) continue ;;
                esac
                for cache in "${caches[@]}"; do plan "$model-cache$cache" "$model" 20,2 "$(tokens 25)" on "$cache" attn; done
                for cache in "${long[@]}"; do plan "$model-cache$cache-long" "$model" 300,2 "$(tokens 305)" on "$cache" attn; done
                for cache in "${plain[@]}"; do plan "$model-cache$cache-plain" "$model" 20,2 "$(tokens 25)" off "$cache" -; done ;;
            esac
        done ;;
    archs)
        archs=(qwen3moe-moe gemma3-dense gpt-oss-moe mamba2-dense qwen35-dense)
        "$python" -W ignore tests/data/archs/fill.py "$out/models" "${archs[@]}"
        for name in "${archs[@]}"; do
            plan "$name" "$name" 20,4 "$(seq -s, 5 5 125)" on - -
            if [[ $name == *-moe ]] && quantise "$out/models/$name.gguf" "$out/models/$name-Q8_0.gguf" 7; then
                plan "$name-Q8_0" "$name-Q8_0" 20,4 "$(seq -s, 5 5 125)" on - -
            fi
        done ;;
    *) echo "no part $part" >&2; exit 2 ;;
    esac
done

one() { # name model batches tokens flash cache checkpoints
    local filter=()
    [ "$6" = - ] || export DRIVER_CACHE=$6
    # What attention reads, rotated for block-quantised caches, and what its products read.
    if [ "$7" = attn ]; then
        filter=(--checkpoint embed --checkpoint 'blk.0.mul_mat*')
        for id in norm attn_norm q_proj k_proj v_proj v q_rope k_rope attn_scores attn_probs flash_attn_ext attn_ctx; do
            filter+=(--checkpoint "blk.0.$id")
        done
    fi
    export DRIVER_FLASH=$5
    # shellcheck disable=SC2086
    if "$parity" record --force -o "$out/dumps/$1" ${filter[@]+"${filter[@]}"} -- \
        "$out/bin/driver" "$libs" "$out/models/$2.gguf" "$3" ${4//,/ } >"$out/logs/$1" 2>&1 </dev/null; then
        printf 'recorded  %-28s %s\n' "$1" "$(sed -n 's/^recorded *//p' "$out/logs/$1")"
    else
        printf 'FAILED    %-28s %s\n' "$1" "$(tail -n 1 "$out/logs/$1" | cut -c -100)"
    fi
}
export -f one
tr '\n' '\0' <"$list" | xargs -0 -n 1 -P "${JOBS:-4}" bash -c 'one $0'
