#!/usr/bin/env bash
# The step of the GitHub Action that judges: inputs become one command of parity, its summary the step's summary, its
# answer the step's outputs. It ends with 0 even where the answer is a divergence: the action's last step fails then,
# when the report is kept.
#
#   PARITY  the program; SUITE SHARD TIMES MERGE MODEL PROMPT CANDIDATE REFERENCE FLAGS BASELINE ACCEPT REPORT  inputs, as
#   action.yml says; ON_DEFAULT_BRANCH  true or false; GITHUB_OUTPUT, GITHUB_STEP_SUMMARY  as on a runner
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

wrong() {
  echo "::error title=parity::$1"
  exit 2
}

flags=()
if [ -n "${FLAGS:-}" ]; then
  # xargs knows quotes and expands nothing.
  words=$(xargs -n 1 printf '%s\n' <<<"$FLAGS") || wrong "flags: a quote is not closed: $FLAGS"
  while IFS= read -r word; do flags+=("$word"); done <<<"$words"
fi
model=()
if [ -n "${MODEL:-}" ]; then
  # What is no file but has the form of a name on the hub is one.
  if [ ! -e "$MODEL" ] && [[ $MODEL =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(:[A-Za-z0-9._-]+)?$ ]] && [[ $MODEL != *.gguf ]]; then
    model=(-hf "$MODEL")
  else
    model=(-m "$MODEL")
  fi
fi

accepted=false
if [ -n "${MERGE:-}" ]; then
  shopt -s nullglob
  # Words and patterns, as the input says; nothing else of a shell.
  # shellcheck disable=SC2206
  results=($MERGE)
  [ ${#results[@]} -gt 0 ] || wrong "merge: no file is called $MERGE: every shard was lost"
  command=(gate merge "${results[@]}")
elif [ -n "${SUITE:-}" ]; then
  command=(gate "$SUITE")
  [ -z "${SHARD:-}" ] || command+=(--shard "$SHARD")
  # The first run has no times yet.
  [ ! -f "${TIMES:-}" ] || command+=(--times "$TIMES")
  if [ -n "${BASELINE:-}" ]; then
    case ${ACCEPT:-auto}-${ON_DEFAULT_BRANCH:-false} in true-* | auto-true) accepted=true ;; esac
    # A baseline that does not exist yet is what `missing-baseline` says, not an error of the workflow.
    [ $accepted = false ] || command+=(--accept)
  fi
elif [ -n "${CANDIDATE:-}" ] && [ -n "${REFERENCE:-}" ]; then
  command=(diff "$CANDIDATE" "$REFERENCE" ${model[@]+"${model[@]}"})
elif [ -n "${CANDIDATE:-}" ]; then
  command=(audit "$CANDIDATE" ${model[@]+"${model[@]}"})
elif [ -n "${PROMPT:-}" ] || [ -n "${REFERENCE:-}" ]; then
  command=(run ${model[@]+"${model[@]}"})
  [ -z "${PROMPT:-}" ] || command+=("--prompt=$PROMPT")
  [ -z "${REFERENCE:-}" ] || command+=(--reference "$REFERENCE")
else
  wrong "nothing to judge: give suite, merge, candidate, or model with prompt"
fi
command+=(--report "${REPORT:?}" ${flags[@]+"${flags[@]}"})

printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
code=0
"$PARITY" "${command[@]}" | tee "$printed" || code=${PIPESTATUS[0]}
case $code in
  0) verdict=parity ;;
  1) verdict=divergence ;;
  2) verdict=undecided ;;
  *) wrong "parity ended with exit code $code" ;;
esac
[ ! -f "$REPORT/summary.md" ] || cat "$REPORT/summary.md" >>"$GITHUB_STEP_SUMMARY"
[ "$code" -eq 0 ] || accepted=false
[ $accepted = false ] || [ -f "$BASELINE" ] || wrong "baseline: $SUITE names another file than $BASELINE"
{
  echo "exit-code=$code"
  echo "verdict=$verdict"
  echo "first-divergence=$(sed -n 's/^DIVERGES at \([^ :]*\):.*/\1/p' "$printed" | head -n 1)"
  echo "accepted=$accepted"
} >>"$GITHUB_OUTPUT"
