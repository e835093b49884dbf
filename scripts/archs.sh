#!/usr/bin/env bash
# Records a tiny random model of every architecture that llama.cpp runs, audits each recording node by node, and
# executes its graph with parity's own machine against it. Fails unless all of them are PARITY.
#
#   scripts/archs.sh                    all architectures that the prebuilt llama.cpp runs
#   scripts/archs.sh 'qwen3*' mamba…    only those whose names match
#   scripts/archs.sh --all [GLOB…]      also executed in f64; also without flash attention, in two ubatches, and in
#                                       Q4_K_M; every mode has a table of its own
#   scripts/archs.sh --mode M [GLOB…]   one of f32, flash-off, ubatch, q4_k_m, executed in f64 too
#
#   PARITY    the parity to test (default: target/release/parity)
#   ARCHS     folder for models, libraries and dumps, kept (default: a temporary one)
#   MODELS    folder of models to use instead of making them (tests/data/archs/fill.py makes the 128)
#   LIBS      folder of llama.cpp's shared libraries (default: those of an npm package)
#   BUILT     folder of libraries built from llama.cpp's source, for what the prebuilt ones cannot load (default: such
#             models are left out), and of llama-quantize
#   QUANTIZE  llama-quantize, for --mode q4_k_m (default: that of BUILT, or of PATH)
#   PYTHON    a python with numpy and gguf, to make the models (default: one is set up)
#   JOBS      models at a time (default: all processors)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
modes=(f32) exact=
case ${1:-} in
--all) modes=(f32 flash-off ubatch q4_k_m) exact=1; shift ;;
--mode) modes=("${2:?--mode needs one of f32, flash-off, ubatch, q4_k_m}") exact=1; shift 2 ;;
esac
for mode in "${modes[@]}"; do
    case $mode in f32 | flash-off | ubatch | q4_k_m) ;; *) echo "$mode: no mode, see --help" >&2; exit 2 ;; esac
done
cd "$(dirname "$0")/.."

parity=$(realpath "${PARITY:-target/release/parity}")
if [ -n "${ARCHS:-}" ]; then work=$(mkdir -p "$ARCHS" && realpath "$ARCHS"); else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
[ $# -gt 0 ] || set -- '*'

# What the prebuilt library cannot load, and what sees all tokens at once, so that llama.cpp refuses it in two ubatches.
without=(glm5-next-moe)
at_once=(dream-dense llada-dense llada-moe-moe rnd1-moe)
# What llama.cpp itself aborts on when it is quantised.
aborted=(qwen4exp-moe)

if [ -n "${MODELS:-}" ]; then models=$(realpath "$MODELS"); else
    models=$work/models
    if [ -z "${PYTHON:-}" ]; then
        PYTHON=$work/venv/bin/python
        if [ ! -x "$PYTHON" ]; then
            python3 -m venv "$work/venv"
            "$work/venv/bin/pip" install --quiet numpy gguf
        fi
    fi
    "$PYTHON" -W ignore tests/data/archs/fill.py "$models" "$@"
fi

if [ -n "${LIBS:-}" ]; then libs=$(realpath "$LIBS"); else
    at=$work/npm-3.22.1
    if [ ! -d "$at" ]; then
        mkdir -p "$at.part"
        (cd "$at.part" && npm pack --silent @node-llama-cpp/linux-x64@3.22.1 >/dev/null && tar xzf ./*.tgz && rm ./*.tgz)
        mv "$at.part" "$at"
    fi
    libs=$at/package/bins/linux-x64
fi
built=${BUILT:+$(realpath "$BUILT")}
quantize=${QUANTIZE:-${built:+$built/llama-quantize}}
quantize=${quantize:-$(command -v llama-quantize || true)}
if [[ " ${modes[*]} " == *" q4_k_m "* && ! -x $quantize ]]; then
    echo "q4_k_m: llama-quantize is missing; set QUANTIZE or BUILT" >&2
    exit 2
fi
driver=$work/driver
cc -O1 -o "$driver" scripts/record/driver.c -ldl

# The model as a mode wants it.
model_of() { # model mode
    [ "$2" = q4_k_m ] || { echo "$1"; return; }
    local to
    to=$work/q4_k_m/$(basename "$1")
    if [ ! -f "$to" ]; then
        "$quantize" "$1" "$to.part" Q4_K_M >"$to.log" 2>&1 && mv "$to.part" "$to"
    fi
    echo "$to"
}

# One model: twelve tokens at once, then three by themselves, on one thread as others run beside it. Prints a line of the table.
one() { # model mode
    local name dump log audit=0 run=0 double=0 begun=$EPOCHREALTIME mode=$2 model from=$libs of which=() flash=() threads=1 ubatch=512
    name=$(basename "$1" .gguf)
    # Those of the usual mode are what arch-faults.py starts from.
    of=$name$([ "$mode" = f32 ] || echo "@$mode")
    dump=$work/dumps/$of log=$work/logs/$of
    rm -rf "$dump"
    # Scores and probabilities, which grok always has, are recorded where they are asked for.
    case $mode@$name in flash-off@* | *@grok-*) which=(--checkpoint '*') ;; esac
    case $mode in flash-off) flash=(DRIVER_FLASH=off) ;; ubatch) ubatch=6 ;; esac
    [[ " ${without[*]} " == *" $name "* ]] && from=$built
    if ! model=$(model_of "$1" "$mode") || ! env DRIVER_THREADS="$threads" DRIVER_UBATCH="$ubatch" "${flash[@]}" \
        "$parity" record -o "$dump" "${which[@]}" -- "$driver" "$from" "$model" 12 \
        3 17 91 42 8 120 64 5 33 77 101 9 55 13 86 >"$log.record" 2>&1 </dev/null; then
        printf '%-26s %8s %-12s\n' "$name" - NOT-RECORDED
        return
    fi
    "$parity" audit "$dump" -m "$model" "${which[@]}" --threads 1 >"$log.audit" 2>"$log.audit.err" || audit=$?
    "$parity" run -m "$model" --reference "$dump" --threads 1 >"$log.run" 2>"$log.run.err" || run=$?
    if [ -n "$exact" ]; then
        "$parity" run -m "$model" --reference "$dump" --numerics f64 --threads 1 >"$log.f64" 2>"$log.f64.err" || double=$?
    fi
    local words=(PARITY DIVERGES UNDECIDED) nodes
    nodes=$(sed -n 's/^PARITY: \([0-9 ]*\) nodes.*/\1/p' "$log.audit" | tr -d ' ')
    printf '%-26s %8s %-12s %-11s %-11s %6.1f s\n' "$name" "${nodes:--}" "${words[$audit]:-FAILED}" \
        "${words[$run]:-FAILED}" "$([ -z "$exact" ] && echo - || echo "${words[$double]:-FAILED}")" \
        "$(awk -v a="$begun" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
    why() { if [ "$1" != 0 ]; then grep -h -A2 -E '^(DIVERGES|UNDECIDED)|error' "$2" "$2.err" | sed 's/^/    /' || true; fi; }
    why "$audit" "$log.audit"
    why "$run" "$log.run"
    why "$double" "$log.f64"
}
export -f one model_of
export parity work libs built driver quantize exact
export without_list="${without[*]}"

list=()
for model in "$models"/*.gguf; do
    name=$(basename "$model" .gguf)
    [[ -z $built && " ${without[*]} " == *" $name "* ]] && continue
    for glob in "$@"; do
        # shellcheck disable=SC2053
        if [[ $name == $glob ]]; then list+=("$model"); break; fi
    done
done
[ ${#list[@]} -gt 0 ] || { echo "no model in $models matches: $*" >&2; exit 2; }

bad=0
for mode in "${modes[@]}"; do
    mkdir -p "$work/dumps" "$work/logs" "$work/q4_k_m"
    begun=$SECONDS some=()
    for model in "${list[@]}"; do
        name=$(basename "$model" .gguf)
        [[ $mode == ubatch && " ${at_once[*]} " == *" $name "* ]] && continue
        [[ $mode == q4_k_m && " ${aborted[*]} " == *" $name "* ]] && continue
        some+=("$model")
    done
    [ ${#some[@]} -gt 0 ] || continue
    printf '== %s\n%-26s %8s %-12s %-11s %-11s %8s\n' "$mode" model nodes audit 'run f32' 'run f64' time
    printf '%s\0' "${some[@]}" |
        xargs -0 -n 1 -P "${JOBS:-$(nproc)}" bash -c 'without=($without_list); text=$(one "$1" "$0"); printf "%s\n" "$text"' "$mode" |
        tee "$work/table-$mode"
    parities() { awk -v column="$1" '/^[^ ]/ && $column == "PARITY"' "$work/table-$mode" | wc -l; }
    audited=$(parities 3) ran=$(parities 4) doubled=$(parities 5)
    echo "$mode: ${#some[@]} models: $audited audited, $ran run in f32${exact:+, $doubled in f64}, in $((SECONDS - begun)) s"
    echo
    [ "$audited" = ${#some[@]} ] && [ "$ran" = ${#some[@]} ] && [ "${exact:+$doubled}" = "${exact:+${#some[@]}}" ] || bad=1
done
exit "$bad"
