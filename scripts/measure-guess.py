#!/usr/bin/env python3
"""Measures `parity guess`: every mistake of the catalogue is injected into parity's own engine, and its name is looked
for from what the engine then says. Prints a line for each mistake, and shares with their counts.

    scripts/measure-guess.py --parity target/release/parity --model MODEL.gguf [--evidence tokens|text|logits|logprobs|hidden]
        [--layer N] [--only NAME ...] [-n 40] [-p PROMPT] [--device cpu]

A right answer is the injected mistake's name or one of its aliases; a silent one is no answer where the output is
healthy's own, and a mistake that moves no token is not counted as missed.
"""
import argparse, json, math, pathlib, re, resource, struct, subprocess, sys, tempfile

ROWS_OF_SERVER = 20
TOP = 10
SAYS = 'the candidate says "'


def run(command, **how):
    return subprocess.run(command, capture_output=True, text=True, **how)


def processor_time():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tensors(dump, name):
    """Rows of a tensor over all steps: a list of lists of floats."""
    rows = []
    for step in json.load(open(dump / "manifest.json"))["steps"]:
        raw = open(dump / step["file"], "rb").read()
        length = struct.unpack("<Q", raw[:8])[0]
        about = json.loads(raw[8 : 8 + length]).get(name)
        if about is None:
            continue
        start, end = about["data_offsets"]
        width = about["shape"][-1]
        values = memoryview(raw[8 + length + start : 8 + length + end]).cast("f")
        rows += [values[i * width : (i + 1) * width] for i in range(len(values) // width)]
    return rows


def log_probabilities(row, token):
    """What a server says of one row: OpenAI's chat form."""
    largest = max(row)
    normaliser = largest + math.log(sum(math.exp(z - largest) for z in row))
    best = sorted(range(len(row)), key=lambda i: -row[i])[:TOP]
    said = lambda i: {"token": f"token_id:{i}", "id": i, "logprob": round(row[i] - normaliser, 6)}
    return {**said(token), "top_logprobs": [said(i) for i in best]}


class Case:
    """What an engine with one mistake says."""

    def __init__(self, args, folder, inject):
        self.dump = folder / "dump"
        keep = "blk.*.layer_out" if args.evidence == "hidden" else "logits"
        command = [args.parity, "run", "-m", args.model, "-p", args.prompt, "--no-audit", "--checkpoint", keep]
        command += ["--dump", str(self.dump), "--force", "--device", args.device]
        if args.evidence != "hidden":
            command += ["-n", str(args.n)]
        self.ran = run(command + ["--format", "json"] + (["--inject", inject] if inject else []))
        manifest = self.dump / "manifest.json"
        self.ok = self.ran.returncode in (0, 1, 2) and manifest.exists() and not self.ran.stderr.startswith("error")
        self.tokens = json.load(open(manifest))["tokens"] if self.ok else []

    def text(self):
        """What the report says that it said; its tokens are all but the last, which nothing was computed behind."""
        said = [note for note in json.loads(self.ran.stdout)["notes"] if note.startswith(SAYS)][0]
        quoted = said[len(SAYS) : said.rindex('", tokens')]
        escapes = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
        spelt = lambda found: chr(int(found[2], 16)) if found[2] else escapes.get(found[1], found[1])
        return re.sub(r"\\(u\{([0-9a-f]+)\}|.)", spelt, quoted)

    def flags(self, args, folder, n_prompt):
        tokens = self.tokens
        if args.evidence == "tokens":
            return ["--tokens", join(tokens[:n_prompt]), "--tokens-seen", join(tokens[n_prompt:])]
        if args.evidence == "text":
            (folder / "text").write_bytes(self.text().encode())
            return ["-p", args.prompt, "--text", str(folder / "text")]
        if args.evidence == "logits":
            rows = tensors(self.dump, "logits")[:n_prompt]
            with open(folder / "logits.bin", "wb") as file:
                for row in rows:
                    file.write(row.tobytes())
            return ["--tokens", join(tokens[:n_prompt]), "--logits", str(folder / "logits.bin")]
        if args.evidence == "logprobs":
            rows = tensors(self.dump, "logits")[n_prompt - 1 :][:ROWS_OF_SERVER]
            content = [log_probabilities(row, tokens[n_prompt + i]) for i, row in enumerate(rows) if n_prompt + i < len(tokens)]
            answer = {"choices": [{"index": 0, "logprobs": {"content": content}}]}
            (folder / "answer.json").write_text(json.dumps(answer))
            return ["--tokens", join(tokens[:n_prompt]), "--logprobs", str(folder / "answer.json")]
        return ["--tokens", join(tokens), "--hidden", str(self.dump)]


def join(tokens):
    return ",".join(map(str, tokens))


def names_of(args):
    """Mistakes with a place in this model, that are injected."""
    if args.only:
        return args.only
    listed = run([args.parity, "faults", "--of", args.model]).stdout
    found = {}
    for line in listed.splitlines():
        found.setdefault(line.split("\t")[0].split("@")[0].split("=")[0].strip())
    known = {line.split()[0].split("[")[0] for line in run([args.parity, "faults"]).stdout.splitlines() if line.startswith(" ")}
    return [name for name in found if name in known]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parity", default="target/release/parity")
    options.add_argument("--model", required=True)
    options.add_argument("--evidence", default="tokens", choices=["tokens", "text", "logits", "logprobs", "hidden"])
    options.add_argument("--layer", help="the mistake is made in this layer alone")
    options.add_argument("--only", nargs="*")
    options.add_argument("-n", type=int, default=40)
    options.add_argument("-p", "--prompt", default="def read_lines(path):")
    options.add_argument("--device", default="cpu")
    args = options.parse_args()
    n_prompt = len(json.loads(run([args.parity, "inspect", args.model, "-p", args.prompt, "--format", "json"]).stdout)["tokens"])
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        healthy = Case(args, folder, None).tokens
        for name in names_of(args):
            inject = name if args.layer is None else f"{name}@{args.layer}"
            case = Case(args, folder, inject)
            if not case.ok:
                continue
            differs = args.evidence not in ("tokens", "text") or case.tokens != healthy
            before = processor_time()
            found = run([args.parity, "guess", "-m", args.model, "--format", "json", *case.flags(args, folder, n_prompt)])
            spent = processor_time() - before
            if not found.stdout:
                kind, answer, first = "error", found.stderr.strip()[:100], ""
            else:
                told = json.loads(found.stdout)
                right = lambda one: name == one["name"] or name in one["aliases"]
                answer = told["answer"]
                first = told["hypotheses"][0]["name"] if told["hypotheses"] else ""
                named = {"name": answer, "aliases": told["aliases"]}
                if right(named):
                    kind = "right"
                elif answer == "healthy":
                    kind = "healthy" if differs else "same"
                elif answer is None:
                    head = [one for one in told["hypotheses"] if one["share"] == 1]
                    kind = "among" if any(right(one) for one in head) else "none"
                else:
                    kind = "WRONG"
            counts[kind] = counts.get(kind, 0) + 1
            print(f"{inject:28} {kind:8} {str(answer):24} first {first:22} {spent:6.1f} s", flush=True)
    counted = sum(n for kind, n in counts.items() if kind not in ("same", "error"))
    print(args.model, args.evidence, counts, f"right {counts.get('right', 0)} of {counted}")
    return 1 if counts.get("WRONG") else 0


if __name__ == "__main__":
    sys.exit(main())
