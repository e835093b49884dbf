"""transformers models for the tests: the trained one of reference-dumps, and small random ones."""

import pathlib

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "reference-dumps" / "models" / "qwen2-tiny-py-F16.gguf"

# Ends of GGUF tensor names -> names in transformers, of Qwen2, Qwen3 and (but for the order of q and k) Llama.
_PLACES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_GLOBALS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def from_gguf(path=TINY, dtype=torch.float32, **options):
    """A Qwen2 or Llama model with the weights of a GGUF file."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())

    def value(key, default=None):
        field = reader.fields.get(f"{architecture}.{key}")
        return default if field is None else field.contents()

    weights = {tensor.name: tensor for tensor in reader.tensors}
    heads, shared = value("attention.head_count"), value("attention.head_count_kv")
    config = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}[architecture](
        vocab_size=int(weights["token_embd.weight"].shape[1]), hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"), num_hidden_layers=value("block_count"),
        num_attention_heads=heads, num_key_value_heads=shared, rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=value("context_length"), tie_word_embeddings="output.weight" not in weights,
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)}, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = {}
    for name, tensor in weights.items():
        array = np.array(dequantize(tensor.data, tensor.tensor_type)).astype(np.float32)
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            count = heads if name.endswith("attn_q.weight") else shared
            array = array.reshape(count, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        state[_place(name)] = torch.from_numpy(array)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    # As `from_pretrained` does it: parameters are cast, the inverse frequencies of RoPE stay as they are.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return (model.double() if dtype == torch.float64 else model).eval()


def _place(name):
    stem, kind = name.rsplit(".", 1)
    if stem in _GLOBALS:
        return f"{_GLOBALS[stem]}.{kind}"
    _, layer, place = stem.split(".")
    return f"model.layers.{layer}.{_PLACES[place]}.{kind}"


def random(kind, seed=0, **changes):
    """A small random model of a family: `kind` is a configuration class of transformers without `Config`."""
    torch.manual_seed(seed)
    common = dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
                  num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0)  # fmt: skip
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    own = {"Qwen3Moe": moe, "GptOss": dict(num_local_experts=4, num_experts_per_tok=2)}
    config = getattr(transformers, kind + "Config")(**{**common, **own.get(kind, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():  # those begin as zeros or ones, and hide what is done with them
        if parameter.dim() == 1 or name.endswith("bias"):
            drawn = parameter.data + torch.randn(parameter.shape) / 4
            parameter.data = drawn.bfloat16().float()  # as they are published
    return model
