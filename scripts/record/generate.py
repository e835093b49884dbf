"""Continues a prompt with xllamacpp, greedily:  python generate.py MODEL PROMPT [N]"""

import sys

import xllamacpp

path, prompt = sys.argv[1:3]
n = int(sys.argv[3]) if len(sys.argv) > 3 else 8

params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx = 256
params.n_parallel = 1
params.cpuparams.n_threads = 2
params.sampling.temp = 0.0
params.warmup = False
server = xllamacpp.Server(params)
answer = server.handle_completions({"prompt": prompt, "max_tokens": n, "temperature": 0})
print(repr(answer if isinstance(answer, str) else answer["choices"][0]["text"]))
