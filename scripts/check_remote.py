"""Drives parity over dumps on an S3 server and a web server. Usage: check_remote.py PARITY; see check-remote.sh."""

import functools
import http.server
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import boto3
from moto.server import ThreadedMotoServer

PARITY = sys.argv[1]
ROOT = pathlib.Path(__file__).resolve().parent.parent
DUMP = ROOT / "reference-dumps/qwen2-tiny-py-F16/read_lines-defaults"
MODEL = ROOT / "reference-dumps/models/qwen2-tiny-py-F16.gguf"
KEY, SECRET = "AKIAPARITYTESTKEY001", "a-secret-that-nobody-may-print"
work = pathlib.Path(tempfile.mkdtemp())
printed = []
requests = []


def fail(what):
    raise SystemExit(f"FAIL {what}")


def ok(what):
    print(f"ok   {what}", flush=True)


def parity(*args, code=0, env={}, **more):
    """Runs parity in an empty folder, with nothing of this environment."""
    home = work / "home"
    home.mkdir(exist_ok=True)
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PARITY_LLAMA": "none", "PARITY_CACHE": str(work / "cache"),
             "PARITY_REFERENCE_DUMPS": str(ROOT / "reference-dumps"), "AWS_REGION": "eu-west-1", "TMPDIR": str(work / "tmp")}
    (work / "tmp").mkdir(exist_ok=True)
    begun = time.monotonic()
    done = subprocess.run([PARITY, *map(str, args)], cwd=home, env={**clean, **env}, text=True, capture_output=True, **more)
    done.seconds = time.monotonic() - begun
    printed.extend([done.stdout, done.stderr])
    if done.returncode != code:
        fail(f"{args}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
    if list((work / "tmp").iterdir()):
        fail(f"{args}: left {list((work / 'tmp').iterdir())}")
    return done


def fetched(done):
    """Bytes from the server, bytes from the cache, tensors, of how many: as parity says."""
    text = done.stdout + done.stderr
    units = {"bytes": 1, "B": 1, "kB": 1e3, "KB": 1e3, "KiB": 1024, "MB": 1e6, "MiB": 1 << 20, "GB": 1e9, "GiB": 1 << 30}
    sizes = re.search(r"([\d.]+) (\w+) fetched, ([\d.]+) (\w+) from the cache", text) or fail(f"nothing is said: {text}")
    tensors = re.search(r"(\d+) of (\d+) tensors", text)
    return float(sizes[1]) * units[sizes[2]], float(sizes[3]) * units[sizes[4]], int(tensors[1]), int(tensors[2])


def answer(done):
    return json.loads(done.stdout)


def same(one, other, what):
    """Two reports say the same numbers and verdicts."""
    for key in ("verdict", "origins", "coverage"):
        if one[key] != other[key]:
            fail(f"{what}: {key}: {one[key]} and {other[key]}")
    for a, b in zip(one["checkpoints"], other["checkpoints"], strict=True):
        if a != b:
            fail(f"{what}: {a['id']}: {a} and {b}")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A static web server that knows ranges."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = pathlib.Path(self.translate_path(self.path))
        requests.append(self.path)
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(asked[1]):int(asked[2]) + 1] if asked else data
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        self.wfile.write(part)


def main():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://%s:%d" % server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="eu-west-1")
    client.create_bucket(Bucket="team", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
    address = "s3://team/references/read lines"

    done = parity("push", DUMP, address, env=keys)
    names = {entry["Key"].rsplit("/", 1)[1] for entry in client.list_objects_v2(Bucket="team")["Contents"]}
    wanted = {path.name for path in DUMP.iterdir()} | {"parity-index.json"}
    if names != wanted:
        fail(f"pushed {names}, wanted {wanted}")
    ok(f"push: {done.stdout.strip().split(': ', 1)[1]}, {done.seconds:.1f} s")
    parity("push", DUMP, address, env=keys, code=2)
    parity("push", DUMP, address, "--force", env=keys)
    ok("push: what is there is replaced with --force alone")

    # By address, and by folder: the same answer.
    here = answer(parity("run", "-m", MODEL, "--reference", DUMP, "--device", "cpu", "--json"))
    done = parity("run", "-m", MODEL, "--reference", address, "--device", "cpu", "--json", env=keys)
    same(here, answer(done), "run")
    whole, _, tensors, of = fetched(done)
    tensors == of or fail(f"{tensors} of {of} tensors")
    ok(f"run --reference s3://…: the answer of the folder, {whole / 1e3:.0f} kB, {done.seconds:.1f} s")
    for layer in ("0", "2"):
        shutil.rmtree(work / "cache")
        here = answer(parity("audit", DUMP, "-m", MODEL, "--layer", layer, "--json"))
        done = parity("audit", address, "-m", MODEL, "--layer", layer, "--json", env=keys)
        same(here, answer(done), f"audit --layer {layer}")
        part, _, tensors, of = fetched(done)
        part < 0.55 * whole or fail(f"one layer of four fetched {part} of {whole} bytes")
        ok(f"audit s3://… --layer {layer}: the answer of the folder, {part / whole:.0%} of the bytes, {tensors} of {of} tensors")
    done = parity("audit", address, "-m", MODEL, "--layer", "2", "--json", env=keys)
    again, cached, *_ = fetched(done)
    again < 0.2 * part and cached > 0.5 * part or fail(f"{again} fetched again, {cached} from the cache")
    ok(f"a second time {again / 1e3:.0f} kB are fetched (the manifest), {cached / 1e3:.0f} kB come from the cache")

    # The bits of what comes back.
    parity("pull", address, "-o", work / "pulled", env=keys)
    parity("diff", work / "pulled", DUMP, "--bitwise", "--no-audit")
    for path in DUMP.iterdir():
        if path.name.startswith("graph-") and path.read_bytes() != (work / "pulled" / path.name).read_bytes():
            fail(f"pull: {path.name}")
    ok("pull: every bit comes back")
    parity("pull", address, "-o", work / "one", "--layer", "2", env=keys)
    parity("push", DUMP, work / "folder")
    parity("diff", work / "folder", DUMP, "--bitwise", "--no-audit")
    ok("a folder: packed, and read where it lies")

    # The cache has a limit, and what lies in it is checked.
    parity("audit", address, "-m", MODEL, env={**keys, "PARITY_REMOTE_SIZE": "100K"})
    size = sum(path.stat().st_size for path in (work / "cache/remote").rglob("*") if path.is_file())
    size <= 100 << 10 or fail(f"the cache holds {size} bytes")
    parity("audit", address, "-m", MODEL, env={**keys, "PARITY_REMOTE_SIZE": "much"}, code=2)
    parity("audit", address, "-m", MODEL, env=keys)
    for path in (work / "cache/remote").rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    same(answer(parity("audit", DUMP, "-m", MODEL, "--json")), answer(parity("audit", address, "-m", MODEL, "--json", env=keys)), "a spoiled cache")
    ok(f"the cache keeps to its limit ({size} of {100 << 10} bytes), and spoiled bytes in it are fetched anew")

    # What is wrong there.
    key = "references/read lines/"
    def get(name):
        return client.get_object(Bucket="team", Key=key + name)["Body"].read()
    step = "step-0000.safetensors"
    good = get(step)
    shutil.rmtree(work / "cache")
    client.put_object(Bucket="team", Key=key + step, Body=good[:-5000] + bytes(5000))
    done = parity("audit", address, "-m", MODEL, env=keys, code=2)
    "is not what was pushed" in done.stderr or fail(done.stderr)
    client.put_object(Bucket="team", Key=key + step, Body=good[:-5000])
    parity("audit", address, "-m", MODEL, env=keys, code=2)
    client.put_object(Bucket="team", Key=key + step, Body=good)
    manifest = get("manifest.json")
    index = get("parity-index.json")
    shutil.rmtree(work / "cache", ignore_errors=True)
    client.put_object(Bucket="team", Key=key + "parity-index.json", Body=index + b" ")
    done = parity("audit", address, "-m", MODEL, env=keys, code=2)
    "another manifest" in done.stderr or fail(done.stderr)
    client.put_object(Bucket="team", Key=key + "parity-index.json", Body=index)
    done = parity("audit", "s3://team/nothing", "-m", MODEL, env=keys, code=2)
    "there is no such file" in done.stderr or fail(done.stderr)
    done = parity("audit", "s3://none/nothing", "-m", MODEL, env=keys, code=2)
    hostile = json.loads(manifest)
    hostile["steps"][0]["file"] = "../outside"
    client.put_object(Bucket="team", Key="hostile/parity-index.json", Body=index)
    client.put_object(Bucket="team", Key="hostile/manifest.json", Body=json.dumps(hostile).encode())
    done = parity("audit", "s3://team/hostile", "-m", MODEL, env=keys, code=2)
    "outside the folder" in done.stderr or fail(done.stderr)
    ok("changed, cut short, of another push, not there, out of its folder: refused, and said")

    # A folder that was copied there as it is, without an index.
    for path in DUMP.iterdir():
        client.upload_file(str(path), "team", f"plain/{path.name}")
    same(answer(parity("audit", DUMP, "-m", MODEL, "--layer", "1", "--json")),
         answer(parity("audit", "s3://team/plain", "-m", MODEL, "--layer", "1", "--json", env=keys)), "without an index")
    ok("a dump that was copied there by other means is read by ranges too")

    # Without credentials, a public bucket; an address with credentials in it is refused.
    for name in names:
        client.put_object_acl(Bucket="team", Key=key + name, ACL="public-read")
    parity("audit", address, "-m", MODEL, "--layer", "1", env={k: v for k, v in keys.items() if "KEY" not in k})
    done = parity("audit", f"https://me:{SECRET}@example.org/x", "-m", MODEL, code=2)
    "no place for credentials" in done.stderr or fail(done.stderr)
    server.stop()
    done = parity("audit", address, "-m", MODEL, env={**keys, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, code=2)
    ok(f"no server: said after {done.seconds:.1f} s")

    # A web server: the packed folder, and the plain one.
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=str(work / "web")))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    shutil.copytree(work / "folder", work / "web/packed")
    shutil.copytree(DUMP, work / "web/plain")
    shutil.rmtree(work / "cache")
    for name in ("packed", "plain"):
        url = f"http://127.0.0.1:{web.server_port}/{name}"
        same(answer(parity("audit", DUMP, "-m", MODEL, "--layer", "3", "--json")),
             answer(parity("audit", url, "-m", MODEL, "--layer", "3", "--json")), url)
    ok(f"a web server: packed and plain, {len(requests)} requests")
    suite = work / "suite.toml"
    suite.write_text(f'name = "shared"\n[models]\ntiny = "{MODEL}"\n[[case]]\nname = "here"\nmodel = "tiny"\nreference = "{url}"\nlayer = "1"\n')
    done = parity("gate", suite)
    ok("a suite names references by address")

    everything = "".join(printed)
    for secret in (KEY, SECRET):
        secret in everything and fail(f"{secret} was printed")
    ok(f"credentials: in none of {len(everything)} characters that were printed")


try:
    main()
finally:
    shutil.rmtree(work, ignore_errors=True)
