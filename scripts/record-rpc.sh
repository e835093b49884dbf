#!/usr/bin/env bash
# Records a real client of a real ggml-rpc-server through the proxy: the tiny model in 14 types of weights, and ten other
# architectures. The logits of the last pass must have the bits that they have without the proxy, node by node and with whole
# graphs, and every recording has to be PARITY.
#
#   scripts/record-rpc.sh [GLOB…]       only models whose names match
#
#   PARITY    the parity to test (default: target/release/parity)
#   LIBS      folder of llama.cpp's shared libraries with libggml-rpc and ggml-rpc-server (required)
#   MODELS    further model files, by colons
#   OUT       folder for models and dumps, kept (default: a temporary one)
#   PYTHON    a python with numpy and gguf, to make the ten (default: python3)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
parity=$(realpath "${PARITY:-target/release/parity}")
libs=$(realpath "${LIBS:?LIBS is the folder of llama.cpp\'s shared libraries and ggml-rpc-server}")
keep=${OUT:-}
out=$(realpath "${OUT:-$(mktemp -d)}")
mkdir -p "$out"
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null || true; }
# A server of its own for each model: one that ends takes no other along.
start() {
    local try
    for try in 1 2 3 4 5; do
        stop
        port=$((20000 + RANDOM % 12000))
        "$libs/ggml-rpc-server" --host 127.0.0.1 --port "$port" --device CPU --threads 1 >"$out/server.log" 2>&1 &
        server=$!
        # A port that somebody else has ends the server.
        while sleep 0.2 && kill -0 "$server" 2>/dev/null; do
            ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return 0
        done
    done
    cat "$out/server.log" >&2
    exit 2
}
trap 'stop; [ -n "$keep" ] || rm -rf "$out"' EXIT
driver=$out/driver
cc -O1 -o "$driver" scripts/record/driver.c -ldl
# shellcheck source=scripts/record/models.sh
source scripts/record/models.sh
mapfile -t models < <(ab_models "$libs" "$out")
# The ten have the vocabulary of llama.cpp's own tests, which releases of before do not know.
LC_ALL=C sed -i 's/\(tokenizer\.ggml\.model.\{12\}\)test/\1none/' "${models[@]}"

IFS=: read -ra further <<<"${MODELS:-}"
models+=("${further[@]}")

tokens=(3 17 91 42 8 120 64 5 33 77)
bits() { sed -n 's/^last logit .* of bits //p'; }
bad=0 right=0 left=0 protocol=
for model in "${models[@]}"; do
    name=$(basename "$model" .gguf)
    if [ $# -gt 0 ]; then
        match=
        # shellcheck disable=SC2053
        for glob in "$@"; do [[ $name == $glob ]] && match=1; done
        [ -n "$match" ] || continue
    fi
    start
    client=("$driver" "$libs" "$model" 7 "${tokens[@]}")
    plain=$(DRIVER_THREADS=1 LLAMA_ARG_RPC=127.0.0.1:$port "${client[@]}" 2>"$out/$name.plain" </dev/null | bits) || true
    if [ -z "$plain" ]; then
        printf '%-28s left out: the client fails without the proxy too\n' "$name"
        left=$((left + 1))
        continue
    fi
    words=
    for level in nodes outputs; do
        dump=$out/dumps/$name-$level said=PARITY
        rm -rf "$dump" && mkdir -p "$out/dumps"
        recorded=$(DRIVER_THREADS=1 "$parity" record --rpc --server "127.0.0.1:$port" --observe "$level" -m "$model" -o "$dump" -- \
            env 'LLAMA_ARG_RPC={rpc}' "${client[@]}" 2>"$dump.record" </dev/null | bits) || said=NOT-RECORDED
        protocol=$(sed -n 's/.*ggml RPC \([0-9.]*\).*/\1/p' "$dump/manifest.json" | head -n 1)
        [ "$said" != PARITY ] || "$parity" audit "$dump" -m "$model" >"$dump.audit" 2>&1 || said=$(grep -om1 '^DIVERGES\|^UNDECIDED' "$dump.audit") || said=FAILED
        [ "$recorded" = "$plain" ] || said="$said, OTHER BITS"
        words="$words $level: $said;"
        if [ "$said" = PARITY ]; then right=$((right + 1)) && rm -rf "$dump"; else bad=1; fi
    done
    printf '%-28s%s\n' "$name" "${words%;}"
done
echo "protocol ${protocol:-?}: $right recordings PARITY with the bits of a run without the proxy, $left models left out"
exit "$bad"
