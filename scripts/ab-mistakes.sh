#!/usr/bin/env bash
# A libggml-cpu with five mistakes, built from source beside the other libraries of the same release, and what parity ab says
# of each: an epsilon read from the wrong place in a fused norm (eps), the last columns of one quantised matmul (tail), a
# missing barrier (barrier), an input that a fused kernel overwrites early, which only shows where nobody looks (early), and a
# row that nobody writes (row). One at a time, by GGML_MISTAKE.
#
#   scripts/ab-mistakes.sh SOURCE OUT [LIBS]
#
# SOURCE is llama.cpp's source (scripts/build-llama.sh --source SOURCE); LIBS a folder of its shared libraries of that release, built from SOURCE where it is not
# given. The answers are printed, a line each, and kept in OUT. Exit code 1 where one is not as it should be.
#
#   PARITY    the parity to compare with (default: target/release/parity)
#   RACES     how often parity ab --repeat 10 looks for the race (default: 20)
#   RECORD    folder that takes small recordings of each, for tests/record/mistakes.rs (default: none)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
usage='usage: scripts/ab-mistakes.sh SOURCE OUT [LIBS]'
source=$(realpath "${1:?$usage}") out=${2:?$usage}
mkdir -p "$out"
out=$(realpath "$out")
parity=$(realpath "${PARITY:-$(dirname "$0")/../target/release/parity}")
cd "$(dirname "$0")/.."
jobs=$(nproc)
flags=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_BACKEND_DL=ON
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN")

if [ -n "${3:-}" ]; then libs=$(realpath "$3"); else
    libs=$out/libs
    if [ ! -d "$libs" ]; then
        cmake -S "$source" -B "$out/whole" "${flags[@]}" -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF \
            -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF >"$out/cmake.log"
        cmake --build "$out/whole" --parallel "$jobs" --target llama ggml ggml-cpu >>"$out/cmake.log"
        mv "$out/whole/bin" "$libs"
    fi
fi

if [ ! -e "$out/wrong/libggml-cpu.so" ]; then
    rm -rf "$out/ggml" "$out/build" "$out/wrong"
    cp -r "$source/ggml" "$out/ggml"
    # Some source packages lack the template of its pkg-config file.
    [ -e "$out/ggml/ggml.pc.in" ] || touch "$out/ggml/ggml.pc.in"
    patch --quiet --forward -p1 -d "$out/ggml" <scripts/record/mistakes.patch
    cmake -S "$out/ggml" -B "$out/build" "${flags[@]}" -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF >"$out/ggml.log"
    cmake --build "$out/build" --parallel "$jobs" --target ggml-cpu >>"$out/ggml.log"
    mkdir -p "$out/wrong.part"
    cp -P "$libs"/lib*.so* "$out/wrong.part/"
    rm -f "$out/wrong.part"/libggml-cpu*
    # The library was linked with its own build of the base: the release's answers to that name.
    [ -e "$out/wrong.part/libggml-base.so.0" ] || ln -s libggml-base.so "$out/wrong.part/libggml-base.so.0"
    cp "$(find "$out/build" -name libggml-cpu.so | head -n 1)" "$out/wrong.part/"
    mv "$out/wrong.part" "$out/wrong"
fi
cc -O1 -o "$out/driver" scripts/record/driver.c -ldl
cc -O1 -o "$out/quantize" scripts/record/quantize.c -ldl
f16=reference-dumps/models/qwen2-tiny-py-F16.gguf q4=reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf f32=$out/qwen2-tiny-py-F32.gguf
[ -e "$f32" ] || { "$out/quantize" "$libs" "$f16" "$f32.part" 0 >"$out/quantize.log" 2>&1 && mv "$f32.part" "$f32"; }

tokens=(312 863 2039 1444 1518 285 314 511)
failed=0
# Runs parity ab, and holds its exit code and its answer to what they should be.
check() { # name model exit pattern flags…
    local name=$1 model=$2 want=$3 pattern=$4 code=0
    shift 4
    "$parity" ab --format json "$@" -o "$out/runs/$name" --force -- "$out/driver" '{}' "$model" 5 "${tokens[@]}" \
        >"$out/$name.json" 2>"$out/$name.log" || code=$?
    # Pretty-printed JSON as one line, so that a pattern may span fields.
    if [ "$code" = "$want" ] && tr -s ' \n' ' ' <"$out/$name.json" | grep -qE "$pattern"; then
        printf '%-10s as it should be (%s)\n' "$name" "$code"
    else
        failed=1
        printf '%-10s FAILED: exit code %s, wanted %s and %s\n' "$name" "$code" "$want" "$pattern"
    fi
    grep -m1 -A3 '"answer"' "$out/$name.json" | sed -n '2,3s/^ */    /p' | cut -c -240
}
both=(--a "$libs" --b "$out/wrong")
alone=(--a "$out/wrong")
# Where neither weights nor the cache are rounded, logits show what a small mistake does to them.
exact=()
for side in a b; do exact+=("--$side-env" DRIVER_CACHE=0 "--$side-env" DRIVER_FLASH=off); done
healed='"name": "observation".*RMS_NORM [+] MUL'

check none "$f16" 0 'both sides are healthy' "${both[@]}"
check eps "$f32" 1 "\"first_divergence\": . \"checkpoint\": \"blk.0.attn_norm\".*\"fault\": \"norm.eps\".*$healed" "${both[@]}" \
    "${exact[@]}" --b-env GGML_MISTAKE=eps
check eps-f16 "$f16" 1 '"node": "blk.0.norm".*"checkpoint": "blk.0.attn_norm".*"fault": "norm.eps"' "${alone[@]}" --observation \
    --a-env GGML_MISTAKE=eps
check tail "$q4" 1 '"first_divergence": . "checkpoint": "blk.2.ffn_out".*"fault": "linear.truncated_k"' "${both[@]}" \
    --b-env GGML_MISTAKE=tail
check early "$f16" 1 "$healed" "${both[@]}" --b-env GGML_MISTAKE=early
check row "$f16" 1 '"first_divergence": . "checkpoint": "blk.0.ffn_act"' "${both[@]}" --b-env GGML_MISTAKE=row
check steady "$q4" 0 '"first": null' "${alone[@]}" --repeat 3
races=${RACES:-20} seen=0
for ((i = 1; i <= races; i++)); do
    check race "$q4" 1 '"first": "blk.[0-9]*.ffn_out"' "${alone[@]}" --repeat 10 --a-env GGML_MISTAKE=barrier >"$out/race" &&
        grep -q 'as it should be' "$out/race" && seen=$((seen + 1))
done
sed -n '2,$p' "$out/race"
printf '%-10s seen in %s of %s\n' race "$seen" "$races"
[ "$seen" = "$races" ] || failed=1

if [ -n "${RECORD:-}" ]; then
    mkdir -p "$RECORD"
    take() { # name mistake model flags…
        local name=$1 mistake=$2 model=$3
        shift 3
        GGML_MISTAKE=$mistake "$parity" record --force -o "$RECORD/$name" "$@" -- "$out/driver" "$out/wrong" "$model" 3 "${tokens[@]:0:4}" \
            >"$out/record.log" 2>&1
        sed -i "s#$out/##g" "$RECORD/$name/manifest.json"
    }
    # The epsilon of a fused norm: the norm is left alone, so that it is fused.
    take eps eps "$f16" --checkpoint embed --checkpoint blk.0.attn_norm
    take tail tail "$q4" --checkpoint 'blk.2.ffn_{act,out}'
    take row row "$f16" --checkpoint 'blk.0.ffn_{gate,up,act}'
    take early-seen early "$f16"
    take early-left early "$f16" --observe nodes --checkpoint embed --checkpoint 'blk.0.{attn_norm,attn_out,attn_residual}'
    take early-unseen early "$f16" --observe none
    take race-1 barrier "$q4" --hash --layer 2
    # Two runs need not differ.
    for ((i = 0; i < 20; i++)); do
        take race-2 barrier "$q4" --hash --layer 2
        "$parity" diff --bitwise "$RECORD/race-2" "$RECORD/race-1" >"$out/race" 2>&1 || break
    done
fi
exit "$failed"
