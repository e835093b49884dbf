#!/usr/bin/env bash
# Reads the imports of real llama.cpp libraries of Linux, macOS and Windows, on both processors, and compares every slot with
# what readelf, llvm-objdump and llvm-readobj say of the same files. Processors' own libraries of ggml are left out: they are
# alike.
#
#   scripts/check-imports.sh [FOLDER]     FOLDER keeps the packages (default: a temporary one)
#
# Needs npm, binutils and llvm (14 or later).
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
keep=$(mkdir -p "${1:-$work/packages}" && realpath "${1:-$work/packages}")
cargo build --release --quiet -p parity-imports --example imports
ours=$PWD/target/release/examples/imports
failed=0

# Lines of an address and a name, as the tools of each format have them.
elf() { readelf -rW "$1" | awk '$3 ~ /JUMP_SLO|GLOB_DAT|R_X86_64_64|ABS64/ && NF >= 7 && $NF == "0" { split($5, name, "@"); print $1, name[1] }'; }
macho() {
  for list in bind lazy-bind weak-bind; do llvm-objdump --macho --$list "$1" 2>/dev/null || true; done |
    sed 's/ (weak_import)$//' | awk '{
      for (i = 3; i <= NF; i++) if ($i ~ /^0x/) break
      lazy = NF - i < 3 && $(i + 1) != "pointer"
      if (i <= NF && $NF ~ /^_/ && (lazy || $(i + 2) == 0)) { name = $NF; sub(/^_/, "", name); print tolower("00000000" substr($i, 3)), name }
    }'
}
pe() {
  llvm-readobj --coff-imports "$1" | awk '
    /ImportAddressTable(RVA)?:/ { at = $2; n = 0 }
    /Symbol:/ { print at, n++, $2 }' | while read -r at n name; do
    case $name in "" | "("*) ;; *) printf '%016x %s\n' $((at + 8 * n)) "$name" ;; esac
  done
}

check() { # PACKAGE MACHINE TOOL
  local at=$keep/${1%@*} file slots
  [ -d "$at" ] || { mkdir -p "$at" && (cd "$at" && npm pack --silent "@node-llama-cpp/$1" >/dev/null && tar xzf ./*.tgz && rm ./*.tgz); }
  for file in "$at"/package/bins/*/*; do
    case $file in *.json | *.lib | *.metal | *cpu-*) continue ;; esac
    "$ours" "$file" "$2" | sort -u >"$work/ours"
    "$3" "$file" | sort -u >"$work/theirs"
    if [ "$3" = macho ] && [ ! -s "$work/theirs" ]; then
      # Chains of words, which llvm-objdump does not list before 16: it has the slots of its table of addresses at least.
      llvm-objdump --macho --indirect-symbols "$file" |
        awk '/^Indirect/ { got = /__got/ } got && $3 ~ /^_/ { print substr($1, 3), substr($3, 2) }' | sort -u >"$work/theirs"
      awk 'NR == FNR { at[$1]; next } $1 in at' "$work/theirs" "$work/ours" >"$work/some" && mv "$work/some" "$work/ours"
    fi
    slots=$(wc -l <"$work/ours")
    if [ "$slots" -gt 0 ] && cmp -s "$work/ours" "$work/theirs"; then
      printf 'ok   %-16s %-32s %s slots\n' "${1%@*}" "${file##*/}" "$slots"
    else
      printf 'FAILED %s %s: %s slots, the tool says %s\n' "$1" "${file##*/}" "$slots" "$(wc -l <"$work/theirs")"
      diff "$work/ours" "$work/theirs" | head -n 5 || true
      failed=1
    fi
  done
}
check linux-x64@3.22.1 x86_64 elf
check linux-arm64@3.22.1 aarch64 elf
check mac-x64@3.21.1 x86_64 macho
check mac-arm64-metal@3.21.1 aarch64 macho
check win-x64@3.21.1 x86_64 pe
exit "$failed"
