#!/bin/sh
# Builds and runs the mistral.rs example.
#
#     run.sh MODEL.gguf TOKEN,TOKEN,… [--decode N] [--dump FOLDER] [--dtype f32|f16|bf16]
#
# The first run fetches mistralrs-core 0.8.1 with cargo, applies observe.patch to a copy of it in target/mistralrs-core, and
# builds that: 500 crates, half an hour on two cores. Needs cargo (Rust 1.88), a C compiler and patch.
set -eu

case "${1:---help}" in
    -h | --help)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
for tool in cargo cc patch; do
    command -v "$tool" > /dev/null || { echo "run.sh: $tool is not installed" >&2; exit 2; }
done
here=$(cd "$(dirname "$0")" && pwd)
version=0.8.1
crate=$here/target/mistralrs-core
if [ ! -f "$crate/src/observe.rs" ]; then
    fetched=$here/target/fetched
    mkdir -p "$fetched/src"
    : > "$fetched/src/lib.rs"
    cat > "$fetched/Cargo.toml" << TOML
[workspace]
[package]
name = "fetched"
version = "0.0.0"
edition = "2024"
[dependencies]
mistralrs-core = { version = "=$version", default-features = false }
TOML
    # The folder of the sources is the name of the manifest that cargo tells.
    found=$(cargo metadata --format-version 1 --manifest-path "$fetched/Cargo.toml" |
        tr ',' '\n' | sed -n "s|^\"manifest_path\":\"\(.*/mistralrs-core-$version\)/Cargo.toml\".*|\1|p")
    [ -d "$found" ] || { echo "run.sh: cargo did not fetch mistralrs-core $version" >&2; exit 2; }
    rm -rf "$crate.part"
    cp -r "$found" "$crate.part"
    patch --quiet --directory "$crate.part" --strip 1 < "$here/observe.patch"
    rm -rf "$crate"
    mv "$crate.part" "$crate"
fi
exec cargo run --release --locked --quiet --manifest-path "$here/Cargo.toml" -- "$@"
