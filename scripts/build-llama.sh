#!/usr/bin/env bash
# Builds a dynamically linked llama-completion from the source package of llama-cpp-python, for recording.
#
#   scripts/build-llama.sh DIR             -> DIR/bin/llama-completion
#   scripts/build-llama.sh --source DIR    -> DIR, llama.cpp's source alone, and nothing is built
#
# Needs cmake, a C++ compiler and pip; about ten minutes on two cores.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

version=0.3.36
usage='usage: scripts/build-llama.sh [--source] DIR'
alone=
[ "${1:-}" != --source ] || { alone=yes && shift; }
out=${1:?$usage}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ -z "$alone" ] && [ -x "$out/bin/llama-completion" ]; then
  echo "$out/bin/llama-completion is there"
  exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$work" \
  "llama-cpp-python==$version" || python3 -m pip download --quiet --no-deps --no-binary :all: --dest "$work" \
  "llama-cpp-python==$version"
tar -xzf "$work"/llama_cpp_python-$version.tar.gz -C "$work"
source=$work/llama_cpp_python-$version/vendor/llama.cpp
if [ -n "$alone" ]; then
  cp -r "$source/." "$out/"
  exit
fi
cmake -S "$source" -B "$out" -DCMAKE_BUILD_TYPE=Release \
  -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DBUILD_SHARED_LIBS=ON
cmake --build "$out" --parallel "$(nproc)" --target llama-completion
