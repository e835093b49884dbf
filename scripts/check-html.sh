#!/usr/bin/env bash
# Opens a report.html in real headless Chromium: no console errors, no network, a clickable map, a working
# keyboard, finding by typing, the graph of a layer, the comparison with another report, a phone; screenshots at
# three sizes and in both themes.
#
#   scripts/check-html.sh REPORT.html [SCREENSHOT_DIR]
#
# Without Chromium it says SKIP and succeeds; PARITY_REQUIRE_CHROMIUM=1 makes that a failure.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

page=${1:?usage: scripts/check-html.sh REPORT.html [SCREENSHOT_DIR]}
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
missing=
[ -n "$chromium" ] || missing="no chromium (apt-get install chromium, or set CHROMIUM)"
command -v python3 >/dev/null || missing="no python3"
if [ -n "$missing" ]; then
  echo "SKIP check-html: $missing"
  [ "${PARITY_REQUIRE_CHROMIUM:-0}" != 1 ]
  exit
fi
exec python3 "$(dirname "$0")/check_html.py" "$chromium" "$page" "${2:-}"
