#!/usr/bin/env bash
# Fuzzes every parser (fuzz/targets.rs) with libFuzzer under AddressSanitizer, each for so many seconds of CPU time,
# beginning with the files that tests/fuzz.rs mutates.
#
#   scripts/fuzz.sh [SECONDS] [docs/reliability.md]
#
#   SECONDS   of CPU time for each target (default: 600)
#   TARGETS   only these: "gguf maps" (default: all)
#
# Inputs that reach new code are kept in target/fuzz/corpus and are where the next run begins; what a target does not
# survive is kept in target/fuzz/artifacts. With a file as second argument, the counts go into its last section.
#
# Needs a nightly Rust (rustup toolchain install nightly), cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
seconds=${1:-600}
report=${2:-}
lacks() { echo "fuzz.sh needs $1" >&2; exit 2; }
cargo +nightly --version >/dev/null 2>&1 || lacks "a nightly Rust: rustup toolchain install nightly"
cargo fuzz --version >/dev/null 2>&1 || lacks "cargo-fuzz: cargo install cargo-fuzz"
command -v c++ >/dev/null || lacks "a C++ compiler"
command -v python3 >/dev/null || lacks "python3"

# The test keeps what it begins with.
PARITY_FUZZ_SECONDS=1 cargo test --release --quiet --test fuzz >/dev/null
build=$PWD/target/fuzz/build
cargo +nightly fuzz build --target-dir "$build"
read -ra targets <<<"${TARGETS:-$(cargo +nightly fuzz list | tr '\n' ' ')}"
host=$(rustc -vV | sed -n 's/^host: //p')
binaries=$build/$host/release

failed=0
lines=
TIMEFORMAT='%U %S'
for target in "${targets[@]}"; do
  corpus=target/fuzz/corpus/$target
  mkdir -p "$corpus" target/fuzz/artifacts
  spent=0 inputs=0 found=none
  # Other work on the machine makes a second shorter: CPU time is what counts.
  while [ "$(python3 -c "print(int($spent + 1 < $seconds))")" = 1 ]; do
    left=$(python3 -c "print(max(1, int($seconds - $spent)))")
    log=$(mktemp)
    used=$({ time "$binaries/$target" "$corpus" -max_total_time="$left" -print_final_stats=1 -verbosity=0 \
      -artifact_prefix="target/fuzz/artifacts/$target-" 2>"$log" || echo "$target" >"$log.failed"; } 2>&1)
    spent=$(python3 -c "print($spent + ${used/ / + })")
    inputs=$((inputs + $(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1 | grep . || echo 0)))
    if [ -e "$log.failed" ]; then
      found=$(ls -t target/fuzz/artifacts/"$target"-* 2>/dev/null | head -n 1 || true)
      found=${found:-"ended early"} failed=1
      tail -n 40 "$log" >&2
    fi
    rm -f "$log" "$log.failed"
    [ "$found" = none ] || break
  done
  line=$(printf '| `%s` | %d | %.0f | %s |' "$target" "$inputs" "$spent" "$found")
  echo "$line"
  lines+=$line$'\n'
done

if [ -n "$report" ]; then
  LINES_OF_TABLE=$lines python3 - "$report" <<'PYTHON'
import os, pathlib, sys
path = pathlib.Path(sys.argv[1])
text = path.read_text() if path.exists() else ""
kept = text.split("\n## Fuzzing\n")[0].rstrip("\n")
path.write_text(f"""{kept}

## Fuzzing

Made by `scripts/fuzz.sh`: every parser under libFuzzer and AddressSanitizer. A target fails if it panics, reads or writes
outside of its memory, takes more than 2 GiB or does not end, or if what it accepts is not as it says.

| target | inputs | CPU seconds | found |
|---|---|---|---|
{os.environ["LINES_OF_TABLE"]}""")
PYTHON
fi
exit $failed
