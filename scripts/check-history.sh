#!/usr/bin/env bash
# Appends runs of a suite to a history, as a new user would in an empty folder: healthy ones on two machines, then ones with a
# mistake from a certain commit on. `parity history` must name that commit and the first wrong node, on that machine alone, and
# its page must show it in real headless Chromium: no console errors, no network, choosing, filtering, keyboard.
#
#   scripts/check-history.sh [SCREENSHOT_DIR]
#
#   PARITY  a program with the feature `history` (default: target/release/parity, built)
#
# Without Chromium the page is not opened, it says SKIP and succeeds; PARITY_REQUIRE_CHROMIUM=1 makes that a failure.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
shots=$(realpath -m "${1:-/nonexistent}")
cd "$(dirname "$0")/.."
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet --features release --bin parity; fi
PARITY=$(realpath "${PARITY:-target/release/parity}")
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export PARITY_LLAMA=none PARITY_REFERENCE_DUMPS=$root/reference-dumps HOME=$work
fail() { echo "FAIL $*" >&2; exit 1; }
ok() { echo "ok   $*"; }

# The mistake: what a case without one does not expect, so that the gate fails too.
suite() {
  cat >suite.toml <<TOML
name = "trend"
[models]
tiny = "$root/reference-dumps/models/qwen2-tiny-py-F16.gguf"
[prompts]
code = "def read_lines(path):"
[[case]]
name = "code"
model = "tiny"
prompt = "code"
layer = "0..2"
$1
TOML
}
run() { # machine commit wanted-exit-code
  local code=0
  PARITY_MACHINE=$1 PARITY_COMMIT=$2 SOURCE_DATE_EPOCH=$((1790000000 + 3600 * ++n)) \
    "$PARITY" gate suite.toml --history history.sqlite --report out >printed 2>&1 || code=$?
  [ "$code" = "$3" ] || { cat printed; fail "gate: exit code $code, wanted $3"; }
}
n=0
suite ''
start=$SECONDS
for commit in aaaaaaaa1111 bbbbbbbb2222 cccccccc3333; do run fast "$commit" 0; run slow "$commit" 0; done
"$PARITY" history history.sqlite >answer
grep -q '^nothing is worse' answer || { cat answer; fail "six healthy runs"; }
ok "six healthy runs on two machines: nothing is worse ($((SECONDS - start)) s)"

# Changes of RoPE's base are no rounding: its node is worse from here on.
suite 'inject = "rope.base=10000@1"
expect = "divergence"'
for commit in dddddddd4444 eeeeeeee5555; do run fast "$commit" 0; done
"$PARITY" history history.sqlite >answer
head -n 6 answer
grep -q '^blk.1.q_rope is worse since dddddddd4444 ' answer || { cat answer; fail "since when"; }
! grep -q 'slow$' answer || fail "the other machine is not worse"
ok "it is named: the node, the commit, the machine"
"$PARITY" history history.sqlite --json | python3 -c '
import json, sys
found = json.load(sys.stdin)
assert found["schema"] == "parity-history/1" and len(found["runs"]) == 8, found["runs"]
assert {worse["since"]["commit"] for worse in found["worse"]} == {"dddddddd4444"}
assert {worse["before"]["commit"] for worse in found["worse"]} == {"cccccccc3333"}
assert not any((worse["checkpoint"] or "").startswith("blk.0.") for worse in found["worse"])'
"$PARITY" history history.sqlite --machine slow >answer
grep -q '^nothing is worse' answer || fail "--machine"
"$PARITY" history history.sqlite --checkpoint 'blk.0.*' >answer
grep -q '^nothing is worse' answer || fail "--checkpoint"
code=0; "$PARITY" history history.sqlite --checkpoint 'blk.9.*' >answer 2>&1 || code=$?
[ "$code" = 2 ] || fail "nothing of what is asked for: exit code $code"
code=0; "$PARITY" history suite.toml >answer 2>&1 || code=$?
[ "$code" = 2 ] && grep -q 'suite.toml' answer || { cat answer; fail "another file: exit code $code"; }
cp suite.toml other.sqlite
code=0; "$PARITY" gate suite.toml --history other.sqlite >answer 2>&1 || code=$?
[ "$code" = 2 ] && cmp -s suite.toml other.sqlite || { cat answer; fail "another file is appended to: exit code $code"; }
ok "filters; what is no history is refused and left alone"

# Several at a time.
for machine in m1 m2 m3 m4; do PARITY_MACHINE=$machine "$PARITY" gate suite.toml --history history.sqlite >/dev/null 2>"$machine.log" & done
wait
"$PARITY" history history.sqlite --json | python3 -c 'import json, sys; n = len(json.load(sys.stdin)["runs"]); assert n == 12, n' || { cat m?.log; fail "runs at a time"; }
ok "four gates append at a time"

"$PARITY" history history.sqlite --html page/history.html >/dev/null
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -z "$chromium" ]; then
  echo "SKIP check-history: the page (no chromium)"
  [ "${PARITY_REQUIRE_CHROMIUM:-0}" != 1 ]
  exit
fi
python3 "$root/scripts/check_history.py" "$chromium" page/history.html "$shots"
