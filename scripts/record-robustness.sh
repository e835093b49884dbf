#!/usr/bin/env bash
# What a recording survives: SIGKILL at random moments, Ctrl-C, a full disk, programs that cannot be tapped.
#
#   PARITY    the parity to record with (default: target/release/parity)
#   MATRIX    folder of scripts/record-matrix.sh, to find its download and driver again
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

parity=$(realpath "${PARITY:-target/release/parity}")
model=$(realpath reference-dumps/models/qwen2-tiny-py-F16.gguf)
if [ -n "${MATRIX:-}" ]; then work=$(realpath "$MATRIX"); else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
PARITY=$parity MATRIX=$work scripts/record-matrix.sh 3.22.1
program=("$work/driver" "$work/npm-3.22.1/package/bins/linux-x64" "$model" 64)
for i in $(seq 1 100); do program+=($((i * 37 % 4000))); done
dump=$work/dump-robust
failed=0
fail() {
    echo "FAILED: $*" >&2
    failed=1
}

# Readable, or says what is missing: and then with exit status 2, not with a crash. What was cut short is never judged to be whole.
readable() {
    local status=0
    if ! grep -q '"complete": true' "$dump/manifest.json" 2>/dev/null; then
        "$parity" audit "$dump" -m "$model" >"$work/audit" 2>&1 || status=$?
        [ "$status" = 2 ] || fail "$1: cut short, and its audit ended with $status"
        status=0
    fi
    "$parity" inspect "$dump" >"$work/inspect" 2>&1 || status=$?
    case $status in
    0) printf '%s: %s steps\n' "$1" "$(ls "$dump" | grep -c '^step-....\.safetensors$' || true)" ;;
    2) printf '%s: %s\n' "$1" "$(head -n 1 "$work/inspect")" ;;
    *) fail "$1: inspect ended with $status" ;;
    esac
}

# A process group of its own in which Ctrl-C is not ignored, as it is for a script's background jobs.
group='import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.setsid()
os.execvp(sys.argv[1], sys.argv[1:])'
record() { rm -rf "$dump" && exec python3 -c "$group" "$parity" record -o "$dump" -- "${program[@]}"; }

start=$(date +%s%N)
(record) >/dev/null 2>&1
whole_ms=$((($(date +%s%N) - start) / 1000000))
readable "whole, in $whole_ms ms"
for round in $(seq 1 10); do
    (record) >/dev/null 2>&1 &
    pid=$!
    ms=$((RANDOM * whole_ms / 32768))
    sleep "$(printf '%d.%03d' $((ms / 1000)) $((ms % 1000)))"
    kill -KILL -- "-$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    readable "SIGKILL $round after $ms ms"
done

rm -rf "$dump"
(record) >"$work/log" 2>&1 &
pid=$!
# In the midst of it: behind some of its steps.
while kill -0 "$pid" 2>/dev/null && [ ! -e "$dump/step-0003.safetensors" ]; do sleep 0.05; done
kill -INT -- "-$pid" 2>/dev/null || true
status=0
wait "$pid" || status=$?
[ "$status" = 2 ] || fail "Ctrl-C: exit status $status"
grep -q '^stopped  *the program ended with signal 2' "$work/log" || fail "Ctrl-C: nothing said of it"
readable "Ctrl-C behind some steps"

# A disk of 8 MB, where this may be made.
full=$work/full
mkdir -p "$full"
if mount -t tmpfs -o size=8m none "$full" 2>/dev/null; then
    status=0
    "$parity" record -o "$full/dump" -- "${program[@]}" >"$work/log" 2>&1 || status=$?
    [ "$status" = 2 ] || fail "full disk: exit status $status"
    [ "$(grep -c '^parity: recording stopped' "$work/log")" = 1 ] || fail "full disk: not exactly one message"
    grep -q '^last logit' "$work/log" || fail "full disk: the program did not end normally"
    grep -h '^parity: recording stopped' "$work/log" || true
    "$parity" inspect "$full/dump" >/dev/null || fail "full disk: what was recorded is not readable"
    umount "$full"
else
    echo "SKIP: no permission to mount a small disk"
fi

# Each must be refused with exit status 2 and a reason.
refused() { # what, expected text, command…
    local what=$1 expected=$2 status=0
    shift 2
    "$parity" record -o "$work/dump-refused" -- "$@" >"$work/log" 2>&1 </dev/null || status=$?
    [ "$status" = 2 ] || fail "$what: exit status $status"
    grep -q -- "$expected" "$work/log" || fail "$what: does not say: $expected"
    printf '%s: %s\n' "$what" "$(grep -h -m1 -- "$expected" "$work/log")"
}
echo 'int main(void) { return 0; }' >"$work/empty.c"
cc -static -o "$work/static" "$work/empty.c" && refused "static program" 'statically linked' "$work/static"
printf '\177ELF\1\1\1%057d' 0 >"$work/bits32" && chmod +x "$work/bits32"
refused "32-bit program" '32-bit' "$work/bits32"
printf 'MZ%0100d' 0 >"$work/other.exe" && chmod +x "$work/other.exe"
refused "Windows program" 'no ELF' "$work/other.exe"
refused "no llama.cpp" 'no llama.cpp graph' /bin/true
refused "no such program" 'no such program' "$work/nothing"
echo 'no model' >"$work/bad.gguf"
refused "a model that llama.cpp rejects" 'opened a model' "${program[0]}" "${program[1]}" "$work/bad.gguf" 2 1 2
exit $failed
