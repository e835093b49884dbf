"""Captures of real transformers models. Needs torch and transformers; against parity itself, gguf and a built binary.

PARITY names the binary; without it target/release/parity is used where it exists.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import numpy as np
import reading

import parity_dump
from parity_dump import DumpError

try:
    import models
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"no torch and transformers: {error}") from error

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "reference-dumps" / "qwen2-tiny-py-F16" / "read_lines"
BINARY = pathlib.Path(os.environ.get("PARITY", ROOT / "target" / "release" / "parity"))
FAMILIES = ("Qwen2", "Llama", "Mistral", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "GptOss", "Phi3", "Olmo2")
IDS = [5, 6, 7, 8, 9, 10]  # as many as there are query heads, so that no axis is known by its length
D, H, K, E, F, V, EXPERTS, USED = 48, 6, 2, 16, 80, 96, 4, 2


def generate(model, ids, count, **options):
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0,
                              eos_token_id=None, **options)  # fmt: skip


def parity(*arguments):
    done = subprocess.run([BINARY, *map(str, arguments), "--format", "json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


class Capture(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "out"

    def test_every_family_has_its_ids_and_shapes(self):
        common = {
            "attn_norm": (D,), "q": (H, E), "k": (K, E), "v": (K, E), "q_rope": (H, E), "k_rope": (K, E),
            "attn_ctx": (H * E,), "attn_out": (D,), "attn_residual": (D,), "ffn_norm": (D,), "layer_out": (D,),
        }  # fmt: skip
        plain = {"q_proj": (H * E,), "k_proj": (K * E,), "v_proj": (K * E,)}
        dense = {"ffn_gate": (F,), "ffn_up": (F,), "ffn_act": (F,), "ffn_out": (D,)}
        normed = {"q_norm": (H, E), "k_norm": (K, E)}
        around = {"attn_post_norm": (D,), "ffn_post_norm": (D,)}
        moe = {"ffn_moe_topk": (USED,), "ffn_moe_out": (D,)}
        own = {
            "Qwen2": dense, "Llama": plain | dense, "Mistral": plain | dense, "Qwen3": plain | dense | normed,
            "Qwen3Moe": plain | normed | moe | {"ffn_moe_logits": (EXPERTS,), "ffn_moe_weights_norm": (USED,)},
            "Gemma2": plain | dense | around, "Gemma3Text": plain | dense | around | normed, "Phi3": plain | dense,
            "GptOss": moe | {"ffn_moe_probs": (EXPERTS,), "soft_max": (USED,), "attn_post_norm": (D,), "attn_out.add": (D,)},
            "Olmo2": plain | dense | around | normed,
        }  # fmt: skip
        for family in FAMILIES:
            with self.subTest(family):
                model = models.random(family)
                with parity_dump.capture(model, self.out) as capture:
                    tokens = generate(model, IDS, 3)[0].tolist()
                expected = common | own[family]
                if family == "GptOss":  # its output projection has a bias, its norm is called after attention
                    expected = {name: row for name, row in expected.items() if name not in ("attn_out", "ffn_norm")}
                if family == "Olmo2":
                    expected = {name: row for name, row in expected.items() if name not in ("attn_norm", "ffn_norm")}
                    self.assertEqual(capture.missing, [f"blk.{n}.{name}_norm" for n in (0, 1) for name in ("attn", "ffn")])
                else:
                    self.assertEqual(capture.missing, [])
                expected = {f"blk.{n}.{name}": row for n in (0, 1) for name, row in expected.items()}
                expected |= {"embed": (D,), "final_norm": (D,), "logits": (V,)}
                expected |= {"inp_scaled": (D,)} if family.startswith("Gemma") else {}
                found = reading.manifest(self.out)
                self.assertEqual((found["tokens"], found["complete"]), (tokens[:-1], True))
                for positions, tensors in reading.steps(self.out):
                    shapes = {name: (t, array.shape) for name, (t, array) in tensors.items()}
                    self.assertEqual(shapes, {name: ("F32", (len(positions), *row)) for name, row in expected.items()})
                self.assertEqual([len(s["positions"]) for s in found["steps"]], [len(IDS), 1, 1])

    def test_what_is_recorded_is_what_was_computed(self):
        """Nodes recomputed from what was recorded before them: names, rows and the order of axes are right."""
        for family in ("Qwen2", "Qwen3", "Gemma3Text", "GptOss"):
            with self.subTest(family):
                model = models.random(family)
                with parity_dump.capture(model, self.out), torch.no_grad():
                    model(torch.tensor([IDS]))
                ((_, tensors),) = reading.steps(self.out)
                x = {name: torch.from_numpy(np.array(array)) for name, (_, array) in tensors.items()}
                for index, layer in enumerate(model.model.layers):
                    g = lambda name, n=index: x[f"blk.{n}.{name}"]  # noqa: E731
                    attn = layer.self_attn
                    self._close(g("q").flatten(1), attn.q_proj(g("attn_norm")))
                    self._close(g("v").flatten(1), attn.v_proj(g("attn_norm")))
                    before = {"q": g("q"), "k": g("k")}
                    if hasattr(attn, "q_norm"):
                        self._close(g("q_norm"), attn.q_norm(g("q")))
                        before = {"q": g("q_norm"), "k": g("k_norm")}
                    # Rotating keeps the length of every pair of every head, and leaves position 0 as it was.
                    for name, plain in before.items():
                        rotated, half = g(f"{name}_rope"), E // 2
                        lengths = [torch.hypot(v[..., :half], v[..., half:]) for v in (plain, rotated)]
                        factor = model.model.rotary_emb.attention_scaling if family == "GptOss" else 1.0
                        self._close(lengths[1], lengths[0] * factor)
                        self._close(rotated[0], plain[0] * factor)
                    biased = family == "GptOss"
                    self._close(g("attn_out.add" if biased else "attn_out"), attn.o_proj(g("attn_ctx")))
                    self._close(g("attn_post_norm" if biased else "ffn_norm"), (
                        layer.pre_feedforward_layernorm if family == "Gemma3Text" else layer.post_attention_layernorm
                    )(g("attn_residual")))  # fmt: skip
                self._close(x["final_norm"], model.model.norm(x["blk.1.layer_out"]))
                self._close(x["logits"], model.lm_head(x["final_norm"]))

    def _close(self, found, expected):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)

    def test_nothing_that_the_model_computes_is_changed(self):
        for family in FAMILIES:
            model = models.random(family)
            plain = model(torch.tensor([IDS])).logits
            with parity_dump.capture(model, self.out):
                captured = model(torch.tensor([IDS])).logits
            after = model(torch.tensor([IDS])).logits
            self.assertTrue(torch.equal(plain, captured) and torch.equal(plain, after), family)
            self.assertFalse(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), family)

    def test_rows_of_llama_models_are_in_the_order_of_the_gguf_file(self):
        model, rows = models.random("Llama"), {}
        for order in ("gguf", "hf"):
            with parity_dump.capture(model, self.out, qk_order=order), torch.no_grad():
                model(torch.tensor([IDS]))
            rows[order] = reading.steps(self.out)[0][1]["blk.0.q_rope"][1]
        theirs = rows["hf"].reshape(len(IDS), H, 2, E // 2).swapaxes(-1, -2).reshape(len(IDS), H, E)
        np.testing.assert_array_equal(rows["gguf"], theirs)
        self.assertFalse(np.array_equal(rows["gguf"], rows["hf"]))

    def test_padding_is_left_out(self):
        model = models.random("Qwen3")
        with parity_dump.capture(model, self.out):
            generate(model, IDS, 3)
        alone = reading.steps(self.out)
        batch = {"input_ids": torch.tensor([[0, 0, *IDS], [3, 4, *IDS]]), "attention_mask": torch.tensor([[0] * 2 + [1] * 6, [1] * 8])}
        with self.assertRaisesRegex(DumpError, "a batch of 2 texts.*sequence=0"), parity_dump.capture(model, self.out):
            model(**batch)
        with parity_dump.capture(model, self.out, sequence=0), torch.no_grad():
            model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
        padded = reading.steps(self.out)
        self.assertEqual([p for p, _ in padded], [p for p, _ in alone])
        for (_, one), (_, other) in zip(alone, padded):
            self.assertEqual(set(one), set(other))
            for name in one:
                np.testing.assert_allclose(other[name][1], one[name][1], rtol=1e-3, atol=1e-4, err_msg=name)

    def test_types_and_autocast_are_declared(self):
        cases = [(torch.bfloat16, None, "bf16 storage=bf16 kv=bf16", "BF16"), (torch.float16, None, "f16 storage=f16 kv=f16", "F16"),
                 (torch.float32, torch.bfloat16, "bf16 kv=bf16", "BF16"), (torch.float32, None, "f32", "F32")]  # fmt: skip
        for dtype, cast, words, element in cases:
            model = models.random("Qwen2", attn_implementation="eager").to(dtype)
            with torch.no_grad(), torch.autocast("cpu", cast or dtype, enabled=cast is not None):
                with parity_dump.capture(model, self.out):
                    model(torch.tensor([IDS]))
            found = reading.manifest(self.out)
            self.assertEqual(found["producer"]["numerics"], words)
            self.assertEqual(found["provenance"]["autocast"], "bf16" if cast else "off")
            self.assertEqual(reading.steps(self.out)[0][1]["blk.0.q"][0], element)
            self.assertIn("torch", found["producer"]["version"])
        model = models.random("Qwen2", attn_implementation="sdpa")
        with parity_dump.capture(model, self.out):
            model(torch.tensor([IDS]))
        self.assertEqual(reading.manifest(self.out)["producer"]["numerics"], "f32 flash=on")

    def test_offloaded_models(self):
        try:
            import accelerate
        except ImportError as error:
            self.skipTest(f"no accelerate: {error}")
        model = models.random("Qwen3")
        with parity_dump.capture(model, self.out):
            generate(model, IDS, 2)
        whole = reading.steps(self.out)
        accelerate.cpu_offload(model, execution_device="cpu")
        self.assertTrue(any(p.device.type == "meta" for p in model.parameters()))
        with parity_dump.capture(model, self.out):
            generate(model, IDS, 2)
        for (_, one), (_, other) in zip(whole, reading.steps(self.out)):
            for name in one:
                np.testing.assert_array_equal(one[name][1], other[name][1], name)

    def test_only_and_attention_probs(self):
        model = models.random("Qwen2", attn_implementation="eager")
        with parity_dump.capture(model, self.out, only=["embed", "blk.1.attn_*"], attention_probs=True) as capture:
            generate(model, IDS, 2)
        self.assertEqual(capture.ids, {"embed"} | {f"blk.1.attn_{x}" for x in ("norm", "ctx", "out", "residual", "probs")})
        for positions, tensors in reading.steps(self.out):
            probs = tensors["blk.1.attn_probs"][1]
            self.assertEqual(probs.shape, (H, len(positions), positions[-1] + 1))
            np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)

    def test_logits_of_the_last_position_alone(self):
        model = models.random("Qwen2")
        with parity_dump.capture(model, self.out, all_logits=False):
            generate(model, IDS, 2)
        self.assertEqual(reading.manifest(self.out)["rows"], {"logits": [5, 6]})

    def test_what_is_no_dump_is_refused(self):
        model = models.random("Qwen2")
        with self.assertRaisesRegex(DumpError, "no forward pass"), parity_dump.capture(model, self.out):
            pass
        with self.assertRaisesRegex(DumpError, "second text"), parity_dump.capture(model, self.out):
            model(torch.tensor([IDS]))
            model(torch.tensor([IDS[::-1]]))
        cache = model(torch.tensor([IDS])).past_key_values
        with self.assertRaisesRegex(DumpError, "6 positions.*before the prefill"), parity_dump.capture(model, self.out):
            model(torch.tensor([[3]]), past_key_values=cache)
        with self.assertRaisesRegex(DumpError, r"tokens=\[…\]"), parity_dump.capture(model, self.out):
            model(inputs_embeds=model.model.embed_tokens(torch.tensor([IDS])))
        with self.assertRaisesRegex(DumpError, "Linear: expected a module with an embedding"):
            parity_dump.capture(torch.nn.Linear(2, 2), self.out)
        self.assertFalse(reading.manifest(self.out)["complete"])


@unittest.skipUnless(BINARY.exists(), f"no binary at {BINARY}: cargo build --release")
class AgainstLlamaCpp(unittest.TestCase):
    """The trained model in transformers, against the recording of llama.cpp that ships with parity."""

    def setUp(self):
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            self.skipTest(f"no gguf: {error}")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "out"
        self.tokens = reading.manifest(REFERENCE)["tokens"]

    def _judge(self, command, *sides):
        # A matmul with a fused bias is the one thing that transformers does not expose.
        code, report, said = parity(command, *sides, "-m", models.TINY, "--allow-missing")
        verdicts = {c["id"]: c["verdict"] for c in report["checkpoints"]}
        missing = {id for id, verdict in verdicts.items() if verdict == "missing"}
        self.assertTrue(all(id.endswith(("q_proj", "k_proj", "v_proj")) for id in missing), missing)
        return code, report, verdicts, said

    def test_a_healthy_model_is_at_parity(self):
        for attention in ("eager", "sdpa"):
            for split in (5, len(self.tokens)):
                model = models.from_gguf(attn_implementation=attention)
                with parity_dump.capture(model, self.out):
                    returned = generate(model, self.tokens[:split], len(self.tokens) - split + 1)
                self.assertEqual(returned[0].tolist()[:-1], self.tokens)
                for command, sides in (("diff", (self.out, REFERENCE)), ("audit", (self.out,))):
                    code, report, verdicts, said = self._judge(command, *sides)
                    self.assertEqual((code, report["verdict"]), (0, "parity"), (command, attention, said))
                    good = sum(v in ("match", "healthy") for v in verdicts.values())
                    # embed, final_norm, logits and 15 of each of four layers
                    self.assertEqual(good, 3 + 15 * 4, verdicts)

    def test_a_mistake_is_named(self):
        model = models.from_gguf(attn_implementation="eager")
        model.model.rotary_emb.inv_freq.copy_(1e4 ** -(torch.arange(0, 32, 2) / 32.0))
        with parity_dump.capture(model, self.out), torch.no_grad():
            model(torch.tensor([self.tokens]))
        code, report, _, _ = self._judge("audit", self.out)
        first = report["first_divergence"]
        self.assertEqual((code, first["checkpoint"], first["diagnosis"][0]["fault"]), (1, "blk.0.q_rope", "rope.base"))

    def test_a_mistake_in_decoding_is_named(self):
        model = models.from_gguf(attn_implementation="eager")
        embedding = model.model.rotary_emb
        plain = embedding.forward
        embedding.forward = lambda x, position_ids: plain(x, position_ids - (position_ids[:, :1] > 0).long())
        with parity_dump.capture(model, self.out), torch.no_grad():
            cache = None
            for ids in (self.tokens[:5], *[[t] for t in self.tokens[5:]]):
                cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values
        code, report, _, _ = self._judge("audit", self.out)
        first = report["first_divergence"]
        self.assertEqual((code, first["checkpoint"], first["diagnosis"][0]["fault"]), (1, "blk.0.q_rope", "rope.decode_shift"))


if __name__ == "__main__":
    unittest.main()
