#!/usr/bin/env bash
# Hands a report folder to other people's validators: junit.xml to the JUnit schema of Jenkins' xUnit plugin (as
# pytest ships and tests against it) and to junitparser, summary.md to markdownlint.
#
#   scripts/check-reports.sh DIR...      folders of `parity … --report DIR`; needs python3 and npx
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
[ $# -gt 0 ] || { echo "usage: scripts/check-reports.sh DIR..." >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" -q install lxml==6.0.2 junitparser==5.0.3
python3 -m pip download -q --no-deps --no-binary :all: --dest "$work" pytest==8.4.2
tar -xzf "$work/pytest-8.4.2.tar.gz" -C "$work" pytest-8.4.2/testing/example_scripts/junit-10.xsd
# A summary is a part of a page, so that it has no title of its own; commands are not broken into lines.
echo '{"config": {"MD013": false, "MD041": false}}' > "$work/.markdownlint-cli2.jsonc"

for folder in "$@"; do
  "$work/venv/bin/python" - "$work/pytest-8.4.2/testing/example_scripts/junit-10.xsd" "$folder/junit.xml" <<'PY'
import sys
from junitparser import JUnitXml
from lxml import etree
schema, file = sys.argv[1:]
schema = etree.XMLSchema(etree.parse(schema))
if not schema.validate(etree.parse(file)):
    sys.exit(f"{file}: {schema.error_log}")
report = JUnitXml.fromfile(file)
cases = [case for suite in report for case in suite]
if not cases or report.tests != len(cases):
    sys.exit(f"{file}: {report.tests} tests announced, {len(cases)} there")
print(f"{file}: {len(cases)} cases, {report.failures} failures, follows the schema")
PY
  cp "$folder/summary.md" "$work/summary.md"
  (cd "$work" && npx --yes markdownlint-cli2@0.24.1 summary.md >/dev/null)
  echo "$folder/summary.md: markdownlint has nothing to say"
done
