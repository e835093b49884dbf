#!/usr/bin/env bash
# The first step of the GitHub Action: a parity to run. One that is named, else the release of this checkout's version,
# else one that is built from this checkout.
#
#   PARITY_PROGRAM     a parity that is there already
#   ACTION_REPOSITORY  OWNER/NAME that the releases are taken from
#   PARITY_RELEASES    address of the folder with a version's files, in place of that
#   RUNNER_OS, RUNNER_ARCH, RUNNER_TEMP, GITHUB_OUTPUT  as on a runner
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source=$(cd "$(dirname "$0")/../.." && pwd)

use() {
  "$1" --version
  echo "program=$1" >>"$GITHUB_OUTPUT"
  exit
}

if [ -n "${PARITY_PROGRAM:-}" ]; then
  program=$(command -v "$PARITY_PROGRAM" || true)
  [ -n "$program" ] || { echo "::error title=parity::there is no program $PARITY_PROGRAM"; exit 2; }
  use "$(realpath "$program")"
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source/Cargo.toml" | head -n 1)
case ${RUNNER_OS:-}-${RUNNER_ARCH:-} in
  Linux-X64) target=x86_64-unknown-linux-gnu ;;
  Linux-ARM64) target=aarch64-unknown-linux-gnu ;;
  macOS-ARM64) target=aarch64-apple-darwin ;;
  macOS-X64) target=x86_64-apple-darwin ;;
  Windows-X64) target=x86_64-pc-windows-msvc ;;
  *) target= ;;
esac
name=parity-$version-$target.tar.gz
[ "${RUNNER_OS:-}" != Windows ] || name=${name%.tar.gz}.zip
releases=${PARITY_RELEASES:-${GITHUB_SERVER_URL:-https://github.com}/${ACTION_REPOSITORY:-}/releases/download/v$version}
folder=${RUNNER_TEMP:?}/parity-$version
mkdir -p "$folder"
if [ -n "$target" ] && curl -fsSL --retry 3 -o "$folder/SHA256SUMS" "$releases/SHA256SUMS"; then
  curl -fsSL --retry 3 -o "$folder/$name" "$releases/$name"
  # A file that the list does not have, or has otherwise, is not unpacked.
  (cd "$folder" && awk -v name="$name" '$2 == name || $2 == "*" name' SHA256SUMS >expected && [ -s expected ] &&
    { sha256sum -c expected 2>/dev/null || shasum -a 256 -c expected; }) ||
    { echo "::error title=parity::$releases/$name is not the file that SHA256SUMS names"; exit 2; }
  case $name in
    *.zip) (cd "$folder" && unzip -qo "$name") ;;
    *) tar -xzf "$folder/$name" -C "$folder" ;;
  esac
  program=$(find "$folder" -type f \( -name parity -o -name parity.exe \) | head -n 1)
  use "${program:?the archive holds no parity}"
fi

echo "::notice title=parity::no release of version $version for this machine at $releases: parity is built"
cargo build --release --features release --locked --manifest-path "$source/Cargo.toml" --bin parity
# A runner may have a folder of its own for what cargo builds.
use "${CARGO_TARGET_DIR:-$source/target}/release/parity"
