#!/usr/bin/env bash
# Packs every crate as `cargo publish` would, and builds the program from the packages alone.
#
#   scripts/check-packages.sh [--list]     --list: only pack them, without building
#
# The crates need one another and are on no registry: each stands in for itself.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
crates=(parity-dump parity-graph parity-imports parity-record parity-tap)
# A registry takes no package above 10 MiB.
most=$((10 << 20))
own=()
for name in "${crates[@]}"; do own+=(--config "patch.crates-io.$name.path=\"$PWD/crates/$name\""); done
target=$PWD/target/packages
rm -rf "$target/package"
for name in "${crates[@]}" parity; do
  folder=crates/$name
  [ -d "$folder" ] || folder=.
  (cd "$folder" && cargo package --quiet --no-verify --allow-dirty --target-dir "$target" -p "$name" "${own[@]}" 2>&1 | { grep -v "^warning\|^ *|\|^ *=\|^$" || true; })
  file=$(ls "$target"/package/"$name"-[0-9]*.crate)
  size=$(stat -c %s "$file")
  printf '%-16s %9d bytes\n' "$name" "$size"
  [ "$size" -le "$most" ] || { echo "$name is larger than a registry takes: $most bytes" >&2; exit 1; }
  tar -xzf "$file" -C "$target/package"
done
[ "${1:-}" != --list ] || exit 0
# Only what is in the packages.
from=()
for name in "${crates[@]}"; do from+=(--config "patch.crates-io.$name.path=\"$(echo "$target"/package/"$name"-[0-9]*/)\""); done
cd "$(echo "$target"/package/parity-[0-9]*/)"
cargo check --release --target-dir "$target/build" "${from[@]}"
echo "the packages build"
