#!/usr/bin/env bash
# What needs no recorder builds without Linux: the program is checked for Windows, with the GPU engine, and without what is C.
#
#   scripts/check-portable.sh
#
#   TARGET  default: x86_64-pc-windows-gnu
#
# Where rustup cannot fetch the target it says SKIP and succeeds; PARITY_REQUIRE_TARGETS=1 makes that a failure.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
target=${TARGET:-x86_64-pc-windows-gnu}
if ! rustup target add "$target" 2>/dev/null; then
  echo "SKIP check-portable: rustup has no $target"
  [ "${PARITY_REQUIRE_TARGETS:-0}" != 1 ]
  exit
fi
RUSTFLAGS="-D warnings" cargo check --locked --target "$target" --no-default-features --features cuda --bin parity --target-dir target/portable
echo "ok   parity is checked for $target"
