#!/usr/bin/env bash
# Records a tiny random model of every architecture that llama.cpp runs, audits each recording node by node, and
# executes its graph with parity's own machine against it. Fails unless all of them are PARITY.
#
#   scripts/archs.sh                    all architectures that the prebuilt llama.cpp runs
#   scripts/archs.sh 'qwen3*' mamba…    only those whose names match
#
#   PARITY    the parity to test (default: target/release/parity)
#   ARCHS     folder for models, libraries and dumps, kept (default: a temporary one)
#   MODELS    folder of models to use instead of making them (tests/data/archs/fill.py makes the 128)
#   LIBS      folder of llama.cpp's shared libraries (default: those of an npm package)
#   PYTHON    a python with numpy and gguf, to make the models (default: one is set up)
#   JOBS      models at a time (default: all processors)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

parity=$(realpath "${PARITY:-target/release/parity}")
if [ -n "${ARCHS:-}" ]; then work=$(mkdir -p "$ARCHS" && realpath "$ARCHS"); else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
[ $# -gt 0 ] || set -- '*'

# What the prebuilt library cannot load.
without=(glm5-next-moe)

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
[ -x "$work/driver" ] || cc -O1 -o "$work/driver" scripts/record/driver.c -ldl
mkdir -p "$work/dumps" "$work/logs"

# One model: twelve tokens at once, then three by themselves. Prints a line of the table.
one() { # model
    local name dump log audit=0 run=0 begun=$EPOCHREALTIME
    name=$(basename "$1" .gguf)
    dump=$work/dumps/$name log=$work/logs/$name
    rm -rf "$dump"
    if ! "$parity" record -o "$dump" -- "$work/driver" "$libs" "$1" 12 \
        3 17 91 42 8 120 64 5 33 77 101 9 55 13 86 >"$log.record" 2>&1 </dev/null; then
        printf '%-26s %8s %-11s %-11s\n' "$name" - NOT-RECORDED -
        return
    fi
    "$parity" audit "$dump" -m "$1" --threads 1 >"$log.audit" 2>"$log.audit.err" || audit=$?
    "$parity" run -m "$1" --reference "$dump" --threads 1 >"$log.run" 2>"$log.run.err" || run=$?
    local words=(PARITY DIVERGES UNDECIDED) nodes
    nodes=$(sed -n 's/^PARITY: \([0-9 ]*\) nodes.*/\1/p' "$log.audit" | tr -d ' ')
    printf '%-26s %8s %-11s %-11s %6.1f s\n' "$name" "${nodes:--}" "${words[$audit]:-FAILED}" "${words[$run]:-FAILED}" \
        "$(awk -v a="$begun" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
    if [ "$audit" != 0 ]; then grep -h -A2 -E '^(DIVERGES|UNDECIDED)|error' "$log.audit" "$log.audit.err" | sed 's/^/    /' || true; fi
    if [ "$run" != 0 ]; then grep -h -A2 -E '^(DIVERGES|UNDECIDED)|error' "$log.run" "$log.run.err" | sed 's/^/    /' || true; fi
}
export -f one
export parity work libs

list=()
for model in "$models"/*.gguf; do
    name=$(basename "$model" .gguf)
    [[ " ${without[*]} " == *" $name "* ]] && continue
    for glob in "$@"; do
        # shellcheck disable=SC2053
        if [[ $name == $glob ]]; then list+=("$model"); break; fi
    done
done
[ ${#list[@]} -gt 0 ] || { echo "no model in $models matches: $*" >&2; exit 2; }

printf '%-26s %8s %-11s %-11s %8s\n' model nodes audit run time
printf '%s\0' "${list[@]}" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" bash -c 'text=$(one "$0"); printf "%s\n" "$text"' | tee "$work/table"

lines=$(grep -c '^[^ ]' "$work/table" || true)
audited=$(awk '/^[^ ]/ && $3 == "PARITY"' "$work/table" | wc -l)
ran=$(awk '/^[^ ]/ && $4 == "PARITY"' "$work/table" | wc -l)
echo
echo "${#list[@]} models: $audited audited, $ran run, in $SECONDS s"
[ "$lines" = ${#list[@]} ] && [ "$audited" = ${#list[@]} ] && [ "$ran" = ${#list[@]} ]
