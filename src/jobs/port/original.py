"""Runs the original under transformers with parity_dump: argv is FOLDER, DUMP, TOKENS, PROMPT, TYPE."""
import sys

NEEDED = ("torch", "transformers", "parity_dump")


def lacking():
    import importlib.util

    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main(folder, dump, tokens, prompt, stored):
    import parity_dump
    import torch
    from transformers import AutoModelForCausalLM

    # Newer versions call it dtype, and warn of the older name.
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    narrow = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored)
    if narrow is not None:
        # Matrices as the converted file stores them: what that costs is no mistake of either side.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(parameter.to(narrow).to(torch.float32))
    ids = torch.tensor([[int(token) for token in tokens.split(",")]])
    with torch.no_grad(), parity_dump.capture(model, dump, prompt=prompt):
        model(input_ids=ids, use_cache=False)


if sys.argv[1:] == ["--probe"]:
    print(" ".join(lacking()))
else:
    main(*sys.argv[1:])
