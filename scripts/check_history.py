"""Tries the page of a history in Chromium. Usage: check_history.py CHROMIUM PAGE SCREENSHOT_DIR; see check-history.sh."""

import base64
import pathlib
import sys
import tempfile

from check_html import Browser, check


def main():
    chromium, file, shots = sys.argv[1], pathlib.Path(sys.argv[2]).resolve(), pathlib.Path(sys.argv[3])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Browser(chromium, profile)
        try:
            page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
            page.open(file.as_uri())
            worse = page.js("document.getElementById('worse').textContent")
            check("blk.1.q_rope since dddddddd4444" in worse, "it begins with what is worse and since when")
            answer = "document.getElementById('answer').textContent"
            check("blk.1.q_rope" in page.js(answer) and "worse since dddddddd4444" in page.js(answer), page.js(answer))
            marks = page.js("document.querySelectorAll('#chart .since').length")
            dots = page.js("document.querySelectorAll('#chart circle').length")
            check(marks == 1 and dots == 5, f"the curve has its {dots} runs on that machine, and a mark")
            rows = page.js("document.querySelectorAll('#map tr').length")
            page.js("document.getElementById('filter').focus()")
            page.call("Input.insertText", text="blk.2")
            few = page.js("[...document.querySelectorAll('#map tr')].map(row => row.dataset.id)")
            check(0 < len(few) < rows and all(name.startswith("blk.2") for name in few), f"typing leaves {len(few)} of {rows} rows")
            page.js("document.getElementById('map').focus()")
            page.key("End")
            check(few[-1] in page.js(answer), f"End goes to {few[-1]}")
            page.key("ArrowUp")
            check(few[-2] in page.js(answer), f"the arrows walk: up to {few[-2]}")
            x, y = page.centre(f'#map tr[data-id="{few[0]}"] td')
            page.mouse(x, y, "mousePressed", "mouseReleased")
            check(few[0] in page.js(answer), f"a click chooses {few[0]}")
            page.js("(() => { const m = document.getElementById('machine'); m.value = 'slow'; m.dispatchEvent(new Event('change')); })()")
            check("not worse" in page.js(answer), "on the other machine it is not worse")
            x, y = page.centre("#worse button")
            page.mouse(x, y, "mousePressed", "mouseReleased")
            check("blk.1.q_rope" in page.js(answer) and page.js("document.getElementById('machine').value") == "fast", "what is worse is one click away")
            for name, width, height in (("laptop", 1280, 800), ("phone", 390, 844)):
                page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
                check(page.js("document.documentElement.scrollWidth") <= width, f"no sideways scrolling at {width}")
                for theme in ("light", "dark"):
                    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
                    if shots.name != "nonexistent":
                        shots.mkdir(parents=True, exist_ok=True)
                        shot = page.call("Page.captureScreenshot", format="png")["data"]
                        (shots / f"history-{name}-{theme}.png").write_bytes(base64.b64decode(shot))
            errors = page.errors()
            check(not errors, f"no console errors, no network {errors or ''}")
        finally:
            page.process.terminate()
            page.process.wait()


main()
