#!/usr/bin/env bash
# Speed of the main job against llama.cpp, as ratios in one run: prefill with every checkpoint probed, one
# layer, the whole run with both sides audited, and the comparison of two dumps in GB/s.
#   scripts/bench-run.sh MODEL.gguf [TOKENS=290]     needs llama-completion and llama-eval-callback (LLAMA=DIR)
set -euo pipefail
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
timed() { local t=$(now); "$@" >"$work/out" 2>"$work/err" || true; python3 -c "print(f'{$(now)-$t:.2f}')"; }
best() { local b=; for _ in 1 2 3; do local t; t=$(timed "$@"); if [[ -z $b ]] || python3 -c "exit(not $t < $b)"; then b=$t; fi; done; echo "$b"; }

pp=$("$llama/llama-bench" -m "$model" -p "$n" -n 0 -r 3 -t "$(nproc)" -o json 2>/dev/null | python3 -c "import json,sys; print(f'{$n/json.load(sys.stdin)[0][\"avg_ts\"]:.2f}')")
full=$(best "$parity" run -m "$model" --tokens "$ids" --no-audit)
layer=$(best "$parity" run -m "$model" --tokens "$ids" --no-audit --layer 0)
printf 'llama.cpp prefill of %s tokens        %6s s\n' "$n" "$pp"
printf 'parity run, every checkpoint probed   %6s s   %sx\n' "$full" "$(python3 -c "print(f'{$full/$pp:.2f}')")"
printf 'parity run --layer 0                  %6s s\n' "$layer"
/usr/bin/time -f '%M' "$parity" run -m "$model" --tokens "$ids" --no-audit >/dev/null 2>"$work/mem" || true
printf 'peak memory                           %6s MB   model file %s MB\n' "$(($(tail -1 "$work/mem") / 1024))" "$(($(stat -c %s "$model") / 1048576))"
