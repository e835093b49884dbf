#!/usr/bin/env bash
# Makes the pictures of the HTML report that the README and docs/report.md show, in headless Chromium: docs/img/.
# RoPE base 10000 is injected into layer 3 of MODEL, whose recording is compared with.
#
#   scripts/make-pictures.sh MODEL.gguf RECORDING     made with Qwen2.5-Coder-1.5B, Q4_K_M, and a recording of 344 tokens
#   scripts/make-pictures.sh                          with the model and a recording that ship with parity, into target/img
#
#   PARITY  the parity to run (default: target/release/parity, built)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || [ $# -eq 2 ] || { echo "usage: scripts/make-pictures.sh [MODEL.gguf RECORDING]" >&2; exit 2; }
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet; fi
parity=${PARITY:-target/release/parity}
out=docs/img
if [ $# -eq 0 ]; then
  out=target/img
  set -- reference-dumps/models/qwen2-tiny-py-F16.gguf reference-dumps/qwen2-tiny-py-F16/read_lines
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
code=0
"$parity" run -m "$1" --reference "$2" --inject rope.base@3 --device cpu --report "$work/report" >/dev/null || code=$?
[ $code -eq 1 ] || { echo "make-pictures: the mistake was not found: exit code $code" >&2; exit 1; }
PARITY_REQUIRE_CHROMIUM=1 scripts/check-html.sh "$work/report/report.html" "$work/pictures"
mkdir -p "$out"
for theme in light dark; do
  cp "$work/pictures/laptop-$theme.png" "$out/report-$theme.png"
done
ls -l "$out"
