"""What a run of torch says about itself: who, on what, in which arithmetic."""

import platform

import torch

_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
# Attention that never has a whole row of scores.
_ONLINE = ("sdpa", "flash", "flex")


def model_dtype(model):
    """The type of the matrices, which the embedding and norms may not share."""
    types = [p.dtype for p in model.parameters() if p.ndim >= 2 and p.dtype in _SHORT]
    return max(set(types), key=types.count) if types else torch.float32


def autocast(device):
    """The type that matmuls are cast to, or None."""
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def attention(config):
    return str(getattr(config, "_attn_implementation", None) or "eager")


def numerics(model, config, device):
    """The arithmetic in the words of docs/dumps.md."""
    own = model_dtype(model)
    cast = autocast(device)
    matmuls = _SHORT.get(cast or own, "f32")
    # TF32 keeps as many bits as f16 does; `medium` may use bf16.
    precision = torch.get_float32_matmul_precision()
    if matmuls == "f32" and device == "cuda" and (precision != "highest" or torch.backends.cuda.matmul.allow_tf32):
        matmuls = "f16"
    if matmuls == "f32" and precision == "medium":
        matmuls = "bf16"
    words = [matmuls]
    if cast is None and own in (torch.float16, torch.bfloat16):
        words.append(f"storage={_SHORT[own]}")
    cache = cast or own
    if cache in (torch.float16, torch.bfloat16):
        words.append(f"kv={_SHORT[cache]}")
    if attention(config).startswith(_ONLINE):
        words.append("flash=on")
    return " ".join(words)


def device(model, given=None):
    """The kind of device that computes: of what is offloaded, only the inputs know it."""
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    kinds |= {given.type} if given is not None else set()
    return "cuda" if "cuda" in kinds else min(kinds, default="cpu")


def producer(model):
    import transformers

    backend = device(model)
    name = torch.cuda.get_device_name() if backend == "cuda" else platform.processor() or platform.machine()
    version = f"{transformers.__version__}, torch {torch.__version__}"
    return {"name": "transformers", "version": version, "backend": backend, "device": name}


def provenance(model, config, device):
    cast = autocast(device)
    out = {
        "class": type(model).__name__,
        "dtype": _SHORT[model_dtype(model)],
        "autocast": _SHORT.get(cast, str(cast)) if cast else "off",
        "attention": attention(config),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
    }
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        out["quantization"] = getattr(quantization, "quant_method", None) or type(quantization).__name__
    return out
