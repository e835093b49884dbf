#!/usr/bin/env bash
# Checks what a release is made of, without making one: the changelog on a repository with tags, the archive of this
# machine in a fresh folder, checksums and notes, the action's installation from them, and that all agree on the names.
#
#   scripts/check-release.sh
#
#   PARITY  the program that stands for the release's (default: target/release/parity, built)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
root=$PWD
if [ -z "${PARITY:-}" ]; then cargo build --release --quiet; fi
PARITY=$(realpath "${PARITY:-target/release/parity}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAIL $*" >&2; exit 1; }
ok() { echo "ok   $*"; }

# The changelog, of a repository with two versions, a merge, a tag elsewhere, and work since.
mkdir -p "$work/repository/scripts"
cp scripts/changelog.sh scripts/release-notes.sh "$work/repository/scripts/"
cd "$work/repository"
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
export GIT_AUTHOR_DATE=2026-01-02T12:00:00Z GIT_COMMITTER_DATE=2026-01-02T12:00:00Z
commit() { git commit -q --allow-empty -m "$1"; }
git init -q -b main .
[ "$(scripts/changelog.sh 2>/dev/null | head -n 1)" = "# Changelog" ] && fail "a changelog of no commit"
commit "The first"
git tag v0.9.0
commit "Ops of <new> *kinds*"
git switch -q -c side && commit "From the side" && git tag v0.99.0-elsewhere && git switch -q main
commit "Between"
git merge -q --no-ff -m "Merge of the side" side 2>/dev/null
git tag -d v0.99.0-elsewhere >/dev/null
git tag v0.10.0
git switch -q -c lost v0.9.0 && commit "Never merged" && git tag v0.9.1 && git switch -q main
commit "Since"
scripts/changelog.sh >"$work/changelog"
cat >"$work/wanted" <<'EOF'
# Changelog

## Unreleased

- Since

## 0.10.0 (2026-01-02)

- Between
- From the side
- Ops of \<new> \*kinds\*

## 0.9.0 (2026-01-02)

- The first

EOF
# Commits of one second have no order of their own: lines are compared as a set within their section, titles in order.
[ "$(grep '^#' "$work/changelog")" = "$(grep '^#' "$work/wanted")" ] || { cat "$work/changelog"; fail "versions of the changelog"; }
diff <(sort "$work/wanted") <(sort "$work/changelog") || fail "lines of the changelog"
[ "$(scripts/changelog.sh --of v0.9.0)" = "$(printf '## 0.9.0 (2026-01-02)\n\n- The first\n')" ] || fail "the section of one version"
if scripts/changelog.sh --of v0.9.1 2>/dev/null; then fail "a version of another branch is none"; fi
if scripts/changelog.sh --of v7 2>/dev/null; then fail "a version that is not there"; fi
ok "changelog: two versions and what came since, without merges and other branches"

# The archive, tried in a fresh folder by the script itself.
cd "$root"
PROGRAM=$PARITY scripts/make-release.sh "$work/dist" >"$work/log" || { cat "$work/log"; fail "the archive"; }
ok "archive: $(cat "$work"/dist/*.md)"
if PROGRAM=$PARITY GLIBC_MAX=2.2 RUN=0 scripts/make-release.sh "$work/old" >/dev/null 2>&1; then fail "a newer glibc than wanted is let through"; fi
ok "archive: a newer glibc than wanted is refused"

# Notes and checksums.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
scripts/release-notes.sh "$work/dist" main >"$work/notes"
grep -q '^## What was run' "$work/notes" || fail "notes"
grep -q 'not run: GPUs' "$work/notes" || fail "notes do not say what was not run"
(cd "$work/dist" && sha256sum --quiet -c SHA256SUMS) || fail "checksums"
if scripts/release-notes.sh "$work/dist" v99.0.0 >/dev/null 2>&1; then fail "a tag of another version"; fi
touch "$work/dist/parity-99.0.0-x86_64-unknown-linux-gnu.tar.gz"
if scripts/release-notes.sh "$work/dist" main >/dev/null 2>&1; then fail "an archive of another version"; fi
rm "$work/dist/parity-99.0.0-x86_64-unknown-linux-gnu.tar.gz"
ok "notes: what was run, what was not; checksums; another version is refused"

# What the action installs is what was made.
output=$work/output
RUNNER_OS=Linux RUNNER_ARCH=$(uname -m | sed 's/x86_64/X64/; s/aarch64/ARM64/') RUNNER_TEMP=$work/runner GITHUB_OUTPUT=$output \
  PARITY_RELEASES=file://$work/dist scripts/action/install.sh >/dev/null || fail "installation from the release"
installed=$(sed -n 's/^program=//p' "$output")
[[ $installed == "$work"/runner/* ]] || fail "installed: $installed"
cmp "$installed" "$PARITY" || fail "another program is installed"
ok "the action installs it: ${installed#"$work"/runner/}"

# Names: the workflow's targets are those that the action asks for, and cargo binstall asks for the same files.
made=$(grep -o 'target: [a-z0-9_-]*' .github/workflows/release.yml | sed 's/target: //' | sort)
asked=$(sed -n 's/.*) target=\([a-z0-9_-]\+\) ;;/\1/p' scripts/action/install.sh | sort)
[ "$made" = "$asked" ] || fail "targets: $made, the action asks for $asked"
if grep -q '^\[package.metadata.binstall\]' Cargo.toml; then
  grep -q '/v{ version }/parity-{ version }-{ target }{ archive-suffix }"' Cargo.toml || fail "pkg-url of cargo binstall"
  grep -q 'bin-dir = "parity-{ version }-{ target }/{ bin }{ binary-ext }"' Cargo.toml || fail "bin-dir of cargo binstall"
fi
ok "names: $(echo "$made" | wc -l) targets, the same in the workflow, the action and cargo binstall; version $version"
