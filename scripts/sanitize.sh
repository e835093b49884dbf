#!/usr/bin/env bash
# Runs tests under AddressSanitizer: reads and writes outside of what was allocated, in our code and in what it links.
# Miri cannot map files or call ggml, gemm or CUDA, which is what most unsafe code here is for.
#
#   scripts/sanitize.sh [FILTER…]     of the tests of files and of the engine; default: fuzz:: gguf:: dequant:: engine::
#
# Needs a nightly Rust with rust-src for x86-64 Linux (rustup toolchain install nightly --component rust-src).
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
cargo +nightly --version >/dev/null 2>&1 || { echo "sanitize.sh needs a nightly Rust: rustup toolchain install nightly" >&2; exit 2; }
filters=("$@")
[ $# -gt 0 ] || filters=(fuzz:: gguf:: dequant:: engine::)
export RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=target/sanitize
# The program under test hands out memory by an allocator of its own, on top of the sanitizer's.
export ASAN_OPTIONS=detect_leaks=0 PARITY_TESTS=all
exec cargo +nightly test --target x86_64-unknown-linux-gnu --test files --test engine -- "${filters[@]}"
