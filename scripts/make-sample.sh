#!/usr/bin/env bash
# Makes reports/sample/: one report in every format, from a real run with an injected mistake, on what ships here.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
parity=${PARITY:-target/release/parity}
status=0
SOURCE_DATE_EPOCH=1795219200 "$parity" run -p 'def read_lines(path):' -n 8 --inject rope.base@2 --device cpu \
  --report reports/sample > reports/sample/table.txt || status=$?
# An injected mistake is a divergence.
[ "$status" = 1 ]
