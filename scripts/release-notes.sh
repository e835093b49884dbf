#!/usr/bin/env bash
# The last step before a release: checks that the files of DIR belong to one version, the tag's, writes DIR/SHA256SUMS,
# and prints the notes: what has changed since the tag before, and what was run of each program and what was not.
#
#   scripts/release-notes.sh DIR [v1.2.3]     without a tag, or with a branch in its place: the notes of a trial
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
dir=${1:?usage: scripts/release-notes.sh DIR [TAG]} tag=${2:-}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
if [[ $tag =~ ^v[0-9] ]] && [ "$tag" != "v$version" ]; then
  echo "release-notes: the tag is $tag, Cargo.toml says $version" >&2
  exit 1
fi
shopt -s nullglob
archives=("$dir"/*.tar.gz "$dir"/*.zip)
[ ${#archives[@]} -gt 0 ] || { echo "release-notes: no archive in $dir" >&2; exit 1; }
for file in "${archives[@]}" "$dir"/*.whl; do
  case ${file##*/} in
    parity-"$version"-* | parity_llm-"$version"-*) ;;
    *) echo "release-notes: $file is not of version $version" >&2; exit 1 ;;
  esac
done
rm -f "$dir/SHA256SUMS"
(cd "$dir" && sha256sum -- *.tar.gz *.zip *.whl) >"$dir/SHA256SUMS.part"
mv "$dir/SHA256SUMS.part" "$dir/SHA256SUMS"

if [[ $tag =~ ^v[0-9] ]]; then scripts/changelog.sh --of "$tag"; else scripts/changelog.sh | sed -n '/^## /,$p'; fi
echo "## What was run"
echo
echo "| file | size | needs | |"
echo "| --- | --- | --- | --- |"
for file in "${archives[@]}"; do
  target=${file##*/parity-"$version"-}
  target=${target%.tar.gz} target=${target%.zip}
  [ -f "$dir/$target.md" ] || { echo "release-notes: $dir/$target.md is not there: was $file tried?" >&2; exit 1; }
  cat "$dir/$target.md"
done
for file in "$dir"/*.whl; do echo "| \`${file##*/}\` | $(($(stat -c %s "$file") / 1000000)) MB | | installed and run by pip, pipx and uvx |"; done
