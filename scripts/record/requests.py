#!/usr/bin/env python3
"""Runs a command that ends in a llama-server, sends it completions, and ends it with Ctrl-C: requests.py LIFE COMMAND…

LIFE has requests TOKEN,…:N for N tokens behind a prompt; those of one word, with + between, are sent at once, and the next word
when all are answered. {port} in the command is a free port. Exits with the command's exit code, or 1 where an answer is none.
"""
import json, os, signal, socket, subprocess, sys, threading, time, urllib.request

life, command = sys.argv[1].split(), sys.argv[2:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([word.replace("{port}", str(port)) for word in command], start_new_session=True)
failed = []


def ask(path, body=None):
    data = json.dumps(body).encode() if body else None
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, head), timeout=120) as answer:
        return json.load(answer)


def complete(request):
    prompt, n = request.split(":")
    body = {"prompt": [int(token) for token in prompt.split(",")], "n_predict": int(n), "temperature": 0, "ignore_eos": True}
    try:
        answer = ask("completion", body)
        if answer["tokens_predicted"] != int(n):
            failed.append(f"{request}: {answer}")
    except Exception as error:
        failed.append(f"{request}: {error}")


for attempt in range(600):
    try:
        if server.poll() is not None or ask("health")["status"] == "ok":
            break
    except OSError:
        time.sleep(0.1)
for word in life if server.poll() is None else []:
    threads = [threading.Thread(target=complete, args=(request,)) for request in word.split("+")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
if server.poll() is None:
    os.killpg(server.pid, signal.SIGINT)
code = server.wait()
for failure in failed:
    print(failure, file=sys.stderr)
sys.exit(code or bool(failed))
