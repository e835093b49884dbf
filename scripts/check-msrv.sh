#!/usr/bin/env bash
# Checks everything with the oldest Rust that Cargo.toml promises (`rust-version`).
#
#   scripts/check-msrv.sh
#
# Where that is the Rust in use, everything else has built with it, and only Cargo.lock is looked at. Otherwise it installs
# that toolchain through rustup. Without rustup, or without a way to get it, it says SKIP and succeeds;
# PARITY_REQUIRE_MSRV=1 makes that a failure.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
case $(rustc --version) in
"rustc $version."*)
  cargo tree --locked --quiet >/dev/null
  echo "Rust $version is the one in use"
  exit
  ;;
esac
skip() {
  echo "SKIP check-msrv: $1"
  [ "${PARITY_REQUIRE_MSRV:-0}" != 1 ]
  exit
}
command -v rustup >/dev/null || skip "no rustup"
rustup toolchain install "$version" --profile minimal --no-self-update >/dev/null 2>&1 || skip "no Rust $version"
CARGO_TARGET_DIR=target/msrv cargo "+$version" check --workspace --locked
echo "Rust $version builds it"
