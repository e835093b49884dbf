#!/usr/bin/env bash
# Speed of the main job against llama.cpp, as ratios in one run: prefill with every checkpoint probed, one
# layer, the whole run with both sides audited, and the comparison of two dumps in GB/s.
#   scripts/bench-run.sh MODEL.gguf [TOKENS=290]     needs llama-completion and llama-eval-callback (LLAMA=DIR)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
model=$1 tokens=${2:-290}
parity=${PARITY:-target/release/parity}
llama=${LLAMA:?set LLAMA to the folder of llama-completion}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

# A prompt of the wanted length: source code, cut by tokens.
python3 - "$tokens" > "$work/prompt" <<'PY'
import inspect, sys, textwrap
print(inspect.getsource(textwrap)[: int(sys.argv[1]) * 4], end="")
PY
ids() { "$parity" inspect "$model" -p "$(cat "$work/prompt")" --format json | python3 -c 'import json,sys; print(",".join(map(str, json.load(sys.stdin)["tokens"])))'; }
all=$(ids); ids=$(cut -d, -f1-"$tokens" <<<"$all")
python3 - "$ids" > "$work/n" <<'PY'
import sys; print(len(sys.argv[1].split(",")))
PY
n=$(cat "$work/n")

now() { date +%s.%N; }
# Seconds of a command; 1 and 2 are answers (divergence, no reference), anything else is a failure.
timed() { local t=$(now) rc=0; "$@" >"$work/out" 2>"$work/err" || rc=$?; [ "$rc" -le 2 ] || { cat "$work/err" >&2; exit 1; }; python3 -c "print(f'{$(now)-$t:.2f}')"; }
best() { local b=; for _ in 1 2 3; do local t; t=$(timed "$@"); if [[ -z $b ]] || python3 -c "exit(not $t < $b)"; then b=$t; fi; done; echo "$b"; }

ratio() { python3 -c "print(f'{$1/$2:.2f}')"; }
line() { printf '%-52s %7s s   %sx\n' "$1" "$2" "$3"; }

# llama.cpp's own prefill, and what its callback example needs to print six values a row.
pp=$("$llama/llama-bench" -m "$model" -p "$n" -n 0 -r 3 -t "$(nproc)" -o json 2>/dev/null | python3 -c "import json,sys; print(f'{$n/json.load(sys.stdin)[0][\"avg_ts\"]:.2f}')")
flags=(-c 1024 -b 1024 -ub 1024 -fa off -ctk f32 -ctv f32)
# With the logits of all rows, and with those that the program itself asks for: the callback's has one row.
for rows in all own; do
  "$parity" record $([ $rows = all ] || echo --own-rows) -o "$work/$rows" -- "$llama/llama-completion" -m "$model" \
    -f "$work/prompt" -n 1 --no-warmup --no-escape --temp 0 -no-cnv "${flags[@]}" >/dev/null 2>&1
done
rows=$(python3 -c "import json; print(len(json.load(open('$work/all/manifest.json'))['tokens']))")

full=$(best "$parity" run -m "$model" --tokens "$ids" --no-audit)
layer=$(best "$parity" run -m "$model" --tokens "$ids" --no-audit --layer 0)
# By turns, so that a busy moment meets all of them.
callback= own= every=
faster() { if [[ -z $1 ]] || python3 -c "exit(not $2 < $1)"; then echo "$2"; else echo "$1"; fi; }
for _ in 1 2 3 4 5; do
  callback=$(faster "$callback" "$(timed "$llama/llama-eval-callback" -m "$model" -f "$work/prompt" "${flags[@]}")")
  own=$(faster "$own" "$(timed "$parity" run -m "$model" --reference "$work/own")")
  every=$(faster "$every" "$(timed "$parity" run -m "$model" --reference "$work/all")")
done
compared=$(best "$parity" diff "$work/all" "$work/all" --no-audit)
bytes=$(cat "$work"/all/step-*.safetensors | wc -c)

line "llama.cpp's own prefill of $n tokens" "$pp" 1.00
line "parity run, every checkpoint probed, no reference" "$full" "$(ratio "$full" "$pp")"
line "parity run --layer 0" "$layer" "$(ratio "$layer" "$pp")"
line "llama-eval-callback, $rows tokens, logits of one" "$callback" 1.00
line "parity run, both sides audited, logits of one" "$own" "$(ratio "$own" "$callback")"
line "parity run, both sides audited, logits of all" "$every" "$(ratio "$every" "$callback")"
printf '%-52s %7s s   %s GB/s\n' "parity diff of two dumps, all numbers" "$compared" "$(python3 -c "print(f'{2*$bytes/$compared/1e9:.2f}')")"
/usr/bin/time -f '%M' "$parity" run -m "$model" --tokens "$ids" --no-audit >/dev/null 2>"$work/mem" || true
printf '%-52s %7s MB  (model file %s MB)\n' "peak memory of the probed run" "$(($(tail -1 "$work/mem") / 1024))" "$(($(stat -c %s "$model") / 1048576))"
