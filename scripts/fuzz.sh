#!/usr/bin/env bash
# Fuzzes every parser (fuzz/targets.rs) with libFuzzer under AddressSanitizer, each for so many seconds of CPU time,
# beginning with the files that tests/files/fuzz.rs mutates.
#
#   scripts/fuzz.sh [SECONDS] [docs/reliability.md]
#
#   SECONDS   of CPU time for each target (default: 600)
#   TARGETS   only these: "gguf maps" (default: all)
#   JOBS      how many at once (default: 1)
#   BINARIES  a folder of built targets, for a machine without Rust (default: they are built)
#
# Inputs that reach new code are kept in target/fuzz/corpus and are where the next run begins; what a target does not
# survive is kept in target/fuzz/artifacts. With a file as second argument, the counts go into its last section.
#
# Building needs a nightly Rust (rustup toolchain install nightly), cargo-fuzz (cargo install cargo-fuzz) and a C++
# compiler.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
seconds=${1:-600}
report=${2:-}
lacks() { echo "fuzz.sh needs $1" >&2; exit 2; }
command -v python3 >/dev/null || lacks "python3"
binaries=${BINARIES:-}
if [ -z "$binaries" ]; then
  cargo +nightly --version >/dev/null 2>&1 || lacks "a nightly Rust: rustup toolchain install nightly"
  cargo fuzz --version >/dev/null 2>&1 || lacks "cargo-fuzz: cargo install cargo-fuzz"
  command -v c++ >/dev/null || lacks "a C++ compiler"
  # The test keeps what it begins with.
  PARITY_FUZZ_SECONDS=1 cargo test --release --quiet --test files fuzz:: >/dev/null
  build=$PWD/target/fuzz/build
  cargo +nightly fuzz build --target-dir "$build"
  binaries=$build/$(rustc -vV | sed -n 's/^host: //p')/release
fi
read -ra targets <<<"${TARGETS:-$(sed -n 's/^name = "\([a-z_]*\)"$/\1/p' fuzz/Cargo.toml | tr '\n' ' ')}"
lines=$(mktemp -d)
trap 'rm -rf "$lines"' EXIT

# Fuzzes one target and writes its line of the table. Other work on the machine makes a second shorter: CPU time is
# what counts.
fuzz_one() {
  local target=$1 corpus=target/fuzz/corpus/$1 log=$lines/$1.log spent=0 inputs=0 found=none left used
  local TIMEFORMAT='%U %S'
  mkdir -p "$corpus" target/fuzz/artifacts
  while [ "$(python3 -c "print(int($spent + 1 < $seconds))")" = 1 ]; do
    left=$(python3 -c "print(max(1, int($seconds - $spent)))")
    used=$({ time "$binaries/$target" "$corpus" -max_total_time="$left" -print_final_stats=1 -verbosity=0 \
      -artifact_prefix="target/fuzz/artifacts/$target-" 2>"$log" || touch "$log.failed"; } 2>&1)
    spent=$(python3 -c "print($spent + ${used/ / + })")
    inputs=$((inputs + $(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1 | grep . || echo 0)))
    if [ -e "$log.failed" ]; then
      found=$(ls -t target/fuzz/artifacts/"$target"-* 2>/dev/null | head -n 1 || true)
      found=${found:-"ended early"}
      tail -n 40 "$log" >&2
      break
    fi
  done
  printf '| `%s` | %d | %.0f | %s |\n' "$target" "$inputs" "$spent" "$found" | tee "$lines/$target"
}

for target in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
  fuzz_one "$target" &
done
wait
failed=0
table=
for target in "${targets[@]}"; do
  [ -e "$lines/$target" ] || { echo "fuzz.sh: $target was not fuzzed" >&2; failed=1; continue; }
  [ ! -e "$lines/$target.log.failed" ] || failed=1
  table+=$(cat "$lines/$target")$'\n'
done

if [ -n "$report" ]; then
  LINES_OF_TABLE=$table python3 - "$report" <<'PYTHON'
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
