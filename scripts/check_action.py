"""Executes action.yml and the matrix example with inputs as users give them; see check-action.sh.

Usage: check_action.py PARITY
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types

from workflow import Machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
DUMPS = ROOT / "reference-dumps"
MODEL = DUMPS / "models/qwen2-tiny-py-F16.gguf"
RECORDING = DUMPS / "qwen2-tiny-py-F16/read_lines"
PROMPT = "def read_lines(path):"
SUITE = """\
name = "mine"
baseline = "mine.baseline.json"
[models]
tiny = "{model}"
[[case]]
name = "hello"
model = "tiny"
reference = "{recording}"
numerics = "{numerics}"
{more}
"""


class Check:
    """One machine, one workspace, one action, and what came of it."""

    def __init__(self, folder, parity):
        self.folder, self.parity, self.n = pathlib.Path(folder), parity, 0
        self.machine = self.new_machine()

    def new_machine(self, **environment):
        self.n += 1
        own = types.SimpleNamespace(path=ROOT, name="parity")
        return Machine(self.folder / f"machine-{self.n}", own, {"PARITY_LLAMA": "none", "PARITY_REFERENCE_DUMPS": str(DUMPS), **environment})

    def workspace(self, files=()):
        self.n += 1
        workspace = self.folder / f"workspace-{self.n}"
        workspace.mkdir()
        for name, text in dict(files).items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(text)
        return workspace

    def act(self, what, inputs, code, verdict="", printed=(), summary=(), machine=None, workspace=None, program=True):
        """Runs the action once with these inputs, and checks how it ends."""
        machine = machine or self.new_machine()
        workspace = workspace or self.workspace()
        machine.printed, machine.summary = "", ""
        inputs = {**({"program": str(self.parity)} if program else {}), **inputs}
        step = {"id": "it", "uses": "owner/parity@v0.1.0", "with": inputs}
        whole, steps = machine.job([step], workspace, {})
        outputs = steps["it"]
        found = outputs.get("verdict") or ""
        problems = [f"the step {'succeeded' if whole else 'failed'}"] if whole != (code == 0) else []
        if verdict:
            problems += [f"verdict {found!r}"] if found != verdict else []
            problems += [f"exit code {outputs['exit-code']!r}"] if outputs["exit-code"] != str(code) else []
        problems += [f"{text!r} is not printed" for text in printed if text not in machine.printed]
        problems += [f"{text!r} is not in the summary" for text in summary if text not in machine.summary]
        self.say(what, problems, machine)
        return machine, workspace, outputs

    def say(self, what, problems, machine):
        if problems:
            print(machine.printed, machine.summary, sep="\n-- summary\n")
            sys.exit(f"FAIL {what}: {'; '.join(problems)}")
        print(f"ok   {what}", flush=True)

    def artifact(self, machine, names, artifact="parity-report"):
        there = {path.name for path in (machine.artifacts / artifact).iterdir()}
        self.say(f"the artifact holds {', '.join(names)}", [f"{name} is missing" for name in set(names) - there], machine)


def models_and_dumps(check):
    healthy = {"model": str(MODEL), "prompt": PROMPT}
    machine, _, _ = check.act("a model and a prompt: parity", healthy, 0, "parity", summary=["PARITY"])
    check.artifact(machine, ["report.json", "report.html", "junit.xml", "report.sarif", "summary.md"])
    wrong = {**healthy, "flags": "--inject 'rope.base=10000@2'"}
    annotation = "::error title="
    machine, _, outputs = check.act("a mistake: the step fails, and is annotated", wrong, 1, "divergence",
                                    printed=[annotation, "RoPE base is 10000"], summary=["blk.2.q_rope"])
    check.say("its first node is an output", [] if outputs["first-divergence"] == "blk.2.q_rope" else [str(outputs)], machine)
    check.artifact(machine, ["report.json"])

    machine, _, _ = check.act("code scanning, where it is asked for", {**wrong, "code-scanning": "true"}, 1, "divergence")
    first = ("error", "rope.base", "blk.2.q_rope")
    check.say("its alerts: one for each node that is wrong by itself", [] if machine.alerts and machine.alerts[0] == first
              and len(machine.alerts) == len(set(machine.alerts)) else [str(machine.alerts)], machine)

    # `fail: false` leaves the answer to later steps.
    own = check.new_machine()
    whole, steps = own.job([{"id": "it", "uses": "./", "with": {**wrong, "program": str(check.parity), "fail": "false"}}],
                           check.workspace(), {})
    check.say("fail: false leaves it to later steps", [] if whole and steps["it"]["verdict"] == "divergence" else [str(steps)], own)

    workspace = check.workspace()
    dump = [str(check.parity), "run", "-m", MODEL, "-p", PROMPT, "--layer", "0", "--device", "cpu"]
    for name, more in (("healthy", []), ("wrong", ["--inject", "linear.no_bias@0"])):
        subprocess.run([*dump, *more, "--dump", workspace / name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    two = {"reference": str(RECORDING), "model": str(MODEL), "flags": "--allow-missing"}
    check.act("two dumps", {**two, "candidate": "healthy"}, 0, "parity", workspace=workspace)
    check.act("two dumps, one wrong", {**two, "candidate": "wrong"}, 1, "divergence", printed=[annotation],
              summary=["blk.0.q"], workspace=workspace)
    check.act("a dump alone", {"candidate": "wrong", "model": str(MODEL)}, 1, "divergence", workspace=workspace)


def bad_inputs(check):
    check.act("nothing to judge", {}, 2, printed=["::error title=parity::nothing to judge"])
    check.act("a model that is not there", {"model": "none.gguf", "prompt": PROMPT}, 2, "undecided")
    check.act("a program that is not there", {"model": str(MODEL), "prompt": PROMPT, "program": "/none"}, 2,
              printed=["there is no program /none"], program=False)
    check.act("a quote that is not closed", {"model": str(MODEL), "prompt": PROMPT, "flags": "'--layer"}, 2, printed=["not closed"])
    evil = "$(touch pwned) `touch pwned` \"; touch pwned; ' ${{ github.token }}"
    for name in ("prompt", "flags", "suite", "merge", "model", "candidate", "baseline", "shard", "report"):
        workspace = check.workspace()
        inputs = {"model": str(MODEL), "prompt": PROMPT, name: evil}
        machine = check.new_machine()
        machine.job([{"uses": "./", "with": {**inputs, "program": str(check.parity)}}], workspace, {})
        check.say(f"a hostile {name} executes nothing", ["pwned"] if list(workspace.rglob("pwned")) else [], machine)


def baselines(check):
    files = {"mine.toml": SUITE.format(model=MODEL, recording=RECORDING, numerics="f64", more="")}
    inputs = {"suite": "mine.toml", "baseline": "mine.baseline.json"}
    machine = check.new_machine()
    machine.branch = "a-branch"
    check.act("a suite without a baseline yet, on a branch: undecided", inputs, 2, "undecided", printed=["baseline"],
              machine=machine, workspace=check.workspace(files))
    check.say("a branch keeps no baseline", [str(machine.caches)] if machine.caches.exists() else [], machine)
    machine.branch, machine.event = "main", "pull_request_target"
    shutil.rmtree(machine.artifacts)
    check.act("nor does what a fork proposes", inputs, 2, "undecided", machine=machine, workspace=check.workspace(files))
    machine.event = "push"
    shutil.rmtree(machine.artifacts)
    check.act("the default branch makes the baseline", inputs, 0, "parity", machine=machine, workspace=check.workspace(files))
    kept = list(machine.caches.iterdir())
    check.say("and keeps it in the cache", [] if len(kept) == 1 else [str(kept)], machine)
    machine.branch = "a-branch"
    shutil.rmtree(machine.artifacts)
    check.act("a branch is compared with it", inputs, 0, "parity", machine=machine, workspace=check.workspace(files))
    shutil.rmtree(machine.artifacts)
    worse = {"mine.toml": SUITE.format(model=MODEL, recording=RECORDING, numerics="f32", more="")}
    check.act("what is worse than the baseline fails", inputs, 1, "divergence", printed=["local error"], machine=machine,
              workspace=check.workspace(worse))
    machine.branch = "main"
    shutil.rmtree(machine.artifacts)
    check.act("on the default branch too", inputs, 1, printed=["the baseline stays as it is"], machine=machine,
              workspace=check.workspace(worse))
    check.say("and is not kept", [] if list(machine.caches.iterdir()) == kept else ["another cache"], machine)


def archive_name():
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    return f"parity-{version}-x86_64-unknown-linux-gnu.tar.gz"


def release(folder, parity, version):
    """A folder as a release has it, with a program that says which it is."""
    folder.mkdir()
    (folder / "parity").write_text(f"#!/bin/sh\n[ \"$1\" != --version ] || exec echo parity {version}\nexec {parity} \"$@\"\n")
    (folder / "parity").chmod(0o755)
    name = archive_name()
    with tarfile.open(folder / name, "w:gz") as archive:
        archive.add(folder / "parity", f"{name.removesuffix('.tar.gz')}/parity")
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  {name}\n")
    return folder


def releases(check):
    inputs = {"model": str(MODEL), "prompt": PROMPT, "flags": "--layer 0"}
    good = release(check.folder / "release", check.parity, "of the release")
    machine = check.new_machine(PARITY_RELEASES=good.as_uri())
    check.act("the program of a release", inputs, 0, "parity", printed=["parity of the release"], machine=machine, program=False)
    bad = release(check.folder / "tampered", check.parity, "of somebody else")
    with open(bad / archive_name(), "ab") as archive:
        archive.write(b"\0")
    machine = check.new_machine(PARITY_RELEASES=bad.as_uri())
    check.act("a release that was tampered with", inputs, 2, printed=["is not the file that SHA256SUMS names"],
              machine=machine, program=False)
    # Where there is no release it is built: here by a cargo that copies what was built before.
    tools = check.folder / "tools"
    tools.mkdir()
    target = check.folder / "target"
    (tools / "cargo").write_text(f"#!/bin/sh\necho cargo \"$@\"\nmkdir -p {target}/release\ncp {check.parity} {target}/release/parity\n")
    (tools / "cargo").chmod(0o755)
    machine = check.new_machine(PARITY_RELEASES=(check.folder / "none").as_uri(), CARGO_TARGET_DIR=str(target),
                                PATH=f"{tools}:{os.environ['PATH']}")
    check.act("no release: it is built", inputs, 0, "parity", printed=["cargo build --release --features release --locked"], machine=machine,
              program=False)


def matrix(check):
    suite = (ROOT / "suites/shipped.toml").read_text().replace('"../reference-dumps', f'"{DUMPS}')
    files = {"suites/nightly.toml": suite, "suites/shipped.baseline.json": (ROOT / "suites/shipped.baseline.json").read_text()}

    def run(lost):
        machine = check.new_machine(PARITY_RELEASES=release_folder.as_uri())
        results = machine.workflow(ROOT / "examples/ci/matrix.yml", lambda _: check.workspace(files), lost)
        return machine, results

    release_folder = release(check.folder / "matrix", check.parity, "of the release")
    machine, results = run(())
    check.say(f"the matrix example: {', '.join(results)}", [] if all(results.values()) else [str(results)], machine)
    check.artifact(machine, ["gate.json", "junit.xml", "report.sarif", "summary.md", "times.json"], "nightly")

    # The next night on the same machine shards are cut by the times of this one: each takes about as long as the others.
    saved = next(machine.caches.iterdir())
    times = json.loads(saved.read_text())["cases"]
    shutil.rmtree(machine.artifacts)
    again = machine.workflow(ROOT / "examples/ci/matrix.yml", lambda _: check.workspace(files))
    check.say("a second night", [] if all(again.values()) else [str(again)], machine)
    parts = [json.loads((machine.artifacts / f"shard-{n}/gate.json").read_text())["cases"] for n in (1, 2, 3)]
    seconds = [sum(times[case["id"]] for case in part) for part in parts]
    # Graham's bound of greedy schedules.
    most = sum(times.values()) / 3 + max(times.values())
    check.say(f"its shards are cut by time: {', '.join(f'{s:.1f} s' for s in seconds)}",
              [] if max(seconds) <= most and sum(map(len, parts)) == len(times) else [f"{seconds}, at most {most}"], machine)

    machine, results = run(("shard-2",))
    wanted = {"shard-1": True, "shard-2": False, "shard-3": True, "merge": False}
    check.say("a lost shard fails the merge", [] if results == wanted else [str(results)], machine)
    check.say("and it is named, with its cases", [] if "shard 2/3 left no result" in machine.printed else ["not said"], machine)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(folder, pathlib.Path(sys.argv[1]).resolve())
        for part in (models_and_dumps, bad_inputs, baselines, releases, matrix):
            part(check)


main()
