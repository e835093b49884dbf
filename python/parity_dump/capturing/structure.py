"""Where the checkpoints of a transformers model are: modules by the names that its families share.

Qwen2, Qwen3, Llama, Mistral, Phi-3, Gemma 2 and 3, OLMo 2, Qwen3-MoE, gpt-oss and what is built like them: an
embedding, decoder layers of an attention and a feed-forward block, and a final norm.
"""

from .._writer import DumpError

# Model types whose conversion to GGUF reorders the rows of q and k, so that their pairs lie side by side.
REORDERED = ("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoe", "helium", "arcee")
# transformers' model type -> GGUF architecture, where they differ.
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss", "granitemoe": "granitemoe",
}  # fmt: skip
# Model types whose files name the norm before the feed-forward part after attention: `post_attention_norm.weight`.
AFTER_ATTENTION = ("gpt_oss", "qwen3_next")

_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings")
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
_ATTENTIONS = ("self_attn", "attention", "attn")
_OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe")


def first(module, names):
    """The first of the attributes `names` that the module has, or None."""
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            return found
    return None


def decoder(model):
    """(causal, base): the module whose forward is one pass, and the one that has the layers."""
    found = [
        (name, module) for name, module in model.named_modules()
        if first(module, _EMBEDDINGS) is not None and first(module, _LAYERS) is not None
    ]  # fmt: skip
    if not found:
        raise DumpError(
            f"{type(model).__name__}: expected a module with an embedding ({', '.join(_EMBEDDINGS)}) and layers "
            f"({', '.join(_LAYERS)}); found none; hint: parity_dump.Writer writes what your own hooks see"
        )
    path, base = found[0]
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        above = model.get_submodule(".".join(parts[:depth]))
        if first(above, ("lm_head", "embed_out")) is not None:
            return above, base
    return base, base


def embedding(base):
    return first(base, _EMBEDDINGS)


def final_norm(base):
    return first(base, _NORMS)


def layers(base):
    return list(enumerate(first(base, _LAYERS)))


def attention(layer):
    return first(layer, _ATTENTIONS)


def heads(attn, config):
    """(query heads, key and value heads, head width)"""
    query = getattr(config, "num_attention_heads")
    width = getattr(attn, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // query
    return query, getattr(config, "num_key_value_heads", None) or query, width


def own_names(layer, model_type):
    """{fixed id without its layer: what llama.cpp calls what hooks see in its place}: a sum, or a norm after another weight."""
    output = first(attention(layer), _OUTPUTS)
    biased = getattr(output, "bias", None) is not None
    after = model_type in AFTER_ATTENTION
    return ({"attn_out": "attn_out.add"} if biased else {}) | ({"ffn_norm": "attn_post_norm"} if after else {})


def in_and_out(layer, model_type):
    """[(module, "in" or "out", id without its layer)] of the plain tensors of a decoder layer, (T, …)."""
    attn, block = attention(layer), first(layer, _BLOCKS)
    post = getattr(layer, "post_attention_layernorm", None)
    # A layer that normalises what the feed-forward block gives does so with what attention gives too.
    after = getattr(layer, "post_feedforward_layernorm", None)
    before = getattr(layer, "pre_feedforward_layernorm", None) if after is not None else first(layer, ("ffn_norm",)) or post
    places = [
        (first(layer, ("input_layernorm", "attention_norm")), "out", "attn_norm"),
        (first(attn, _OUTPUTS), "in", "attn_ctx"),
        (first(attn, _OUTPUTS), "out", "attn_out"),
        (post if after is not None else getattr(layer, "post_self_attn_layernorm", None), "out", "attn_post_norm"),
        (before if before is not None else block, "in", "attn_residual"),
        (before, "out", "ffn_norm"),
        (first(layer, ("post_feedforward_layernorm", "post_mlp_layernorm")), "out", "ffn_post_norm"),
        (layer, "out", "layer_out"),
    ]
    places += _feed_forward(block)
    names = own_names(layer, model_type)
    return [(module, when, names.get(name, name)) for module, when, name in places if module is not None]


def _feed_forward(block):
    down = first(block, ("down_proj", "w2"))
    if is_moe(block) or block is None:
        return [(block, "out", "ffn_moe_out")]
    return [
        (first(block, ("gate_proj", "w1")), "out", "ffn_gate"),
        (first(block, ("up_proj", "w3")), "out", "ffn_up"),
        (down, "in", "ffn_act"),
        (block, "out", "ffn_out"),
    ]


def block(layer):
    return first(layer, _BLOCKS)


def is_moe(block):
    return getattr(block, "experts", None) is not None


def router(block):
    """The module that chooses experts, and what llama.cpp calls its logits and its weights: with a bias those of gpt-oss."""
    module = first(block, ("gate", "router"))
    if module is None:
        return None, None, None
    biased = getattr(module, "bias", None) is not None
    if biased:
        return module, "ffn_moe_probs", "soft_max"
    normed = getattr(module, "norm_topk_prob", getattr(block, "norm_topk_prob", True))
    return module, "ffn_moe_logits", "ffn_moe_weights_norm" if normed else "ffn_moe_weights"
