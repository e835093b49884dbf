#!/usr/bin/env bash
# Builds the recorder for Linux on ARM of 64 bits, and records a llama.cpp release for it under emulation, preloaded and loaded by
# ggml: the logits are those of a run without it, and both recordings have the same bytes.
#
#   scripts/record-arm.sh [FOLDER]     FOLDER keeps the packages (default: a temporary one)
#
#   SYSROOT   folder of an ARM system's glibc and libstdc++ (default: /usr/aarch64-linux-gnu, of Debian's libc6-dev-arm64-cross and
#             libstdc++6-arm64-cross)
#   TAP       a recorder that is built already
#
# Needs qemu-user, gcc-aarch64-linux-gnu, npm, and for the recorder Rust's aarch64-unknown-linux-gnu.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
keep=$(mkdir -p "${1:-$work/packages}" && realpath "${1:-$work/packages}")
target=aarch64-unknown-linux-gnu
tap=${TAP:-}
if [ -z "$tap" ]; then
  rustup target add $target
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    cargo build --release --quiet -p parity-tap --target $target --target-dir target/arm
  tap=$PWD/target/arm/$target/release/libparity_tap.so
fi
at=$keep/linux-arm64
[ -d "$at" ] || { mkdir -p "$at" && (cd "$at" && npm pack --silent @node-llama-cpp/linux-arm64@3.22.1 >/dev/null && tar xzf ./*.tgz && rm ./*.tgz); }
libs=$at/package/bins/linux-arm64
model=$PWD/reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf
aarch64-linux-gnu-gcc -O1 -DLINKED -o "$work/linked" scripts/record/driver.c -Wl,--no-as-needed "$libs"/lib{llama,ggml}.* -ldl \
  -Wl,-rpath,"$libs" -Wl,--allow-shlib-undefined

run() { # NAME VARIABLES… : the last logit and its bits
  local name=$1 shared=$work/shared-$1 set=() one
  shift
  mkdir "$shared"
  head -c 65536 /dev/zero >"$shared/status"
  head -c 16 /dev/zero >"$shared/passes"
  for one in "PARITY_TAP_SHARED=$shared" "PARITY_TAP_DIR=$work/$name" "$@"; do set+=(-E "$one"); done
  qemu-aarch64 -L "${SYSROOT:-/usr/aarch64-linux-gnu}" "${set[@]}" "$work/linked" "$libs" "$model" \
    "${BATCHES:-5}" 312 863 2039 1444 1518 285 314 511 435 2>"$work/$name.log" || { tail "$work/$name.log" >&2; exit 1; }
}
for BATCHES in 5 "b0:5,1:3 c0>2 b0:1,1:1,2:1 r0@4 b0:2 s1@1,2 b1:1"; do
  rm -rf "$work"/{shared-*,preloaded,loaded}
  export BATCHES DRIVER_SEQUENCES=3
  plain=$(run plain)
  # Rows are added, and the last of them may be rounded in another way.
  preloaded=$(run preloaded "LD_PRELOAD=$tap" PARITY_TAP_ALL_ROWS=0)
  loaded=$(run loaded "GGML_BACKEND_PATH=$tap" PARITY_TAP_ALL_ROWS=0)
  [ "$plain" = "$preloaded" ] && [ "$plain" = "$loaded" ] || { echo "other bits: $plain, $preloaded, $loaded" >&2; exit 1; }
  diff -r "$work/preloaded" "$work/loaded"
  echo "ok   $plain; $(ls "$work/loaded" | wc -l) files are the same, preloaded and loaded by ggml"
done
