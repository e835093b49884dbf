#!/usr/bin/env bash
# What only a GPU can show: kernels against scalar arithmetic, the engine against recordings of llama.cpp and exact
# arithmetic, audits, injected faults, decode against prefill, repeated runs, the memory checker, speed. Every
# measurement is a JSON file that says on which device, driver and commit it was made.
#
#   scripts/gpu-suite.sh [OUT]          (default: reports/gpu)
#
# Everything is built with cargo, unless these name built programs, so that a machine without Rust can run it:
#   PARITY         the program           MEASURE       the example `gpu`
#   KERNEL_TESTS   the test `kernels`    ENGINE_TESTS  the test `gpu`
#
# What there is beyond the repository; what is left out is said:
#   MODELS            folder of further models, *.gguf (default: reference-dumps/models)
#   REAL_MODEL        a real model, e.g. Qwen2.5-Coder-1.5B-Instruct Q4_K_M (scripts/fetch-models.sh)
#   REFERENCES        folder of recordings, MODEL/NAME/manifest.json (default: reference-dumps)
#   LLAMA_COMPLETION  a dynamically linked llama-completion: records what REFERENCES lacks
#   LLAMA_CUDA        folder with libllama.so and libggml*.so of a CUDA build: its speed is measured beside ours
#   PAIRS             how often the two are measured by turns (default: 7)
#   RUNS              repeated runs whose logits must have the same bits (default: 1000)
#   PARTS             which parts, of: tests recordings itself errors sanitizer speed context profile cards
#                     (default: all)
#   PARITY_COMMIT     the commit, where this is no git checkout
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

out=${1:-reports/gpu}
models=${MODELS:-reference-dumps/models}
references=${REFERENCES:-reference-dumps}
tiny=reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
failed=()
PARITY_COMMIT=${PARITY_COMMIT:-$(git describe --always --dirty --abbrev=40 2>/dev/null)}
export PARITY_COMMIT PARITY_REQUIRE_GPU=1 PARITY_KERNELS_ON=cuda PARITY_TESTS=all

wants() { # part
    [[ " ${PARTS:-tests recordings itself errors sanitizer speed context profile cards} " == *" $1 "* ]]
}

check() { # name command…
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$work/log" 2>&1; then
        printf 'ok      %-28s %4d s\n' "$name" $((SECONDS - start))
    else
        printf 'FAILED  %-28s %4d s\n' "$name" $((SECONDS - start))
        tail -n 20 "$work/log"
        failed+=("$name")
    fi
}

if [ -n "${MEASURE:-}" ]; then
    measure=$MEASURE parity=${PARITY:?names the program, as MEASURE does the example}
    kernel_tests=("${KERNEL_TESTS:-}") engine_tests=("${ENGINE_TESTS:-}")
else
    cargo build --release --bin parity --example gpu --test kernels --test gpu || exit 1
    parity=target/release/parity measure=target/release/examples/gpu
    kernel_tests=(cargo test --release --test kernels --) engine_tests=(cargo test --release --test gpu --)
fi

if wants tests; then
    [ -z "${kernel_tests[0]}" ] && echo 'SKIP: KERNEL_TESTS names nothing' || check kernels "${kernel_tests[@]}"
    [ -z "${engine_tests[0]}" ] && echo 'SKIP: ENGINE_TESTS names nothing' || check engine "${engine_tests[@]}"
fi

# ------------------------------------------------------------------ llama.cpp's recordings, exact arithmetic

record() { # model
    local dump
    dump=$references/$(basename "$1" .gguf)/class
    [ -n "${LLAMA_COMPLETION:-}" ] && [ ! -e "$dump/manifest.json" ] || return 0
    mkdir -p "$dump"
    CUDA_VISIBLE_DEVICES= "$parity" record -o "$dump" -- "$LLAMA_COMPLETION" -m "$1" -p $'class Stack:\n    def' -n 5 --temp 0 --ignore-eos \
        -no-cnv --no-warmup -ctk f32 -ctv f32 -fa off --no-repack </dev/null >/dev/null 2>&1
}

against() { # model
    local name dumps
    name=$(basename "$1" .gguf)
    record "$1"
    dumps=("$references/$name"/*/manifest.json)
    if [ ! -e "${dumps[0]}" ]; then
        echo "SKIP: no recording of $name"
        return
    fi
    check "against $name" "$measure" against "$out/against-$name.json" "$1" "${dumps[@]%/manifest.json}"
}

# The same by the program's own commands: a dump of the GPU's, audited with no reference.
audit() { # model
    local name dumps numerics
    name=$(basename "$1" .gguf)
    dumps=("$references/$name"/*/manifest.json)
    [ -e "${dumps[0]}" ] || return 0
    for numerics in f32 'f32 kv=f16' f16; do
        rm -rf "$work/dump"
        "$parity" run -m "$1" --device cuda --numerics "$numerics" --reference "${dumps[0]%/manifest.json}" \
            --dump "$work/dump" >/dev/null 2>&1
        check "audit $name $numerics" "$parity" audit "$work/dump" -m "$1"
    done
}

# A text of several hundred tokens, for the kernels for many rows: every format, every arithmetic, no reference.
long_audits() { # model…
    local model numerics code separator=
    printf '{\n "commit": "%s",\n "device": "%s",\n "audits": [' "$PARITY_COMMIT" \
        "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
    for model; do
        for numerics in f32 'f32 kv=f16' f16; do
            rm -rf "$work/dump"
            "$parity" run -m "$model" -f LICENSE --device cuda --numerics "$numerics" --dump "$work/dump" >/dev/null 2>&1
            "$parity" audit "$work/dump" -m "$model" >"$work/audit" 2>&1
            code=$?
            printf '%s\n  {"model": "%s", "numerics": "%s", "exit": %d, "tokens": "%s", "answer": "%s"}' "$separator" \
                "$(basename "$model")" "$numerics" $code "$(sed -n 's/^tokens *//p' "$work/audit")" \
                "$(grep -m 1 -E '^(PARITY|DIVERGES|UNDECIDED)' "$work/audit")"
            separator=,
        done
    done
    printf '\n ]\n}\n'
}

"$measure" synth "$work/synth-0.5b-f16.gguf" 0.5B || exit 1
"$measure" synth "$work/synth-1.5b-q4_k_m.gguf" 1.5B || exit 1
if wants recordings; then
    for model in "$models"/*.gguf "$work/synth-0.5b-f16.gguf" ${REAL_MODEL:+"$REAL_MODEL"}; do against "$model"; done
    audit "$tiny"
    long_audits "$models"/*.gguf >"$out/audits-long.json"
    check 'audits of a long text' bash -c "! grep '\"exit\": [1-9]' '$out/audits-long.json'"
    [ -z "${REAL_MODEL:-}" ] || audit "$REAL_MODEL"
fi

# ------------------------------------------------------------------ one engine against itself

if wants itself; then
    check 'steps' "$measure" steps "$out/steps-tiny.json" "$tiny" "${RUNS:-1000}"
    check 'steps synth' "$measure" steps "$out/steps-synth-0.5b-f16.json" "$work/synth-0.5b-f16.gguf" 20
    check 'steps synth quantised' "$measure" steps "$out/steps-synth-1.5b-q4_k_m.json" "$work/synth-1.5b-q4_k_m.gguf" 20
    [ -z "${REAL_MODEL:-}" ] || check 'steps real' "$measure" steps "$out/steps-real.json" "$REAL_MODEL" 20
    for model in reference-dumps/models/*.gguf; do
        name=$(basename "$model" .gguf)
        check "faults $name" "$measure" faults "$out/faults-$name.json" "$model"
    done
fi

# ------------------------------------------------------------------ errors end with a message and exit code 2

refused() { # command…: exit code 2 and no panic
    "$@" >"$work/refused" 2>&1
    [ $? = 2 ] && ! grep -q panicked "$work/refused"
}
if wants errors; then
    check 'no such GPU' refused "$parity" run -p 'def' --device cuda:99
    check 'no such second GPU' refused "$parity" run -p 'def' --device cuda:0,cuda:99
    check 'a GPU twice' refused "$parity" run -p 'def' --device cuda:0,cuda:0
    check 'no GPU seen' refused env CUDA_VISIBLE_DEVICES= "$parity" run -p 'def' --device cuda
fi

# ------------------------------------------------------------------ edited kernels, compiled at run time

edited() { # whether a mistake in a copy of the kernels is found where it is
    cp -r kernels "$work/kernels"
    sed -i 's/expf(-x)/expf(-1.01f * x)/' "$work/kernels/activation.cuh"
    PARITY_KERNELS=$work/kernels "$parity" run -p 'def read_lines(path):' --device cuda >"$work/edited" 2>&1
    [ $? = 1 ] && grep -q 'DIVERGES at blk.0.ffn_act' "$work/edited"
}
if wants errors; then
    if PARITY_KERNELS=/dev/null "$parity" run -p def --device cuda 2>&1 | grep -q panicked; then failed+=('PARITY_KERNELS'); fi
    if ldconfig -p | grep -q libnvrtc || ls ${LD_LIBRARY_PATH:+${LD_LIBRARY_PATH//:/ }} 2>/dev/null | grep -q libnvrtc; then
        check 'edited kernels' edited
    else
        echo 'SKIP: no libnvrtc in LD_LIBRARY_PATH to compile edited kernels with'
    fi
fi

# ------------------------------------------------------------------ the checker of memory, races and barriers

if ! wants sanitizer; then
    :
elif command -v compute-sanitizer >/dev/null; then
    {
        printf '{\n "tool": "%s",\n "commit": "%s",\n "runs": [' "$(compute-sanitizer --version | tail -n 1)" "$PARITY_COMMIT"
        separator=
        for model in reference-dumps/models/*.gguf; do
            for tool in memcheck racecheck initcheck synccheck; do
                for numerics in f32 'f32 kv=f16' f16; do
                    summary=$(compute-sanitizer --tool $tool --error-exitcode 9 "$measure" once "$model" "$numerics" 40 2>&1)
                    code=$?
                    printf '%s\n  {"model": "%s", "tool": "%s", "numerics": "%s", "exit": %d, "summary": "%s"}' "$separator" \
                        "$(basename "$model")" $tool "$numerics" $code "$(grep SUMMARY <<<"$summary" | tr -d '=' | xargs)"
                    separator=,
                done
            done
        done
        printf '\n ]\n}\n'
    } >"$out/sanitizer.json"
    check 'sanitizer' bash -c "! grep '\"exit\": [1-9]' '$out/sanitizer.json'"
else
    echo 'SKIP: no compute-sanitizer'
fi

# ------------------------------------------------------------------ speed

if wants speed; then
    beside=()
    if [ -n "${LLAMA_CUDA:-}" ]; then
        cc -O2 -rdynamic -o "$work/llama_bench_min" scripts/gpu/llama_bench_min.c -ldl &&
            beside=("${PAIRS:-7}" env -C "$LLAMA_CUDA" LD_LIBRARY_PATH=. "$work/llama_bench_min" ./libggml.so ./libllama.so
                "$work/synth-0.5b-f16.gguf")
    else
        echo 'SKIP: LLAMA_CUDA names no llama.cpp to measure beside'
    fi
    check 'speed' "$measure" speed "$out/speed-synth-0.5b-f16.json" "$work/synth-0.5b-f16.gguf" "${beside[@]}"
    cat "$work/log"
    check 'speed quantised' "$measure" speed "$out/speed-synth-1.5b-q4_k_m.json" "$work/synth-1.5b-q4_k_m.gguf"
    cat "$work/log"
    [ -z "${REAL_MODEL:-}" ] || check 'speed real' "$measure" speed "$out/speed-real.json" "$REAL_MODEL"
fi

# ------------------------------------------------------------------ long texts: decode behind them, memory

long_texts() { # size
    local at=$work/bench-$1
    "$parity" bench -m "$work/synth-$1.gguf" --device cuda --numerics f16 --context 8,1024,8192,32768 --repeats 3 \
        ${LLAMA_CUDA:+--llama "$LLAMA_CUDA"} --report "$at" || return
    cp "$at/bench.svg" "$out/bench-synth-$1.svg"
    sed "1s/.*/{\n  \"commit\": \"$PARITY_COMMIT\",/" "$at/bench.json" >"$out/bench-synth-$1.json"
}
if wants context; then
    for size in 0.5b-f16 1.5b-q4_k_m; do
        check "long texts $size" long_texts $size
        cat "$work/log"
    done
fi

# ------------------------------------------------------------------ what bounds a step, one layer of it

# Time, share of the memory's speed, share of the cycles in which something is issued, and what warps wait for.
metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__inst_executed.sum
metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active
for reason in barrier long_scoreboard short_scoreboard math_pipe_throttle wait not_selected no_instruction; do
    metrics+=,smsp__average_warps_issue_stalled_${reason}_per_issue_active.ratio
done
profile() { # file model numerics rows metrics skip count option…: so many kernels behind the first ones
    local file=$1 model=$2 numerics=$3 rows=$4 metrics=$5 skip=$6 count=$7
    shift 7
    {
        echo "# $PARITY_COMMIT, $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), each kernel alone"
        ncu --csv --clock-control none --launch-skip "$skip" --launch-count "$count" "$@" --metrics "$metrics" \
            "$measure" once "$model" "$numerics" "$rows" | grep '^"'
    } >"$work/profile.csv" && [ "$(wc -l <"$work/profile.csv")" -gt "$count" ] && cp "$work/profile.csv" "$out/$file.csv"
}
# Of prefill also the share of the second cache's speed, and how often tensor cores are told something.
prefill=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
prefill+=,lts__throughput.avg.pct_of_peak_sustained_elapsed,smsp__issue_active.avg.pct_of_peak_sustained_active
prefill+=,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active
if wants profile && command -v ncu >/dev/null; then
    for size in 0.5b-f16 1.5b-q4_k_m; do
        model=$work/synth-$size.gguf
        check "profile $size" profile "profile-synth-$size" "$model" f16 40 $metrics 170 10 \
            --kernel-name 'regex:linear_one|attention_few'
        for rows in 16 128 512; do
            check "profile $size, $rows" profile "profile-synth-$size-prefill-$rows" "$model" f16 $rows $prefill 48 20
        done
    done
    check 'profile f32, 512' profile profile-synth-0.5b-f16-prefill-512-f32 "$work/synth-0.5b-f16.gguf" f32 512 $prefill 48 20
elif wants profile; then
    echo 'SKIP: no ncu'
fi

# ------------------------------------------------------------------ layers split over two GPUs

if wants cards && [ "$("$measure" count)" -ge 2 ]; then
    both=cuda:0,cuda:1
    # The bits of one GPU; a skip would be a failure.
    [ -z "${engine_tests[0]}" ] && echo 'SKIP: ENGINE_TESTS names nothing' ||
        check 'engine on two' env PARITY_REQUIRE_GPUS=2 "${engine_tests[@]}" cards::
    check 'run on two' "$parity" run -p 'def read_lines(path):' --device $both
    check 'isolated on two' "$parity" run -p 'def read_lines(path):' --device $both --isolate
    for size in 0.5b-f16 1.5b-q4_k_m; do
        check "two against one $size" "$measure" split "$out/split-synth-$size.json" "$work/synth-$size.gguf"
        cat "$work/log"
    done
elif wants cards; then
    echo 'SKIP: two GPUs are needed for layers split over them'
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all passed; $out"
