#!/bin/sh
# 200 seeded runs with an injected mistake each, over the tiny models and a real one where it is given; then every
# mistake in the first, a middle and the last layer of the real one:
#   scripts/fault-matrix.sh [REAL-MODEL.gguf]
# Prints one line per run and a table; fails where a mistake is missed or called by a wrong name.
set -eu
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then
    PARITY_REAL_MODEL=$(realpath "$1")
    export PARITY_REAL_MODEL
fi
exec cargo test --release --test faults matrix:: -- --ignored --nocapture --test-threads 1
