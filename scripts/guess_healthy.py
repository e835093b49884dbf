"""What healthy engines say, for `measure-guess.py --healthy`: parity's own in several arithmetics, llama.cpp's libraries on
the CPU and with Vulkan (--libs, --vulkan), recorded by parity, and a real llama-server (--server), with caches of several
types, and recordings that were made elsewhere (--recordings, with --models). Each case is a name, and a function that makes it in a
folder and gives the flags of `parity guess`."""

import contextlib, json, os, pathlib, re, shutil, socket, struct, subprocess, time, urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROMPTS = ["def read_lines(path):", "import os\n", "class Node:\n    def __init__(self", "for i in range(10):\n",
           "with open(name) as file:\n    ", "return sorted("]  # fmt: skip
OWN = ["f32", "f64", "llama-cpu", "f16", "bf16", "f32 kv=f16", "f16 storage=f16 kv=f16", "bf16 storage=bf16 kv=bf16"]
# ggml's numbers of the types of caches.
CACHES = {"f16": 1, "f32": 0, "bf16": 30, "q8_0": 8, "q5_1": 7, "q4_0": 2}
SAMPLED = {"temperature": 0.8, "seed": 7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Tokens that each says.
SAID = 32


def of_engine(args, make):
    """parity's own engine in each arithmetic."""
    for numerics in OWN:
        for number, prompt in enumerate(PROMPTS):
            kinds = ["tokens", "text", "logits", "last", "logprobs", "hidden"]
            # Two kinds of evidence of each, so that every one comes with every arithmetic.
            for kind in (kinds[number], kinds[(number + 3) % len(kinds)]):
                yield f"parity {numerics}, {kind}, {prompt!r}", lambda folder, n=numerics, p=prompt, k=kind: make(folder, n, p, k)


def recorded(args, libs, mark, run, caches):
    """Logits and hidden states of llama.cpp's libraries."""
    driver = args.work / "driver"
    if not driver.exists():
        subprocess.run(["cc", "-O1", "-w", "-o", driver, ROOT / "scripts/record/driver.c", "-ldl"], check=True)

    def make(folder, prompt, kind, cache, flash):
        tokens = tokens_of(args, run, prompt)
        wanted = "logits" if kind == "logits" else "blk.*.layer_out"
        environment = {**os.environ, "DRIVER_CACHE": str(CACHES[cache]), "DRIVER_FLASH": "on" if flash else "off"}
        environment |= {"DRIVER_THREADS": "1", "GGML_VK_VISIBLE_DEVICES": "0"}
        command = [args.parity, "record", "--force", "-o", folder / "dump", "--checkpoint", wanted, "--"]
        command += [driver, libs, args.model, str(len(tokens)), *map(str, tokens)]
        subprocess.run([*map(str, command)], env=environment, capture_output=True, check=True)
        if kind == "hidden":
            return ["--hidden", folder / "dump"]
        (step,) = json.load(open(folder / "dump/manifest.json"))["steps"]
        return ["--tokens", ",".join(map(str, tokens)), "--logits", folder / "dump" / step["file"]]

    for cache in caches:
        # Quantised values need flash attention.
        for flash in (True, False) if cache in ("f32", "f16", "bf16") else (True,):
            for prompt in PROMPTS[:3]:
                for kind in ("logits", "hidden"):
                    name = f"{mark} {cache}{' flash' if flash else ''}, {kind}, {prompt!r}"
                    yield name, lambda folder, p=prompt, k=kind, c=cache, f=flash: make(folder, p, k, c, f)


def tokens_of(args, run, prompt):
    return json.loads(run([args.parity, "inspect", args.model, "-p", prompt, "--format", "json"])[1])["tokens"]


@contextlib.contextmanager
def server(args, cache, device):
    """A llama-server on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = args.server.resolve()
    command = [program, "-m", args.model, "-c", "256", "-t", "1", "-np", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["-ctk", cache, "-ctv", cache, "-fa", "on" if cache not in ("f32", "f16", "bf16") else "auto"]
    command += ["--device", "none", "-ngl", "0"] if device == "cpu" else ["-ngl", "99"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    child = subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                if json.load(urllib.request.urlopen(f"{url}/health"))["status"] == "ok":
                    break
            if child.poll() is not None:
                raise OSError(f"{program} ended with {child.returncode}")
        yield url
    finally:
        child.kill()
        child.wait()


def ask(url, prompt, **how):
    body = json.dumps({"prompt": prompt, "n_predict": SAID, "cache_prompt": False, **how}).encode()
    request = urllib.request.Request(f"{url}/completion", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def of_server(args, device, caches):
    """Text, log-probabilities and sampled text of a llama-server: asked for at once, judged later."""
    for cache in caches:
        try:
            with server(args, cache, device) as url:
                yield from of_prompts(url, f"llama-server {device} {cache}")
        except OSError as why:
            print(f"not made: llama-server {device} {cache}: {why}", flush=True)


def of_prompts(url, mark):
    for prompt in PROMPTS:
        greedy, drawn = ask(url, prompt, temperature=0), ask(url, prompt, **SAMPLED)
        body = {"prompt": prompt, "max_tokens": SAID, "temperature": 0, "logprobs": 10}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = urllib.request.urlopen(request).read()
        flags = ["--temp", SAMPLED["temperature"], "--seed", SAMPLED["seed"]]
        for kind, content, more in (("text", greedy["content"].encode(), []), ("logprobs", answer, []), ("sampled", drawn["content"].encode(), flags)):
            if content:
                yield f"{mark}, {kind}, {prompt!r}", lambda folder, p=prompt, c=content, k=kind, m=more: given(folder, p, c, k, m)


def given(folder, prompt, content, kind, more):
    (folder / "seen").write_bytes(content)
    return ["-p", prompt, "--logprobs" if kind == "logprobs" else "--text", folder / "seen", *more]


def of_recordings(args, log_probabilities):
    """What dumps below a folder hold of any engine: all logits, those of the last row, log-probabilities of the rows behind the
    prefill, hidden states. A model is the file below --models that the dump names."""
    models = {path.name: path for path in args.models.rglob("*.gguf")}
    for dump in sorted(path.parent for path in args.recordings.rglob("manifest.json")):
        manifest = json.load(open(dump / "manifest.json"))
        model = models.get(manifest["model"]["file"])
        if model is None:
            print(f"not made: {dump}: no {manifest['model']['file']} below {args.models}", flush=True)
            continue
        tokens, steps = manifest["tokens"], [len(step["positions"]) for step in manifest["steps"]]
        kinds = ["hidden"] if has(dump, r"blk\.\d+\.layer_out") else []
        kinds += ["logits", "last"] + ["logprobs"] * (len(steps) > 2) if has(dump, "logits") else []
        for kind in kinds:
            def make(folder, dump=dump, kind=kind, model=model, tokens=tokens, prompt=steps[0]):
                flags = ["-m", model]
                if kind == "hidden":
                    only(dump, folder / "states", r"blk\.\d+\.layer_out|final_norm")
                    return [*flags, "--hidden", folder / "states"]
                if kind == "logprobs":
                    # The last of the prefill and those of the steps, of which the last token has none behind it.
                    rows = rows_of(dump, "logits")[prompt - len(tokens) - 1 : -1]
                    content = [log_probabilities(row, token) for row, token in zip(rows, tokens[prompt:])]
                    (folder / "answer.json").write_text(json.dumps({"choices": [{"index": 0, "logprobs": {"content": content}}]}))
                    return [*flags, "--tokens", ",".join(map(str, tokens[:prompt])), "--logprobs", folder / "answer.json"]
                return [*flags, "--logits", dump, *(["--rows", f"{len(tokens) - 1}..{len(tokens)}"] if kind == "last" else [])]

            yield f"recording {dump.relative_to(args.recordings)}, {kind}", make


def parts(file):
    """The tensors of a step's file: {name: (description, bytes)}."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    about = json.loads(raw[8 : 8 + length])
    about.pop("__metadata__", None)
    return {name: (one, raw[8 + length + one["data_offsets"][0] : 8 + length + one["data_offsets"][1]]) for name, one in about.items()}


def has(dump, name):
    return any(re.fullmatch(name, key) for key in parts(dump / "step-0000.safetensors"))


def rows_of(dump, name):
    """Rows of a tensor over all steps, each as bytes."""
    out = []
    for step in json.load(open(dump / "manifest.json"))["steps"]:
        about, raw = parts(dump / step["file"])[name]
        width = len(raw) // about["shape"][0]
        out += [raw[at : at + width] for at in range(0, len(raw), width)]
    return out


def only(dump, to, names):
    """A copy of a dump with some of its tensors."""
    to.mkdir()
    for graph in dump.glob("graph-*"):
        shutil.copy(graph, to)
    manifest = json.load(open(dump / "manifest.json"))
    (to / "manifest.json").write_text(json.dumps(manifest | {"rows": {k: v for k, v in manifest["rows"].items() if re.fullmatch(names, k)}}))
    for step in manifest["steps"]:
        header, data = {}, b""
        for name, (about, raw) in parts(dump / step["file"]).items():
            if re.fullmatch(names, name) or name.startswith("leaf."):
                header[name] = about | {"data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (to / step["file"]).write_bytes(struct.pack("<Q", len(text)) + text + data)


def cases(args, run, make, log_probabilities):
    """All that can be made with what was named: recordings, or all else."""
    if args.recordings:
        yield from of_recordings(args, log_probabilities)
        return
    yield from of_engine(args, make)
    if args.libs:
        yield from recorded(args, args.libs.resolve(), "llama.cpp cpu", run, list(CACHES))
    if args.vulkan:
        yield from recorded(args, args.vulkan.resolve(), "llama.cpp vulkan", run, ["f16", "f32", "q8_0"])
    if args.server:
        yield from of_server(args, "cpu", list(CACHES))
        yield from of_server(args, "vulkan", ["f16", "q8_0"])
