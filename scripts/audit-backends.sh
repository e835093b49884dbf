#!/usr/bin/env bash
# Judges what scripts/record-backends.sh recorded, and says of each recording how sharply: the largest local error and
# the widest bound of its matmuls and of its attention. Fails unless all are healthy.
#
#   scripts/audit-backends.sh OUT [NAME-GLOB…]       OUT: the folder that was recorded into
#
#   PARITY    the parity to judge with (default: target/release/parity)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
parity=$(realpath "${PARITY:-target/release/parity}")
out=${1:?usage: scripts/audit-backends.sh OUT}
shift
[ $# -gt 0 ] || set -- '*'

failed=0 judged=0
printf '%-30s %-10s %6s  %-21s %-21s\n' recording answer nodes 'matmuls: error, bound' 'attention: error, bound'
for dump in "$out"/dumps/*/; do
    name=$(basename "$dump")
    fits=no
    for glob in "$@"; do
        # shellcheck disable=SC2053
        if [[ $name == $glob ]]; then fits=yes; fi
    done
    [ $fits = yes ] || continue
    model=$(sed -n 's/^ *"file": "\([^"]*\.gguf\)",*/\1/p' "$dump/manifest.json" | head -n 1)
    code=0
    "$parity" audit "$dump" -m "$out/models/$model" --allow-missing --format json >"$out/report.json" 2>"$out/report.err" || code=$?
    words=(PARITY DIVERGES UNDECIDED)
    python3 - "$out/report.json" "$name" "${words[$code]:-FAILED}" <<'PY'
import json, sys
try:
    report = json.load(open(sys.argv[1]))
except ValueError:
    print(f"{sys.argv[2]:30} {sys.argv[3]}")
    sys.exit()
largest = {}
nodes = 0
for entry in report["checkpoints"]:
    local = entry["local"]["candidate"]
    if not local:
        continue
    nodes += 1
    name = entry["id"].split(".")[-1]
    attention = name in ("attn_ctx", "attn_scores", "attn_probs", "flash_attn_ext")
    matmul = name.endswith(("_proj", "_out", "ffn_gate", "ffn_up", "logits", "qkv", "ssm_in")) and not name == "layer_out"
    if attention or matmul:
        error, bound = largest.get(attention, (0, 0))
        largest[attention] = max(error, local["rel_l2"]), max(bound, local["bound_rel_l2"] or 0)
show = lambda pair: f"{pair[0]:.1e}, {pair[1]:.1e}" if pair else "-"
print(f"{sys.argv[2]:30} {sys.argv[3]:10} {nodes:6}  {show(largest.get(False)):21} {show(largest.get(True)):21}")
for origin in report["origins"][:4]:
    print(f"    origin {origin}")
PY
    judged=$((judged + 1))
    [ "$code" = 0 ] || failed=$((failed + 1))
done
echo
echo "$judged recordings, $failed not healthy"
[ "$failed" = 0 ] && [ "$judged" -gt 0 ]
