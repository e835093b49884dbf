#!/usr/bin/env bash
# The nightly run, the same on a CI runner, a cluster node and a laptop: build, fetch the real models, record
# their references with a real llama.cpp, record its contexts' lives and its RPC, run the suite.
#
#   scripts/nightly.sh [OUT] [parity gate's flags, e.g. --shard 2/5 --jobs 4]
#
#   PARITY_MODELS     folder of the real models; fetched to target/models where unset
#   PARITY_CACHE      folder that recordings are kept in (default: target/recordings)
#   LLAMA_COMPLETION  a dynamically linked llama-completion (default: the one on the PATH). Without one the real
#                     models have no references, and the suite says so.
#   LLAMA_LIBS        folder of a llama.cpp's shared libraries, for scripts/record-life.sh (and SERVER, PYTHON)
#   LLAMA_RPC         folders of such libraries with libggml-rpc and ggml-rpc-server, by colons, for scripts/record-rpc.sh
#                     (and PYTHON). Without them a line says what is left out.
#   PARITY_SUITE      the suite (default: suites/nightly.toml)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

out=out/nightly
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  out=$1
  shift
fi
export PARITY_CACHE=${PARITY_CACHE:-$PWD/target/recordings}
suite=${PARITY_SUITE:-suites/nightly.toml}

cargo build --release --quiet
parity=target/release/parity

if [ -z "${PARITY_MODELS:-}" ]; then
  export PARITY_MODELS=$PWD/target/models
  scripts/fetch-models.sh "$PARITY_MODELS"
fi

llama=${LLAMA_COMPLETION:-$(command -v llama-completion || true)}
if [ -n "$llama" ]; then
  for model in SmolLM2-135M-Instruct.Q4_1 qwen2.5-coder-1.5b-instruct-q4_k_m; do
    dump=$PARITY_CACHE/$model/read_lines
    [ ! -f "$dump/manifest.json" ] || continue
    mkdir -p "$dump"
    # The cleanest reference that llama.cpp has: F32 cache, no flash attention, no repacked weights.
    "$parity" record -o "$dump" -- "$llama" -m "$PARITY_MODELS/$model.gguf" -p 'def read_lines(path):' \
      -n 3 --temp 0 --ignore-eos -no-cnv --no-warmup -ctk f32 -ctv f32 -fa off --no-repack </dev/null
  done
else
  echo "no llama-completion: the real models stay without references" >&2
fi

failed=0
if [ -n "${LLAMA_LIBS:-}" ]; then
  LIBS=$LLAMA_LIBS scripts/record-life.sh || failed=1
else
  echo "no LLAMA_LIBS: lives of contexts are not recorded" >&2
fi
IFS=: read -ra rpc <<<"${LLAMA_RPC:-}"
[ ${#rpc[@]} -gt 0 ] || echo "no LLAMA_RPC: nothing is recorded through RPC" >&2
for libs in "${rpc[@]}"; do
  LIBS=$libs scripts/record-rpc.sh || failed=1
done

"$parity" gate "$suite" --report "$out" "$@"
exit "$failed"
