#!/usr/bin/env bash
# Evaluates skills/parity: ten debugging tasks, whose engines' dumps are made here, and the commands that the skill tells
# to type. The node and the name of the mistake must come out of each; a healthy engine must be at parity. Prints the score.
#
#   scripts/check-skill.sh [TASK]...
#
#   PARITY  the parity to run (default: target/release/parity, built)
#   PYTHON  a python of 3.11 or later with numpy (default: one is set up in target/ci-venv)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet; fi
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$PWD/target/ci-venv/bin/python
  [ -x "$PYTHON" ] || python3 -m venv target/ci-venv
  "$PYTHON" -c 'import numpy' 2>/dev/null || target/ci-venv/bin/pip install --quiet numpy
fi
exec "$PYTHON" scripts/check_skill.py "$(realpath "${PARITY:-target/release/parity}")" "$@"
