"""Runs the original under transformers with parity_dump: argv is FOLDER, DUMP, TOKENS, PROMPT, TYPE [ADAPTER, SCALE]."""
import sys

NEEDED = ("torch", "transformers", "parity_dump")


def lacking(more):
    import importlib.util

    return [name for name in (*NEEDED, *more) if importlib.util.find_spec(name) is None]


def adapted(model, adapter, scale):
    """The model with what PEFT adds to its matrices, `scale` times."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapter)
    for module in model.modules():
        for name in getattr(module, "lora_A", None) or {}:
            module.scaling[name] *= scale
    return model.merge_and_unload()


def main(folder, dump, tokens, prompt, stored, adapter=None, scale="1"):
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
    if adapter is not None:
        model = adapted(model, adapter, float(scale)).eval()
    ids = torch.tensor([[int(token) for token in tokens.split(",")]])
    with torch.no_grad(), parity_dump.capture(model, dump, prompt=prompt):
        model(input_ids=ids, use_cache=False)


if sys.argv[1:2] == ["--probe"]:
    print(" ".join(lacking(sys.argv[2:])))
else:
    main(*sys.argv[1:])
