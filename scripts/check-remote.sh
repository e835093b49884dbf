#!/usr/bin/env bash
# References that a team shares, on a real S3 server of a package (moto) and a web server with ranges, each in a folder and an
# environment of its own: push, pull, run, diff and audit by address; one layer fetches one layer; the cache and its limit;
# what was tampered with, interrupted or forbidden; credentials, which nothing prints.
#
#   scripts/check-remote.sh
#
#   PARITY  a program with the feature `remote` (default: target/release/parity, built)
#
# Without moto (`pip install 'moto[s3,server]'`, tried in target/moto-venv) it says SKIP and succeeds; PARITY_REQUIRE_MOTO=1
# makes that a failure.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet --features release --bin parity; fi
PARITY=$(realpath "${PARITY:-target/release/parity}")
venv=$PWD/target/moto-venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! "$venv/bin/python" -c 'import moto.server, boto3' 2>/dev/null &&
  ! "$venv/bin/pip" install --quiet 'moto[s3,server]==5.2.5' 2>/dev/null; then
  echo "SKIP check-remote: no moto (pip install 'moto[s3,server]')"
  [ "${PARITY_REQUIRE_MOTO:-0}" != 1 ]
  exit
fi
exec "$venv/bin/python" scripts/check_remote.py "$PARITY"
