#!/usr/bin/env bash
# Size and start of a release's program: at most 25 MB, and `parity --version` within 10 ms of a program that does nothing.
#
#   scripts/check-start.sh [PROGRAM]     default: built with the profile `dist` and the feature `release`
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
program=${1:-}
if [ -z "$program" ]; then
  cargo build --profile dist --features release --locked --bin parity
  program=${CARGO_TARGET_DIR:-target}/dist/parity
fi
exec python3 - "$program" <<'PY'
import os, statistics, subprocess, sys, tempfile, time
program, RUNS, MB, MS = sys.argv[1], 41, 25, 10
with tempfile.TemporaryDirectory() as folder:
    empty = os.path.join(folder, "empty.rs")
    with open(empty, "w") as file:
        file.write("fn main() {}\n")
    subprocess.run(["rustc", "-O", "-o", empty[:-3], empty], check=True)

    def once(command):
        begun = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return 1000 * (time.perf_counter() - begun)

    # In turn, so that what else the machine does disturbs both alike; the median of the differences.
    both = [(once([empty[:-3]]), once([program, "--version"])) for _ in range(RUNS)]
size = os.path.getsize(program) / 1e6
nothing, ours = (statistics.median(column) for column in zip(*both))
later = statistics.median(b - a for a, b in both)
print(f"{program}: {size:.1f} MB (at most {MB}); --version {ours:.1f} ms, an empty program {nothing:.1f} ms, "
      f"{later:.1f} ms later (at most {MS})")
sys.exit(0 if size <= MB and later <= MS else 1)
PY
