#!/usr/bin/env bash
# Builds a Python wheel with the program and the shipped model in it, and tries it with pip, pipx and uvx
# (scripts/check-wheel.sh).
#
#   scripts/make-wheel.sh [DIR]     default: target/wheels
#
#   pip install target/wheels/*.whl, or uvx --from target/wheels/*.whl parity …
#
# Needs maturin (pip install maturin) and python3 with venv.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
maturin=${MATURIN:-$(command -v maturin || true)}
[ -n "$maturin" ] || { echo "make-wheel.sh needs maturin: pip install maturin, or MATURIN=PATH" >&2; exit 2; }
python3 -c 'import venv' 2>/dev/null || { echo "make-wheel.sh needs python3 with venv" >&2; exit 2; }
out=$(realpath -m "${1:-target/wheels}")
data=target/wheel-data/data/share/parity
rm -rf target/wheel-data
mkdir -p "$data" "$out"
cp -r reference-dumps "$data/"
"$maturin" build --profile dist --features release --locked --out "$out"

wheel=$(ls -t "$out"/*.whl | head -n 1)
scripts/check-wheel.sh "$wheel"
echo "$wheel"
