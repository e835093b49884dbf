#!/usr/bin/env bash
# Writes the changelog of this repository from its tags (v1.2.3): for each version its date and the first lines of its
# commits, the newest first; what has no tag yet is "Unreleased".
#
#   scripts/changelog.sh [--of v1.2.3]     --of: the section of one version alone, for the notes of a release
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
[ $# -eq 0 ] || { [ "$1" = --of ] && [ $# -eq 2 ]; } || { echo "usage: scripts/changelog.sh [--of v1.2.3]" >&2; exit 2; }
of=${2:-}
git rev-parse --quiet --verify HEAD >/dev/null || { echo "changelog: there is no commit here" >&2; exit 2; }

section() { # title, first commit that is not in it, last one that is
  printf '## %s\n\n' "$1"
  # Merges say nothing that their commits do not say.
  git log --no-merges --format='- %s' "${2:+$2..}$3" | sed 's/[*_<`]/\\&/g'
  echo
}

# Versions on the way to here, the newest first: of another branch none is ours.
mapfile -t tags < <(git tag --merged HEAD --list 'v[0-9]*' --sort=-version:refname)
if [ -n "$of" ] && [[ " ${tags[*]} " != *" $of "* ]]; then
  echo "changelog: there is no tag $of on the way to HEAD" >&2
  exit 2
fi
[ -n "$of" ] || printf '# Changelog\n\n'
latest=${tags[0]:-}
if [ -z "$of" ] && [ -n "$(git log --no-merges --format=%h "${latest:+$latest..}HEAD" | head -n 1)" ]; then
  section Unreleased "$latest" HEAD
fi
for i in "${!tags[@]}"; do
  tag=${tags[i]}
  [ -z "$of" ] || [ "$tag" = "$of" ] || continue
  section "${tag#v} ($(git log -1 --format=%cs "$tag"))" "${tags[i + 1]:-}" "$tag"
done
