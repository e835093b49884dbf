#!/usr/bin/env python3
"""Measures `parity guess`: every mistake of the catalogue is injected into parity's own engine, and its name is looked
for from what the engine then says. Prints a line for each case, and shares with their counts.

    scripts/measure-guess.py --model MODEL.gguf [--parity target/release/parity] [--evidence tokens,text,logits,…]
        [--place all,2] [--only NAME,…] [--every N] [-n 40] [-p PROMPT] [--json FILE] [--jobs 2]

    scripts/measure-guess.py --model MODEL.gguf --healthy [--libs FOLDER] [--vulkan FOLDER] [--server PROGRAM] [--json FILE]

    scripts/measure-guess.py --healthy --recordings FOLDER --models FOLDER [--json FILE]

--healthy   engines that nothing is wrong with, in place of mistakes: parity's own, llama.cpp's libraries in these folders
            (CPU; Vulkan, where llvmpipe is enough), a llama-server built with Vulkan; or, alone, all dumps of any engine
            below a folder, with the model files that these name below another: llama.cpp on CUDA, recorded elsewhere
--evidence  tokens, text: N greedy ones; logits: of the prompt, as raw f32, npy, npz and safetensors in turn; last: of the
            prompt's last token alone; logprobs: a server's ten likeliest tokens at 20 places; hidden: layer outputs
--place     all (layers), or the number of one layer; several: all,2
--every N   every N-th mistake alone

right: the injected mistake's name or one of its aliases; same: an output that is the healthy engine's but for rounding
in f32, which says nothing and is not counted; blind: called healthy, where the answer says that this mistake would not show; healthy: the same, where
it does not say so; among: one of several that explain it all ("apart": what is said of the same
engine behind the prompt of --discriminate); none: no answer; WRONG: another name. For hidden states the
layer must be right too (WRONG, else). "first" counts where the mistake stands first in the list of hypotheses, named or not. Mistakes that are another arithmetic, which a healthy engine may have, are not injected. Exit code 1: a wrong name, or a mistake that is called healthy without a word.
"""
import argparse, collections, concurrent.futures, io, json, math, os, pathlib, re, struct, subprocess, sys
import tempfile, time, zipfile

import numpy

import guess_healthy

ROWS_OF_SERVER = 20
TOP = 10
# Relative: of sums in f32 in another order.
ROUNDING = 2.0**-19
ARITHMETIC = re.compile(r"_rounded$|16_input$|^precision\.")
KINDS = ["tokens", "text", "logits", "last", "logprobs", "hidden"]


def run(command):
    """What a command says, and its processor time."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen([*map(str, command)], stdout=out, stderr=err)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err)]
        return child.returncode, *texts, used.ru_utime + used.ru_stime


def tensors(dump, name):
    """Rows of a tensor over all steps, each as bytes of f32."""
    rows = []
    for step in json.load(open(dump / "manifest.json"))["steps"]:
        raw = open(dump / step["file"], "rb").read()
        length = struct.unpack("<Q", raw[:8])[0]
        about = json.loads(raw[8 : 8 + length]).get(name)
        if about is None:
            continue
        start, end = (8 + length + at for at in about["data_offsets"])
        width = 4 * about["shape"][-1]
        rows += [raw[at : at + width] for at in range(start, end, width)]
    return rows


def floats(row):
    return memoryview(row).cast("f")


def log_probabilities(row, token):
    """What a server says of one row: OpenAI's chat form."""
    row = floats(row)
    largest = max(row)
    normaliser = largest + math.log(sum(math.exp(z - largest) for z in row))
    best = sorted(range(len(row)), key=lambda i: -row[i])[:TOP]
    said = lambda i: {"token": f"token_id:{i}", "id": i, "logprob": round(row[i] - normaliser, 6)}
    return {**said(token), "top_logprobs": [said(i) for i in best]}


def npy(rows):
    shape = f"({len(rows)}, {len(rows[0]) // 4})"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (63 - (10 + len(header)) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"".join(rows)


def npz(rows):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("logits.npy", npy(rows))
    return file.getvalue()


def safetensors(rows):
    data = b"".join(rows)
    about = {"dtype": "F32", "shape": [len(rows), len(rows[0]) // 4], "data_offsets": [0, len(data)]}
    header = json.dumps({"logits": about}).encode()
    return struct.pack("<Q", len(header)) + header + data


WRITERS = {"bin": b"".join, "npy": npy, "npz": npz, "safetensors": safetensors}


class Case:
    """What an engine with one mistake says."""

    def __init__(self, args, folder, inject, flags=()):
        self.folder, self.prompt, self.pieces = folder, args.prompt, args.pieces
        def dump(name, *what):
            command = [args.parity, "run", "-m", args.model, "-p", args.prompt, "--no-audit", "-t", "1", "--device", "cpu"]
            command += ["--dump", folder / name, "--format", "json", *what, *flags, *(["--inject", inject] if inject else [])]
            code, said, error, _ = run(command)
            whole = (folder / name / "manifest.json").exists() and not error.startswith("error")
            return said if whole else ""
        report = dump("said", "--checkpoint", "logits", "-n", args.n) if args.spoken else "-"
        self.ok = bool(report) and ("hidden" not in args.evidence or bool(dump("hidden", "--checkpoint", "blk.*.layer_out")))
        manifest = folder / ("said" if args.spoken else "hidden") / "manifest.json"
        self.tokens = json.load(open(manifest))["tokens"] if self.ok else []

    def rows(self, kind, n_prompt):
        """The numbers that a kind of evidence is made of."""
        if kind == "hidden":
            file = next(self.folder.glob("hidden/*.safetensors"))
            raw = file.read_bytes()
            names = sorted(json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]))
            return [row for name in names if name != "__metadata__" for row in tensors(self.folder / "hidden", name)]
        rows = tensors(self.folder / "said", "logits")
        return rows[n_prompt - 1 :] if kind == "logprobs" else rows[0 if kind == "logits" else n_prompt - 1 : n_prompt]

    def differs(self, kind, healthy, n_prompt):
        """Whether it says something else than a healthy engine."""
        if self.tokens != healthy.tokens and kind in ("tokens", "text", "logprobs"):
            return True
        if kind in ("tokens", "text"):
            return False
        own, right = (numpy.frombuffer(b"".join(case.rows(kind, n_prompt)), "<f4").astype(float) for case in (self, healthy))
        return not numpy.linalg.norm(own - right) <= ROUNDING * numpy.linalg.norm(right)

    def file(self, name, content):
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def flags(self, kind, n_prompt, number):
        """What `parity guess` is given of one kind of evidence."""
        front, behind, said = self.tokens[:n_prompt], self.tokens[n_prompt:], self.folder / "said"
        if kind == "tokens":
            return ["--tokens", join(front), "--tokens-seen", join(behind)]
        if kind == "text":
            return ["-p", self.prompt, "--text", self.file("text", b"".join(self.pieces[token] for token in behind))]
        if kind in ("logits", "last"):
            rows = tensors(said, "logits")[0 if kind == "logits" else n_prompt - 1 : n_prompt]
            form = list(WRITERS)[number % len(WRITERS)]
            return ["--tokens", join(front), "--logits", self.file(f"logits.{form}", WRITERS[form](rows))]
        if kind == "logprobs":
            rows = zip(tensors(said, "logits")[n_prompt - 1 :][:ROWS_OF_SERVER], behind)
            content = [log_probabilities(row, token) for row, token in rows]
            answer = {"choices": [{"index": 0, "logprobs": {"content": content}}]}
            return ["--tokens", join(front), "--logprobs", self.file("answer.json", json.dumps(answer).encode())]
        return ["--tokens", join(front), "--hidden", self.folder / "hidden"]


def pieces(model):
    """The bytes that each token stands for, of a byte-level vocabulary."""
    from gguf import GGUFReader

    field = GGUFReader(model).fields["tokenizer.ggml.tokens"]
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    texts = [bytes(field.parts[at]).decode() for at in field.data]
    return [bytes(byte_of.get(c, 63) for c in text) for text in texts]


def join(tokens):
    return ",".join(map(str, tokens))


def names_of(args):
    """Mistakes with a place in this model, that are injected, with the layers they have one in."""
    places = collections.defaultdict(set)
    for line in run([args.parity, "faults", "--of", args.model])[1].splitlines():
        spelling, _, place = line.split("\t")[0].rpartition("@")
        layer = re.match(r"blk\.(\d+)\.", place)
        places[spelling.split("=")[0].strip()].add(layer[1] if layer else None)
    known = {line.split()[0].split("[")[0] for line in run([args.parity, "faults"])[1].splitlines() if line.startswith(" ")}
    only = args.only.split(",") if args.only else [name for name in places if not ARITHMETIC.search(name)]
    return {name: places[name] for name in only if name in known}


def is_right(one, name):
    return name == one["name"] or name in one["aliases"]


def kind_of(told, name, differs, place, evidence):
    """How good an answer is."""
    right = lambda one: is_right(one, name)
    answer = told["answer"]
    if answer is not None and right({"name": answer, "aliases": told["aliases"]}):
        layers = told["hypotheses"][0]["layers"]
        at_layer = evidence != "hidden" or place == "all" or layers == {"one": int(place)}
        return "right" if at_layer else "WRONG"
    if answer == "healthy":
        unseen = [one.split("=")[0].split("@")[0] for one in told.get("unseen", [])]
        return "same" if not differs else "blind" if name in unseen else "healthy"
    if answer is None:
        return "among" if any(right(one) and one["share"] == 1 for one in told["hypotheses"]) else "none"
    return "WRONG"


def measure(args, healthy, n_prompt, number, name, place):
    """Every evidence of one mistake in one place."""
    inject, rows = name if place == "all" else f"{name}@{place}", []
    with tempfile.TemporaryDirectory() as folder:
        case = Case(args, pathlib.Path(folder), inject)
        for kind in args.evidence if case.ok else []:
            differs = case.differs(kind, healthy, n_prompt)
            if not differs:
                rows.append({"inject": inject, "evidence": kind, "kind": "same"})
                continue
            _, out, error, spent = run([args.parity, "guess", "-m", args.model, "-t", "1", "--format", "json", *case.flags(kind, n_prompt, number)])
            row = {"inject": inject, "evidence": kind, "kind": "error", "answer": error.strip()[:200], "seconds": round(spent, 2)}
            if out:
                told = json.loads(out)
                first = told["hypotheses"][0] if told["hypotheses"] else {}
                row |= {"kind": kind_of(told, name, differs, place, kind), "answer": told["answer"], "first": first.get("inject") or first.get("name")}
                row |= {"layers": first.get("layers"), "rows": first.get("rows"), "text": told["text"][:300]}
                row["is_first"] = row["kind"] == "right" or bool(first) and is_right(first, name)
            if row["kind"] == "among" and kind in ("tokens", "text"):
                row["apart"] = apart(args, pathlib.Path(folder), inject, name, case.flags(kind, n_prompt, number))
            rows.append(row)
    return rows


def apart(args, folder, inject, name, flags):
    """What is said of the same engine behind the prompt that is to tell apart what one output did not."""
    command = [args.parity, "guess", "-m", args.model, "-t", "1", "--format", "json"]
    told = json.loads(run([*command, *flags, "--discriminate"])[1])
    if told["discriminate"] is None:
        return "no prompt"
    tokens = told["discriminate"]["tokens"]
    run([args.parity, "run", "-m", args.model, "--tokens", join(tokens), "--no-audit", "-t", "1", "--device", "cpu", "--dump", folder / "again",
         "--checkpoint", "logits", "-n", args.n, "--format", "json", "--inject", inject])  # fmt: skip
    behind = json.load(open(folder / "again/manifest.json"))["tokens"][len(tokens) :]
    told = json.loads(run([*command, "--tokens", join(tokens), "--tokens-seen", join(behind)])[1])
    return kind_of(told, name, True, "all", "tokens")


def healthy_ones(args):
    """What is said of engines that nothing is wrong with."""
    def own(folder, numerics, prompt, kind):
        asked = argparse.Namespace(**{**vars(args), "prompt": prompt, "evidence": [kind], "spoken": kind != "hidden", "n": guess_healthy.SAID})
        case = Case(asked, folder, None, ["--numerics", numerics])
        return case.flags(kind, len(guess_healthy.tokens_of(args, run, prompt)), 0)

    def judged(name, make):
        with tempfile.TemporaryDirectory() as folder:
            try:
                flags = make(pathlib.Path(folder))
            except (subprocess.CalledProcessError, OSError) as why:
                return {"case": name, "answer": f"not made: {why}"[:200]}
            of_model = [] if "-m" in flags else ["-m", args.model]
            _, out, error, spent = run([args.parity, "guess", *of_model, "-t", "1", "--format", "json", *flags])
            told = json.loads(out) if out else {"answer": None, "text": error.strip()}
            return {"case": name, "answer": told["answer"], "text": told["text"][:300], "seconds": round(spent, 2)}

    counts, rows = collections.defaultdict(collections.Counter), []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(judged, *case) for case in list(guess_healthy.cases(args, run, own, log_probabilities))[:: args.every]]
        for job in concurrent.futures.as_completed(jobs):
            row = job.result()
            answer = str(row["answer"])
            counts["all"][answer if answer in ("healthy", "None") or answer.startswith("not made") else "ACCUSED"] += 1
            rows.append(row)
            print(f"{answer:12} {row['case'][:70]:70} {row.get('seconds', 0):6.1f} s  {'' if answer == 'healthy' else row.get('text', '')[:120]}", flush=True)
            if args.json:
                write(args, rows, counts)
    print(dict(counts["all"]))
    return 0 if set(counts["all"]) == {"healthy"} else 1


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parity", default="target/release/parity")
    options.add_argument("--model")
    options.add_argument("--evidence", default=",".join(KINDS))
    options.add_argument("--place", default="all")
    options.add_argument("--only")
    options.add_argument("--every", type=int, default=1)
    options.add_argument("-n", type=int, default=40)
    options.add_argument("-p", "--prompt", default="def read_lines(path):")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--json", type=pathlib.Path)
    options.add_argument("--healthy", action="store_true")
    for flag in ("libs", "vulkan", "server", "recordings", "models"):
        options.add_argument(f"--{flag}", type=pathlib.Path)
    args = options.parse_args()
    if not args.model and not (args.recordings and args.models):
        options.error("--model, or --recordings with --models")
    args.evidence = args.evidence.split(",")
    args.pieces = pieces(args.model) if "text" in args.evidence and args.model else []
    args.spoken = any(kind != "hidden" for kind in args.evidence)
    if args.healthy:
        with tempfile.TemporaryDirectory() as work:
            args.work = pathlib.Path(work)
            return healthy_ones(args)
    n_prompt = len(json.loads(run([args.parity, "inspect", args.model, "-p", args.prompt, "--format", "json"])[1])["tokens"])
    with tempfile.TemporaryDirectory() as folder:
        healthy = Case(args, pathlib.Path(folder), None)
        return all_of(args, healthy, n_prompt)


def all_of(args, healthy, n_prompt):
    names = list(names_of(args).items())[:: args.every]
    cases = [(name, place) for place in args.place.split(",") for name, at in names if place == "all" or place in at]
    counts, all_rows, begin = collections.defaultdict(collections.Counter), [], time.time()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, args, healthy, n_prompt, i, *case) for i, case in enumerate(cases)]
        for job in concurrent.futures.as_completed(jobs):
            for row in job.result():
                place = "one" if "@" in row["inject"] else "all"
                counts[f"{row['evidence']}, {place} layers" if place == "all" else f"{row['evidence']}, one layer"][row["kind"]] += 1
                all_rows.append(row)
                print(f"{row['inject']:26} {row['evidence']:8} {row['kind']:8} {str(row.get('answer')):22} first {str(row.get('first'))[:40]:22} {row.get('seconds', 0):6.1f} s", flush=True)
                if args.json:
                    write(args, all_rows, counts)
    for where, found in sorted(counts.items()):
        counted = sum(n for kind, n in found.items() if kind not in ("same", "error"))
        print(f"{where:24} right {found['right']} of {counted}  {dict(found)}")
    print(f"{time.time() - begin:.0f} s")
    return 1 if any(found["WRONG"] or found["healthy"] for found in counts.values()) else 0


def write(args, rows, counts):
    """The result so far, in an order of its own."""
    about = {"model": pathlib.Path(args.model or args.models).name, "prompt": args.prompt, "tokens": args.n, "every": args.every}
    order = sorted(rows, key=lambda row: row.get("case") or (row["evidence"], row["inject"]))
    shares = {where: dict(sorted(found.items())) for where, found in sorted(counts.items())}
    firsts = collections.Counter(row["evidence"] for row in rows if row.get("is_first"))
    about |= {"first": dict(sorted(firsts.items()))} if firsts else {}
    times = collections.defaultdict(list)
    for row in rows:
        times[row.get("evidence", "all")] += [row["seconds"]] if "seconds" in row else []
    seconds = {kind: {"median": numpy.median(all), "largest": max(all)} for kind, all in sorted(times.items()) if all}
    part = args.json.with_suffix(".part")
    part.write_text(json.dumps({**about, "counts": shares, "processor seconds": seconds, "cases": order}, indent=1) + "\n")
    part.rename(args.json)


if __name__ == "__main__":
    sys.exit(main())
