"""Prepares docs/ for mdbook, and checks the site that it makes of it. Standard library only; see build-docs.sh.

Usage: build_docs.py stage DOCS STAGE | links SITE | search SITE CHROMIUM
"""

import html.parser
import os
import pathlib
import re
import shutil
import sys
import tempfile
import urllib.parse

# A link of a page: text, target. Code is not looked into: a fenced block is taken out first.
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
# What people look for, and the page that must be among the first answers.
SEARCHES = {"stale cache": "divergences", "SLURM array": "ci", "Monte Carlo": "bounds", "LD_PRELOAD": "recording"}
FIRST = 5
# Pages of the repository that are not on the site.
BESIDE = ("README.md", "AGENTS.md", "ARCHITECTURE.md", "skills/parity/SKILL.md", "python/README.md", "reference-dumps/README.md")


def pages(folder):
    return sorted(folder.rglob("*.md"))


def outside_code(text, change):
    """Applies `change` to what is not in a fenced block."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def stage(docs, folder):
    """Copies the pages; what they link to beside docs/ comes along, below `repository/`."""
    docs, source = docs.resolve(), folder / "src"
    shutil.copytree(docs, source, ignore=shutil.ignore_patterns("book.toml"))
    shutil.copy(docs / "book.toml", folder)
    root, missing, copied = docs.parent, [], set()

    def rewrite(text, original, placed):
        def link(match):
            target, hash_, anchor = match[2].partition("#")
            if not target or urllib.parse.urlsplit(target).scheme:
                return match[0]
            file = (original.parent / target).resolve()
            if not file.exists():
                missing.append(f"{original.relative_to(root)}: {target} is not there")
                return match[0]
            if file.is_relative_to(docs):
                there = source / file.relative_to(docs)
            else:
                there = bring(file)
            return f"{match[1]}({os.path.relpath(there, placed.parent)}{hash_}{anchor})"

        return outside_code(text, lambda part: LINK.sub(link, part))

    def bring(file):
        there = source / "repository" / file.relative_to(root)
        if there not in copied:
            copied.add(there)
            there.parent.mkdir(parents=True, exist_ok=True)
            if file.is_dir():
                # A folder has no page: its place is said by its name.
                there.mkdir(exist_ok=True)
            elif file.suffix == ".md":
                there.write_text(rewrite(file.read_text(), file, there))
            else:
                shutil.copy(file, there)
        return there

    for page in pages(docs):
        placed = source / page.relative_to(docs)
        placed.write_text(rewrite(page.read_text(), page, placed))
    for page in BESIDE:
        targets = [target.partition("#")[0] for _, target in LINK.findall((root / page).read_text())]
        missing += [f"{page}: {target} is not there" for target in targets
                    if not urllib.parse.urlsplit(target).scheme and not (root / page).parent.joinpath(target).exists()]
    listed = {(docs / target).resolve() for _, target in LINK.findall((docs / "SUMMARY.md").read_text())}
    left_out = [page for page in pages(docs) if page.name != "SUMMARY.md" and page not in listed]
    missing += [f"{page.relative_to(root)} is not in docs/SUMMARY.md" for page in left_out]
    finish(missing, f"{len(listed)} pages")


class Page(html.parser.HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def links(site):
    """Every link inside the site leads to a file, and every anchor to a place in it."""
    site = site.resolve()
    read = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    wrong, seen = [], 0
    # The page of what is not found has addresses from the root of a server; `print` repeats all the others.
    for path, page in read.items():
        if path.name in ("404.html", "print.html", "toc.html"):
            continue
        for link in page.links:
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc:
                continue
            seen += 1
            file = (path.parent / urllib.parse.unquote(address.path)).resolve() if address.path else path
            anchor = urllib.parse.unquote(address.fragment)
            where = path.relative_to(site)
            if not file.is_file():
                wrong.append(f"{where}: {link}: no such file")
            elif anchor and file in read and anchor not in read[file].anchors:
                wrong.append(f"{where}: {link}: no such place in {file.name}")
    finish(wrong, f"{seen} links of {len(read)} pages")


def search(site, chromium):
    """Types into the search of the front page, as a reader does, from a folder: no server, no network."""
    from check_html import Browser

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Browser(chromium, profile)
        page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        wrong = []
        for words, wanted in SEARCHES.items():
            page.open((site.resolve() / "index.html").as_uri() + "?search=" + urllib.parse.quote(words))
            found = page.js(
                "new Promise(done => { let tries = 0; const look = () => {"
                " const found = [...document.querySelectorAll('#mdbook-searchresults a, #searchresults a')].map(a => a.pathname);"
                " found.length || ++tries > 200 ? done(found) : setTimeout(look, 50); }; look(); })"
            )
            names = [pathlib.PurePath(urllib.parse.unquote(path)).stem for path in found[:FIRST]]
            if wanted not in names:
                wrong.append(f"search for {words!r}: {wanted} is not among {names}")
        errors = page.errors()
        page.process.terminate()
        page.process.wait()
    finish(wrong + errors, f"{len(SEARCHES)} searches in Chromium")


def finish(wrong, what):
    for line in wrong:
        print(f"FAIL {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"ok   {what}")


if __name__ == "__main__":
    tasks = {"stage": (stage, 2), "links": (links, 1), "search": (lambda site, chromium: search(site, str(chromium)), 2)}
    task, count = tasks.get(sys.argv[1] if sys.argv[1:] else "", (None, 0))
    if task is None or len(sys.argv) != 2 + count:
        sys.exit(__doc__)
    task(*map(pathlib.Path, sys.argv[2:]))
