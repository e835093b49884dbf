"""Disturbs parity in every way that a machine does; see chaos.sh."""

import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
REPORT = sys.argv[2] if len(sys.argv) > 2 else None
PARITY = os.path.realpath(os.environ.get("PARITY", "target/release/parity"))
MODEL = os.path.realpath("reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf")
REFERENCE = os.path.realpath("reference-dumps/qwen2-tiny-py-Q4_K_M")
PROMPT = "def read_lines(path):"
# What runs are told that they may take, and what a process has besides: its own code, the mapped model, stacks.
ANNOUNCED = 256 << 20
BESIDES = 64 << 20
TIMEOUT_S = 120
LOCK = threading.Lock()
counts = collections.defaultdict(collections.Counter)
failures = []
left_out = set()
largest = collections.Counter()


def environment(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PARITY_", "GITHUB_"))}
    return {**env, "PARITY_LLAMA": "none", "PARITY_CACHE": "/nonexistent", "PARITY_MEMORY": str(ANNOUNCED), **more}


def driver():
    if os.environ.get("DRIVER"):
        return shlex.split(os.environ["DRIVER"])
    matrix = pathlib.Path(os.environ.get("MATRIX", "/nonexistent"))
    bins = sorted(matrix.glob("npm-*/package/bins/linux-x64"))
    if not bins or not (matrix / "driver").exists():
        left_out.add("record (no llama.cpp: DRIVER or MATRIX names one)")
        return None
    return [str(matrix / "driver"), str(bins[-1]), MODEL, "4", "312", "863", "2039", "1444", "1518"]


class Place:
    """A folder of one trial, with a model of its own and what must not be lost."""

    def __init__(self, root, shared):
        self.root, self.shared = pathlib.Path(root), shared
        self.model = self.root / "model.gguf"
        shutil.copyfile(MODEL, self.model)
        self.out, self.report = self.root / "out", self.root / "report"
        self.kept = self.root / "kept"
        shutil.copytree(shared / "dump", self.kept)
        shutil.copytree(shared / "report", self.report)
        self.before = digest(self.kept)
        self.suite = self.root / "suite.toml"
        self.suite.write_text(f"""name = "chaos"
[models]
m = "{self.model}"
[prompts]
p = "{PROMPT}"
[[case]]
name = "clean"
model = "m"
prompt = "p"
layer = "0"
[[case]]
name = "fault"
model = "m"
prompt = "p"
layer = "0"
inject = "rope.base=10000@0"
expect = "divergence"
""")


def digest(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


# Command -> (arguments, whether its exit status may be 1).
def commands(place):
    run = ["run", "--device", "cpu", "-t", "1", "-m", str(place.model), "-p", PROMPT, "--layer", "0"]
    reads = [["explain", "blk.0.q_rope", "--in", str(place.report)], ["diff-reports", str(place.report), str(place.report)],
             ["inspect", str(place.kept)], ["inspect", str(place.model)]]
    return {
        "run": run + ["--dump", str(place.out), "--report", str(place.report)],
        "run --force": run + ["--dump", str(place.out), "--force"],
        "run onto a dump": run + ["--dump", str(place.kept)],
        "audit": ["audit", str(place.kept), "-m", str(place.model), "-t", "1", "--layer", "0", "--report", str(place.report)],
        "gate": ["gate", str(place.suite), "--report", str(place.root / "gate")],
        "reading": random.choice(reads),
        "record": ["record", "-o", str(place.out), "--layer", "0", "--", *(place.shared_driver or [])],
    }


def start(args, place, limits=(), stdout=subprocess.DEVNULL, stderr=None, cwd=None):
    def prepare():
        os.setsid()
        for which, value in limits:
            resource.setrlimit(which, (value, value))

    error = open(place.root / f"stderr-{random.random()}", "w+b") if stderr is None else stderr
    command = [str(place.model) if a == MODEL else a for a in [PARITY, *args]]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=error, env=environment(), preexec_fn=prepare, cwd=cwd)
    return process, error


def finish(process, killed=False):
    """Exit status (negative: a signal) and peak memory; ends what takes too long."""
    timer = threading.Timer(TIMEOUT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.returncode, usage.ru_maxrss * 1024


def fail(what, command, why):
    with LOCK:
        failures.append(f"{what}, {command}: {why}")
        print(f"FAILED {failures[-1]}", file=sys.stderr, flush=True)


def judge(what, command, place, code, memory, error, ours=()):
    """One end of one run: an exit status, no panic, no more memory than was announced."""
    text = b""
    if error is not None and error is not subprocess.DEVNULL and hasattr(error, "seek"):
        error.seek(0)
        text = error.read()
        error.close()
    kind = {0: "judged", 1: "judged", 2: "refused"}.get(code, "killed" if code in ours else "other")
    with LOCK:
        counts[what, command][kind] += 1
        largest[command] = max(largest[command], memory)
    if kind == "other":
        fail(what, command, f"ended with {code}: {text[-300:]!r}")
    if b"panicked" in text or b"bug in parity" in text:
        fail(what, command, f"panicked: {text[:600]!r}")
    if command == "record" and code == 0:
        outs = [out for out in (place.out, place.root / "disk" / "out") if (out / "manifest.json").exists()]
        if not outs or not all(json.loads((out / "manifest.json").read_text())["complete"] for out in outs):
            fail(what, command, "ended with 0, and its recording is cut short")
    if command != "record" and not memory <= ANNOUNCED + BESIDES:
        fail(what, command, f"took {memory >> 20} MiB, {ANNOUNCED >> 20} MiB were announced")


def whole(what, command, place):
    """What is there afterwards can be read; what was there before is the same."""
    if digest(place.kept) != place.before:
        fail(what, command, "a dump that was there before has changed")
    for path in [*place.report.glob("*.json"), *place.root.glob("gate/gate.json")]:
        try:
            json.loads(path.read_text())
        except ValueError as error:
            fail(what, command, f"{path.name} is not whole: {error}")
    if place.out.exists() and any(place.out.iterdir()):
        process, error = start(["inspect", str(place.out)], place)
        code, memory = finish(process)
        error.seek(0)
        text = error.read()
        if code not in (0, 2) or b"panicked" in text:
            fail(what, command, f"its dump cannot be inspected: {code} {text[:300]!r}")
        error.close()


def kill(place, args, command):
    process, error = start(args, place)
    time.sleep(random.random() * place.typical[command])
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    code, memory = finish(process)
    judge("SIGKILL at a random moment", command, place, code, memory, error, ours=(-signal.SIGKILL,))


def size_limit(place, args, command):
    limit = random.choice([0, 1, 100, 4096, 20_000, 100_000, 300_000])
    process, error = start(args, place, [(resource.RLIMIT_FSIZE, limit)], stderr=subprocess.DEVNULL)
    judge("a limit of file size", command, place, *finish(process), None)


def memory_limit(place, args, command):
    limit = random.randrange(60 << 20, 400 << 20)
    process, error = start(args, place, [(resource.RLIMIT_AS, limit)])
    # A llama.cpp that gets no memory ends as it likes; so does a program that cannot even be loaded.
    ours = (-signal.SIGABRT, -signal.SIGSEGV, 127) if command == "record" else ()
    judge("a limit of memory", command, place, *finish(process), error, ours=ours)


def truncate(place, args, command):
    process, error = start(args, place)
    time.sleep(random.random() * place.typical[command])
    size = os.path.getsize(place.model)
    victim = place.model
    with open(victim, "r+b") as file:
        file.truncate(random.randrange(size))
    # The program that is recorded maps the model itself, and is ended by SIGBUS.
    judge("a model cut short while it is mapped", command, place, *finish(process), error)


def pipes(place, args, command):
    read, write = os.pipe()
    error_read, error_write = os.pipe()
    os.close(error_read)
    at_once = random.random() < 0.5
    if at_once:
        os.close(read)
    process, _ = start(args, place, stdout=write, stderr=error_write)
    os.close(write)
    os.close(error_write)
    if not at_once:
        os.read(read, 1)
        os.close(read)
    # The recorded program writes into the same pipes, and a closed one ends it by SIGPIPE, recorded or not.
    what = "closed pipes" if command != "record" else "closed pipes, which end the recorded program"
    judge(what, command, place, *finish(process), None)


def output(place, args, command):
    """Standard output closed, and nothing else: parity needs it for no judgement; a recorded program may."""
    read, write = os.pipe()
    os.close(read)
    process, error = start(args, place, stdout=write)
    os.close(write)
    code, memory = finish(process)
    judge("standard output closed", command, place, code, memory, error)
    if code == 2 and command not in ("run onto a dump", "record"):
        fail("standard output closed", command, "ended with 2")


def together(place, args, command):
    both = [start(args, place) for _ in range(2)]
    for process, error in both:
        judge("two runs into one folder", command, place, *finish(process), error)


def disk(place, args, command, options, what):
    """The outputs on a file system of their own."""
    target = place.root / "disk"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], stderr=subprocess.DEVNULL)
    if mounted.returncode:
        with LOCK:
            left_out.add("full and read-only disks (they need root)")
        return
    try:
        moved = [a.replace(str(place.out), str(target / "out")).replace(str(place.report), str(target / "report"))
                 .replace(str(place.root / "gate"), str(target / "gate")) if a.startswith(str(place.root)) else a for a in args]
        process, error = start(moved, place)
        judge(what, command, place, *finish(process), error)
        for path in target.rglob("*.json"):
            if path.name in ("report.json", "gate.json", "manifest.json"):
                json.loads(path.read_text())
    except ValueError as error:
        fail(what, command, f"a file is not whole: {error}")
    finally:
        for _ in range(50):
            if subprocess.run(["umount", str(target)], stderr=subprocess.DEVNULL).returncode == 0:
                break
            time.sleep(0.1)


def full_disk(place, args, command):
    disk(place, args, command, f"size={random.choice([4, 16, 64, 256, 1024])}k", "a full disk")


def read_only_disk(place, args, command):
    disk(place, args, command, "ro,size=64k", "a read-only disk")


DISTURBANCES = [kill, size_limit, memory_limit, truncate, pipes, output, together, full_disk, read_only_disk]
WRITES = {"run", "run --force", "audit", "gate", "record"}


def trial(work, shared, typical, shared_driver, disturbance, command, index):
    place = None
    root = tempfile.mkdtemp(dir=work)
    try:
        place = Place(root, shared)
        place.typical, place.shared_driver = typical, shared_driver
        disturbance(place, commands(place)[command], command)
        whole(disturbance.__name__, command, place)
    except Exception as error:  # the script's own mistake: say so, and go on
        fail(disturbance.__name__, command, f"the trial itself failed: {error!r}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def prepare(work, shared_driver):
    """A dump and a report to begin with, and how long each command takes."""
    shared = work / "shared"
    shared.mkdir()
    run = [PARITY, "run", "--device", "cpu", "-m", MODEL, "-p", PROMPT, "--layer", "0"]
    subprocess.run([*run, "--dump", shared / "dump", "--report", shared / "report"], env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    typical = {}
    for command in ["run", "run --force", "run onto a dump", "audit", "gate", "reading", "record"]:
        if command == "record" and not shared_driver:
            continue
        place = Place(tempfile.mkdtemp(dir=work), shared)
        place.shared_driver = shared_driver
        args = commands(place)[command]
        begun = time.monotonic()
        process, error = start(args, place)
        code, _ = finish(process)
        typical[command] = time.monotonic() - begun
        error.seek(0)
        wanted = 2 if command == "run onto a dump" else 0
        if code != wanted:
            raise SystemExit(f"chaos: undisturbed, {command} ends with {code}: {error.read().decode()[-500:]}")
        error.close()
    return shared, typical


HEAD = """# What parity survives

Made by `scripts/chaos.sh {rounds}`: {version}, {cores} cores, {total} disturbed runs in {minutes:.0f} minutes. Each run
has a model, a dump and a report of its own, and is disturbed at a random moment or by a random limit. It passes if it
ends with an exit code of parity's (0, 1: judged; 2: an error, or nothing that could be judged) or by the signal that was sent to it; if
nothing panicked; if every `report.json`, `gate.json` and dump that is there afterwards is whole, or says that it is
interrupted; if the dump that was there before has the same bytes; and if its memory stayed within what
`PARITY_MEMORY` announced ({announced} MiB, and {besides} MiB for code and the mapped model). `reading` stands for the commands that
only read: `inspect`, `explain` and `diff-reports`, one of them by chance.

| disturbance | command | runs | exit code 0 or 1 | exit code 2 | killed | failed |
|---|---|---|---|---|---|---|
"""


def report(typical, started):
    version = subprocess.run([PARITY, "--version"], capture_output=True, text=True).stdout.strip()
    total = sum(sum(counter.values()) for counter in counts.values())
    out = HEAD.format(rounds=ROUNDS, version=version, cores=os.cpu_count(), total=total, minutes=(time.monotonic() - started) / 60,
                      announced=ANNOUNCED >> 20, besides=BESIDES >> 20)
    for (what, command), counter in sorted(counts.items()):
        cells = [sum(counter.values()), counter["judged"], counter["refused"], counter["killed"], counter["other"]]
        out += f"| {what} | `{command}` | " + " | ".join(map(str, cells)) + " |\n"
    out += f"\nFailures of any kind: {len(failures)}.\n"
    memory = ", ".join(f"`{command}` {most >> 20} MiB" for command, most in sorted(largest.items()) if command != "record")
    out += f"\nMost memory that a run took: {memory}.\n"
    if left_out:
        out += f"\nLeft out: {'; '.join(sorted(left_out))}.\n"
    return total, out


def main():
    random.seed(int(os.environ.get("SEED", "1")))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = pathlib.Path(folder)
        shared_driver = driver()
        shared, typical = prepare(work, shared_driver)
        print("undisturbed: " + ", ".join(f"{command} {seconds * 1000:.0f} ms" for command, seconds in typical.items()), flush=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for disturbance in DISTURBANCES:
                mounts = disturbance in (full_disk, read_only_disk)
                chosen = [c for c in typical if not mounts or c in WRITES and (c != "run --force")]
                jobs = [pool.submit(trial, work, shared, typical, shared_driver, disturbance, command, index)
                        for index in range(ROUNDS) for command in chosen]
                concurrent.futures.wait(jobs)
                print(f"{disturbance.__name__}: {len(jobs)} trials, {len(failures)} failures so far, {time.monotonic() - started:.0f} s", flush=True)
        total, text = report(typical, started)
    if REPORT:
        path = pathlib.Path(REPORT)
        # What scripts/fuzz.sh found stands below.
        fuzzing = path.read_text().partition("\n## Fuzzing\n") if path.exists() else ("", "", "")
        path.write_text(text + "".join(fuzzing[1:]))
    print(text if not REPORT else f"{total} runs, {len(failures)} failures; {REPORT}")
    raise SystemExit(1 if failures else 0)


main()
