#!/usr/bin/env bash
# Makes the archive of a release for this machine, and tries it in a fresh folder with an empty environment:
# parity-VERSION-TARGET.tar.gz (.zip on Windows) with the program, the shipped model, licence and README. Beside it lies
# TARGET.md, which says what was run of it and what was not.
#
#   scripts/make-release.sh [OUT]     default: target/dist
#
#   PROGRAM     a program that is built already (default: built with the profile `dist`)
#   TARGET      the target (default: this machine's). One that this machine cannot run: set RUN=0, and TARGET.md says so.
#   GLIBC_MAX   the newest glibc that program and tap may need, such as 2.28: newer is a failure (default: none is)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
mkdir -p "${1:-target/dist}"
out=$(cd "${1:-target/dist}" && pwd)
python=$(command -v python3 || command -v python)
target=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
suffix=
[[ $target != *windows* ]] || suffix=.exe

program=${PROGRAM:-}
if [ -z "$program" ]; then
  # Not `--target` where it is this machine's: what is built for the machine that builds, the tap, lies elsewhere then.
  cross=() folder=
  [ "$target" = "$(rustc -vV | sed -n 's/^host: //p')" ] || cross=(--target "$target") folder=$target/
  cargo build --profile dist --features release --locked ${cross[@]+"${cross[@]}"} --bin parity
  program=${CARGO_TARGET_DIR:-target}/${folder}dist/parity$suffix
fi

# What the dynamic linker must have: of the program, and of the tap in it, which was built for itself.
needs=
if [[ $target == *linux* ]]; then
  libraries=$(find "$(dirname "$program")/deps" -name 'libparity_tap*.so' 2>/dev/null || true)
  # shellcheck disable=SC2086
  needs=$(objdump -T "$program" $libraries | grep -o 'GLIBC_2\.[0-9]*' | sort -Vu | tail -n 1)
  if [ -n "${GLIBC_MAX:-}" ] && [ "$(printf '%s\n' "$needs" "GLIBC_$GLIBC_MAX" | sort -V | tail -n 1)" != "GLIBC_$GLIBC_MAX" ]; then
    echo "make-release: $program needs $needs, at most GLIBC_$GLIBC_MAX is wanted" >&2
    exit 1
  fi
fi

name=parity-$version-$target
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/$name"
cp "$program" "$stage/$name/parity$suffix"
cp -r README.md LICENSE reference-dumps "$stage/$name/"
"$python" - "$out/$name" "$stage" "$name" "$suffix" <<'PY'
import shutil, sys
base, stage, name, suffix = sys.argv[1:]
shutil.make_archive(base, "zip" if suffix else "gztar", stage, name)
PY
archive=$name.tar.gz
[ -z "$suffix" ] || archive=$name.zip

ran="not run: built on $(uname -sm)"
if [ "${RUN:-1}" = 1 ]; then
  # As its user has it: another folder, no settings, no llama.cpp, nothing of this repository.
  "$python" -c 'import shutil, sys; shutil.unpack_archive(*sys.argv[1:])' "$out/$archive" "$stage/fresh"
  chmod +x "$stage/fresh/$name/parity$suffix"
  mkdir "$stage/home"
  (
    cd "$stage/home"
    try() { env -i PATH=/usr/bin:/bin HOME="$stage/home" SYSTEMROOT="${SYSTEMROOT:-}" PARITY_LLAMA=none "$stage/fresh/$name/parity$suffix" "$@"; }
    try --version
    try run -p "def read_lines(path):" --device cpu >answer 2>log || { cat answer log; exit 1; }
    grep '^PARITY' answer
    code=0
    try run -p "def read_lines(path):" --device cpu --inject rope.base=10000@2 >answer 2>log || code=$?
    [ $code -eq 1 ] || { cat answer log; exit 1; }
    grep '^DIVERGES at blk.2.q_rope' answer
    if [[ $target == *linux* ]]; then
      # The tap is in it and is loaded: a program that is no llama.cpp then has no graph, and that is what it says.
      try record -o none -- "$(command -v true)" >answer 2>&1 || true
      grep 'computed no llama.cpp graph' answer || { cat answer; exit 1; }
    fi
  )
  ran="run on $(uname -sm)${needs:+ with glibc $(getconf GNU_LIBC_VERSION | cut -d' ' -f2)}: \`--version\`, \`run\`, \`run --inject\`; not run: GPUs, recording of llama.cpp"
fi
size=$(($(wc -c <"$out/$archive") / 1000000))
echo "| \`$archive\` | $size MB | ${needs:+glibc ${needs#GLIBC_} or later} | $ran |" >"$out/$target.md"
cat "$out/$target.md"
