#!/usr/bin/env bash
# What parity survives: SIGKILL, full and read-only disks, limits of file size and memory, files that are cut short
# while they are mapped, two runs into one folder, closed pipes; each of them over record, run, audit, gate and what
# reads reports, many times. Afterwards everything that is there must be whole, and what was there before unchanged.
#
#   scripts/chaos.sh [ROUNDS] [docs/reliability.md]
#
#   ROUNDS    rounds of every disturbance of every command (default: 20)
#   PARITY    the parity to try (default: target/release/parity)
#   DRIVER    a program of a llama.cpp to record, with its arguments (default: what scripts/record-matrix.sh left in
#             MATRIX); without one, record is left out, which is said
#   MATRIX    folder of scripts/record-matrix.sh
#   SEED      of the random moments and limits (default: 1)
#
# Full and read-only disks are mounted: without root they are left out, which is said. Needs python3.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "chaos.sh needs python3" >&2; exit 2; }
[ -x "${PARITY:-target/release/parity}" ] || { echo "chaos.sh needs ${PARITY:-target/release/parity}: cargo build --release" >&2; exit 2; }
exec python3 scripts/chaos.py "$@"
