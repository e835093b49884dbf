#!/usr/bin/env bash
# Tries a wheel as its users do, each in an empty home and a folder where nothing of the repository is near: pip in a
# fresh environment, pipx, uvx. In each parity runs on the shipped model, which is in the wheel, and finds a mistake.
#
#   scripts/check-wheel.sh WHEEL
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
wheel=$(realpath "${1:?usage: scripts/check-wheel.sh WHEEL}")
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
mkdir "$trial/home" "$trial/elsewhere"
python3 -m venv "$trial/tools"
"$trial/tools/bin/pip" install --quiet pipx==1.8.0 uv==0.9.9
cd "$trial/elsewhere"
export PARITY_LLAMA=none HOME=$trial/home XDG_CACHE_HOME=$trial/home/cache XDG_CONFIG_HOME=$trial/home/config
unset PARITY_REFERENCE_DUMPS PARITY_CONFIG PARITY_CACHE PARITY_MODELS VIRTUAL_ENV PYTHONPATH

try() { # name command…
  local name=$1 code=0 start=$SECONDS
  shift
  "$@" run -p "def read_lines(path):" --device cpu >answer 2>log || { cat answer log; echo "FAIL $name"; exit 1; }
  grep -q '^PARITY' answer || { cat answer; echo "FAIL $name: no parity"; exit 1; }
  "$@" run -p "def read_lines(path):" --device cpu --inject rope.base@2 >answer 2>log || code=$?
  if [ $code -ne 1 ] || ! grep -q '^DIVERGES at blk.2.q_rope' answer; then
    cat answer log
    echo "FAIL $name: exit code $code"
    exit 1
  fi
  echo "ok   $name: $(sed -n 's/^\(DIVERGES at [^:]*\).*/\1/p' answer) ($((SECONDS - start)) s)"
}
python3 -m venv "$trial/venv"
"$trial/venv/bin/pip" install --quiet "$wheel"
try "pip install" "$trial/venv/bin/parity"
try "pipx run" "$trial/tools/bin/pipx" run --spec "$wheel" parity
"$trial/tools/bin/pipx" install --quiet "$wheel" >/dev/null
try "pipx install" "$HOME/.local/bin/parity"
try "uvx" "$trial/tools/bin/uvx" --from "$wheel" parity
