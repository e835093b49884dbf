#!/usr/bin/env bash
# Makes the small libraries that crates/parity-imports/tests reads: one source of calls, slots and words of data, linked for
# Linux, macOS and Windows on both processors.
#
#   scripts/make-import-fixtures.sh [FOLDER]     default: crates/parity-imports/tests/data
#
# Needs llvm-mc and llvm-dlltool (package llvm) and the rust-lld that comes with Rust.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
out=$(realpath "${1:-crates/parity-imports/tests/data}")
lld=$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/rust-lld
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
assemble() { llvm-mc -triple "$1" -filetype=obj -o "$2"; }

# The same in every file: a call, a slot for an address, a word of data, and a word for an address within something.
data() { printf '.p2align 3\n%s %s\n%s %s+8\n' "$1" "$2" "$1" "$2"; }
x86() { printf '.globl %scaller\n%scaller:\n call %sllama_decode%s\n movq %sggml_backend_tensor_set@GOTPCREL(%%rip), %%rax\n ret\n' "$1" "$1" "$1" "$2" "$1"; }
arm() { printf '.globl %scaller\n%scaller:\n bl %sllama_decode\n%s\n ret\n' "$1" "$1" "$1" "$2"; }

elf() { # MACHINE TRIPLE, the source on standard input
  printf '.globl llama_decode,ggml_backend_tensor_set,llama_get_logits\nllama_decode:\nggml_backend_tensor_set:\nllama_get_logits:\n' |
    assemble "$2" other.o
  "$lld" -flavor gnu -shared -soname libother.so -o libother.so other.o
  assemble "$2" own.o
  "$lld" -flavor gnu -shared --strip-all -z noseparate-code -z max-page-size=4096 -o "$out/elf-$1.so" own.o libother.so
}
{ x86 '' @PLT; echo .data; data .quad llama_get_logits; } | elf x86_64 x86_64-linux-gnu
{ arm '' ' adrp x0, :got:ggml_backend_tensor_set
 ldr x0, [x0, :got_lo12:ggml_backend_tensor_set]'; echo .data; data .xword llama_get_logits; } | elf aarch64 aarch64-linux-gnu

cat >other.tbd <<'TBD'
--- !tapi-tbd
tbd-version: 4
targets: [ x86_64-macos, arm64-macos ]
install-name: '@rpath/libother.dylib'
exports:
  - targets: [ x86_64-macos, arm64-macos ]
    symbols: [ _llama_decode, _ggml_backend_tensor_set, _llama_get_logits, dyld_stub_binder ]
...
TBD
macho() { # MACHINE ARCH
  assemble "$2-apple-macos11.0" own.o
  for form in opcodes:-no_fixup_chains chained:-fixup_chains; do
    "$lld" -flavor darwin -dylib -arch "$2" -platform_version macos 13.0 13.0 "${form#*:}" -o "$out/macho-$1-${form%:*}.dylib" own.o other.tbd
  done
}
{ x86 _ ''; echo .data; data .quad _llama_get_logits; } | macho x86_64 x86_64
{ arm _ ' adrp x0, _ggml_backend_tensor_set@GOTPAGE
 ldr x0, [x0, _ggml_backend_tensor_set@GOTPAGEOFF]'; echo .data; data .quad _llama_get_logits; } | macho aarch64 arm64

pe() { # MACHINE TRIPLE KIND
  printf 'LIBRARY other.dll\nEXPORTS\nllama_decode\nggml_backend_tensor_set\n' >other.def
  printf 'LIBRARY later.dll\nEXPORTS\nllama_get_logits\n' >later.def
  for name in other later; do llvm-dlltool -m "$3" -d $name.def -l $name.lib; done
  assemble "$2" own.o
  "$lld" -flavor link /dll /noentry /nodefaultlib /delayload:later.dll "/out:$out/pe-$1.dll" own.o other.lib later.lib
  rm -f "$out/pe-$1.lib"
}
printf '.globl __delayLoadHelper2\n__delayLoadHelper2:\n.globl caller\ncaller:\n call *__imp_llama_decode(%%rip)
 movq __imp_ggml_backend_tensor_set(%%rip), %%rax\n call llama_get_logits\n ret\n' | pe x86_64 x86_64-pc-windows-msvc i386:x86-64
printf '.globl __delayLoadHelper2\n__delayLoadHelper2:\n.globl caller\ncaller:\n adrp x0, __imp_llama_decode
 ldr x0, [x0, :lo12:__imp_llama_decode]\n adrp x1, __imp_ggml_backend_tensor_set\n ldr x1, [x1, :lo12:__imp_ggml_backend_tensor_set]
 bl llama_get_logits\n ret\n' | pe aarch64 aarch64-pc-windows-msvc arm64
chmod 644 "$out"/*
ls -l "$out"
