"""Drives Chromium through its debugging pipe (DevTools protocol, standard library only) over one report page.

Usage: check_html.py CHROMIUM REPORT.html [SCREENSHOT_DIR]; see check-html.sh.
"""

import base64
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SIZES = {"laptop": (1280, 800), "wide": (1680, 1050), "phone": (390, 844)}
THEMES = ("light", "dark")
# "Opens in a second": what parsing, laying out, running and painting the page costs its thread, which other
# work on the machine does not lengthen.
OPEN_MS = 1000
REPLY_S = 30


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, chromium, profile):
        read_theirs, write_ours = os.pipe()
        read_ours, write_theirs = os.pipe()

        def wire():
            # Chromium reads commands on 3 and writes replies on 4. Through high numbers: 3 may be taken.
            os.dup2(read_theirs, 60)
            os.dup2(write_theirs, 61)
            os.dup2(60, 3)
            os.dup2(61, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        self.process = subprocess.Popen(
            [chromium, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=wire,
            close_fds=False,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(read_theirs)
        os.close(write_theirs)
        self.out, self.replies = os.fdopen(write_ours, "wb", 0), os.fdopen(read_ours, "rb")
        self.sent, self.session, self.events = 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def read(self):
        message = bytearray()
        while (byte := self.replies.read(1)) != b"\0":
            if not byte:
                raise SystemExit("FAIL chromium ended")
            message += byte
        return json.loads(message)

    def call(self, method, **params):
        self.sent += 1
        command = {"id": self.sent, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        self.out.write(json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + REPLY_S
        while time.monotonic() < deadline:
            message = self.read()
            if message.get("id") == self.sent:
                if "error" in message:
                    raise SystemExit(f"FAIL {method}: {message['error']}")
                return message["result"]
            self.events.append(message)
        raise SystemExit(f"FAIL {method}: no reply in {REPLY_S} s")

    def js(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"FAIL {expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)
        # The timing is complete one task after the load event.
        self.js("new Promise(done => { const wait = () => document.readyState === 'complete' ? setTimeout(done, 50)"
                " : setTimeout(wait, 10); wait(); })")

    def key(self, name):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name])

    def mouse(self, x, y, *kinds):
        for kind in kinds:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def centre(self, selector):
        return self.js(f"(() => {{ const node = document.querySelector({selector!r}); node.scrollIntoView({{block:"
                       "'center'}); const box = node.getBoundingClientRect(); return [box.x + box.width / 2,"
                       " box.y + box.height / 2]; })()")

    def errors(self):
        found = []
        for event in self.events:
            params = event.get("params", {})
            method = event.get("method")
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
                found.append(f"console.{params['type']}: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:", "blob:")):
                    found.append(f"network request: {url}")
        return found


def check(condition, what):
    print(f"{'ok  ' if condition else 'FAIL'} {what}", flush=True)
    if not condition:
        raise SystemExit(1)


def heading(page):
    return page.js("document.querySelector('#checkpoint h2').textContent")


def check_mouse(page):
    ids = page.js("data.checkpoints.map(item => item.id)")
    before = heading(page)
    target = next(name for name in reversed(ids[: len(ids) * 2 // 3]) if name != before)
    x, y = page.centre(f'#cells a[data-id="{target}"]')
    page.mouse(x, y, "mouseMoved")
    check(target in page.js("document.getElementById('tip').textContent"), f"hovering shows the numbers of {target}")
    page.mouse(x, y, "mousePressed", "mouseReleased")
    check(heading(page) == target, f"clicking the map selects {target}")
    check(page.js("location.hash") == f"#{target}", "the address names it")


def check_keyboard(page):
    ids = page.js("data.checkpoints.map(item => item.id)")
    page.js("scrollTo(0, 0), document.querySelector('.skip').focus()")
    for presses in range(1, 20):
        page.key("Tab")
        if page.js("Boolean(document.activeElement.closest('#cells'))"):
            break
    check(presses < 15, f"the map is {presses} tabs from the top")
    page.key("Home")
    check(heading(page) == ids[0], f"Home goes to {ids[0]}")
    page.key("ArrowDown")
    below = heading(page)
    check(below != ids[0] and below in ids, f"the arrows walk: down to {below}")
    page.key("ArrowRight")
    check(heading(page) != below, f"and right to {heading(page)}")
    page.key("End")
    check(heading(page) == ids[-1], f"End goes to {ids[-1]}")
    check(page.js("document.activeElement.dataset.id") == ids[-1], "focus follows the selection")


def check_controls(page):
    if page.js("document.querySelectorAll('[name=mode]').length") == 2:
        x, y = page.centre(".modes label:nth-of-type(2)")
        page.mouse(x, y, "mousePressed", "mouseReleased")
        check(page.js("document.querySelector('.depth').classList.contains('difference')"), "the colours switch")
        page.js("document.querySelector('[name=mode]').click()")
    before = page.js("getComputedStyle(document.body).backgroundColor")
    page.js("document.getElementById('theme').click()")
    check(page.js("getComputedStyle(document.body).backgroundColor") != before, "the theme switches")
    page.js("delete document.documentElement.dataset.theme")
    overflow = page.js("document.documentElement.scrollWidth - innerWidth")
    check(overflow <= 0, "no sideways scrolling")


def check_find(page):
    ids = page.js("data.checkpoints.map(item => item.id)")
    target = ids[len(ids) // 2]
    page.js("document.getElementById('find').focus()")
    page.call("Input.insertText", text=target)
    shown = page.js("[...document.querySelectorAll('#found a')].map(link => link.textContent)")
    check(target in shown, f"typing finds {target}")
    dim, cells = page.js("[document.querySelectorAll('#cells .dim').length, links.length]")
    check(0 < dim < cells, f"{dim} of {cells} cells step back")
    page.key("Enter")
    check(heading(page) == target, f"Enter selects {target}")
    page.key("Escape")
    check(page.js("document.querySelectorAll('#cells .dim').length") == 0, "Escape shows all again")
    page.call("Input.insertText", text="no such node")
    check("no checkpoint" in page.js("document.getElementById('found').textContent"), "what is not there is said")
    page.key("Escape")


def check_layer(page):
    inner = page.js("(data.checkpoints.find(item => item.inputs && /^blk/.test(item.id)) || {}).id")
    if not inner:
        check(page.js("document.getElementById('layer').hidden"), "no graph, no picture of one")
        return
    page.js(f"select({inner!r})")
    layer = inner.split(".")[1]
    members = page.js(f"data.checkpoints.filter(item => item.id.startsWith('blk.{layer}.')).map(item => item.id)")
    drawn = page.js("[...document.querySelectorAll('#layer .node:not(.outside)')].map(node => node.dataset.id)")
    check(sorted(drawn) == sorted(members), f"the graph of layer {layer} has its {len(members)} nodes")
    edges, inputs = page.js("[document.querySelectorAll('#layer .edges path').length,"
                            f" data.checkpoints.filter(item => item.id.startsWith('blk.{layer}.'))"
                            ".reduce((sum, item) => sum + (item.inputs || []).length, 0)]")
    check(edges == inputs, f"and {edges} lines")
    boxes = page.js("[...document.querySelectorAll('#layer .node rect')].map(r => [r.x.baseVal.value, r.y.baseVal.value])")
    check(len({tuple(box) for box in boxes}) == len(boxes), "no two nodes lie on one another")
    above = page.js("[...document.querySelectorAll('#layer .edges path')].every(p => { const n = p.getAttribute('d')"
                    ".match(/-?[\\d.]+/g).map(Number); return n[1] < n[n.length - 1]; })")
    check(above, "what is read lies above")
    x, y = page.centre(f'#layer .node[data-id="{members[-1]}"]')
    page.mouse(x, y, "mousePressed", "mouseReleased")
    check(heading(page) == members[-1], f"clicking the graph selects {members[-1]}")


COMPARE = """(() => {
  const other = JSON.parse(document.getElementById("data").textContent);
  const item = other.checkpoints.find(item => item.candidate) || other.checkpoints[0];
  item.verdict = item.verdict === "match" ? "undecided" : "match";
  other.checkpoints.pop();
  const file = new File([%s], "old.%s");
  const list = new DataTransfer();
  list.items.add(file);
  const input = document.getElementById("other");
  input.files = list.files;
  input.dispatchEvent(new Event("change"));
  return new Promise(done => setTimeout(() => done([item.id, document.querySelector("#compare .outcome").textContent,
    [...document.querySelectorAll("#compare tbody th")].map(cell => cell.textContent)]), 300));
})()"""


def check_compare(page):
    n = page.js("data.checkpoints.length")
    for kind, text in (("json", "JSON.stringify(other)"),
                       ("html", "'<!doctype html><script type=\"application/json\" id=\"data\">' + JSON.stringify(other) + '</' + 'script>'")):
        changed, outcome, rows = page.js(COMPARE % (text, kind))
        check(f"{n - 1} checkpoints in common, 1 only here" in outcome, f"another report.{kind} is compared: {outcome}")
        check(rows == [changed], f"what changed is {rows}")
    _, outcome, rows = page.js(COMPARE % ("'no report'", "json"))
    check("is no report" in outcome and not rows, f"another file is refused: {outcome}")


def check_phone(page):
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=3, mobile=True)
    page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    wide = page.js("[...document.querySelectorAll('body *')].filter(node => !node.closest('.scroll, svg, #tip, .skip')"
                   " && node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
                   ".slice(0, 3).map(node => `${node.tagName}.${node.className}`)")
    check(page.js("document.documentElement.scrollWidth") <= 390 and not wide, f"no sideways scrolling on a phone {wide or ''}")
    ids = page.js("data.checkpoints.map(item => item.id)")
    x, y = page.centre(f'#cells a[data-id="{ids[0]}"]')
    page.mouse(x, y, "mousePressed", "mouseReleased")
    check(heading(page) == ids[0], f"a tap selects {ids[0]}")
    # A map and a graph that are wider than the window are scrolled to what is selected.
    hidden = page.js("(select(data.first), [...document.querySelectorAll('.scroll .selected')].filter(node => {"
                     "const box = node.getBoundingClientRect(), frame = node.closest('.scroll').getBoundingClientRect();"
                     "return box.width <= frame.width && (box.left < frame.left - 1 || box.right > frame.right + 1)"
                     "}).map(node => node.dataset.id))")
    check(not hidden, f"what is selected is in view on a phone {hidden or ''}")
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)


def screenshots(page, folder):
    for size, (width, height) in SIZES.items():
        for theme in THEMES:
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            page.js("document.activeElement.blur(), select(data.first), scrollTo(0, 0), tip()")
            page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            for suffix, whole in (("", False), ("-whole", True)):
                shot = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                                 **({"clip": clip(page, width)} if whole else {}))
                (folder / f"{size}-{theme}{suffix}.png").write_bytes(base64.b64decode(shot["data"]))
    print(f"ok   screenshots in {folder}")


def clip(page, width):
    return {"x": 0, "y": 0, "width": width, "height": page.js("document.documentElement.scrollHeight"), "scale": 1}


def main():
    chromium, report, folder = sys.argv[1], pathlib.Path(sys.argv[2]).resolve(), sys.argv[3]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Browser(chromium, profile)
        try:
            page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
            page.call("Performance.enable", timeDomain="threadTicks")
            page.open(report.as_uri())
            metrics = {m["name"]: m["value"] for m in page.call("Performance.getMetrics")["metrics"]}
            took = metrics["TaskDuration"] * 1000
            check(0 < took < OPEN_MS, f"opens in {took:.0f} ms ({report.stat().st_size / 1e6:.1f} MB)")
            check_mouse(page)
            check_keyboard(page)
            check_find(page)
            check_layer(page)
            check_compare(page)
            check_controls(page)
            check_phone(page)
            pdf = page.call("Page.printToPDF", printBackground=False)["data"]
            check(len(pdf) > 10_000, "prints")
            if folder:
                pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
                screenshots(page, pathlib.Path(folder))
            errors = page.errors()
            check(not errors, f"no console errors, no network {errors or ''}")
        finally:
            page.process.terminate()
            page.process.wait()


if __name__ == "__main__":
    main()
