"""What `save` and `Writer` write, and what they refuse. Needs numpy only."""

import pathlib
import tempfile
import unittest

import numpy as np
import reading

import parity_dump
from parity_dump import Bf16, DumpError, Writer

TOKENS = [312, 863, 2039]


def values(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Save(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "out"

    def test_one_pass(self):
        bits = values(3, 8).view(np.uint32) >> 16
        path = parity_dump.save(
            {"embed": values(3, 8), "blk.0.attn_norm": values(3, 8).astype(np.float16),
             "blk.0.ffn_norm": Bf16(bits.astype(np.uint16)), "logits": np.asfortranarray(values(3, 5))},
            self.out, tokens=TOKENS, producer={"name": "mine", "version": "2"}, numerics="f32",
            model={"architecture": "qwen2"}, prompt="ä",
        )  # fmt: skip
        found = reading.manifest(path)
        self.assertEqual(found["schema"], "parity-dump/1")
        self.assertEqual(found["producer"]["name"], "mine")
        self.assertEqual(found["producer"]["numerics"], "f32")
        self.assertEqual((found["tokens"], found["prompt"], found["complete"]), (TOKENS, "ä", True))
        ((positions, tensors),) = reading.steps(path)
        self.assertEqual(positions, [0, 1, 2])
        self.assertEqual({name: t for name, (t, _) in tensors.items()},
                         {"embed": "F32", "blk.0.attn_norm": "F16", "blk.0.ffn_norm": "BF16", "logits": "F32"})  # fmt: skip
        for name, (_, array) in tensors.items():
            np.testing.assert_array_equal(array, values(*array.shape), name)
        self.assertEqual([p.name for p in self.out.iterdir() if p.name.endswith(".part")], [])

    def test_steps_follow_one_another_and_the_sampled_token_is_left_out(self):
        steps = [{"embed": values(2, 4), "logits": values(1, 5)}, {"embed": values(1, 4), "logits": values(1, 5)}]
        path = parity_dump.save(steps, self.out, tokens=[*TOKENS, 7])
        found = reading.manifest(path)
        self.assertEqual(found["tokens"], TOKENS)
        self.assertEqual([s["positions"] for s in found["steps"]], [[0, 1], [2]])
        self.assertEqual(found["rows"], {"logits": [1, 2]})

    def test_tokens_in_a_batch_of_one_or_by_pass(self):
        one, steps = {"embed": values(3, 4)}, [{"embed": values(2, 4)}, {"embed": values(1, 4)}]
        batch = np.array([TOKENS])
        given = [(one, [TOKENS]), (one, batch), (one, list(batch)), (steps, [TOKENS[:2], TOKENS[2:]]), (steps, batch)]
        for tensors, tokens in given:
            with self.subTest(tokens=tokens):
                path = parity_dump.save(tensors, self.out, tokens=tokens)
                self.assertEqual(reading.manifest(path)["tokens"], TOKENS)
        for tensors, tokens in [(one, [[1, 2], [3]]), (one, [TOKENS, TOKENS]), (one, np.array([TOKENS] * 2)), (steps, [1, [2, 3]])]:  # fmt: skip
            with self.subTest(tokens=tokens), self.assertRaisesRegex(DumpError, "expected ids of one text"):
                parity_dump.save(tensors, self.out, tokens=tokens)
        with self.assertRaisesRegex(TypeError, "token ids.*lists of several"):
            parity_dump.save(one, self.out, tokens=[[[1, 2], [3]]])
        with self.assertRaisesRegex(TypeError, "embed: expected an array"):
            parity_dump.save({"embed": [[1.0, 2.0], [3.0]]}, self.out, tokens=TOKENS)

    def test_layouts(self):
        q = values(3, 2, 4)  # (T, H, E)
        path = parity_dump.save(
            {"blk.0.q": q[None], "blk.0.q_rope": q.transpose(1, 0, 2)[None], "blk.0.attn_norm": values(1, 3, 8),
             "blk.0.attn_probs": values(1, 2, 3, 3)},
            self.out, tokens=TOKENS, layouts={"q_rope": "BHTE"},
        )  # fmt: skip
        ((_, tensors),) = reading.steps(path)
        np.testing.assert_array_equal(tensors["blk.0.q"][1], q)
        np.testing.assert_array_equal(tensors["blk.0.q_rope"][1], q)
        self.assertEqual(tensors["blk.0.attn_norm"][1].shape, (3, 8))
        self.assertEqual(tensors["blk.0.attn_probs"][1].shape, (2, 3, 3))

    def test_names(self):
        path = parity_dump.save(
            {"model.layers.11.self_attn.o_proj": values(3, 4), "model.norm": values(3, 4)}, self.out, tokens=TOKENS,
            names={"model.layers.{n}.self_attn.o_proj": "blk.{n}.attn_out", "model.norm": "final_norm"},
        )  # fmt: skip
        self.assertEqual(set(reading.steps(path)[0][1]), {"blk.11.attn_out", "final_norm"})

    def test_types_that_a_dump_lacks_become_f32(self):
        path = parity_dump.save({"embed": values(3, 4).astype(np.float64)}, self.out, tokens=np.array(TOKENS))
        self.assertEqual(reading.steps(path)[0][1]["embed"][0], "F32")

    def test_refusals_say_what_is_wrong(self):
        cases = [
            ({"embed": values(2, 4)}, {}, r"embed: expected 3 rows.*found shape \(2, 4\)"),
            ({"blk.0.q": values(2, 3, 4)}, {}, r"second axis.*layouts=\{'q': 'HTE'\}"),
            ({"blk.0.q": values(2, 2, 3, 4)}, {"layouts": {"q": "BHTE"}}, "2 texts on axis 0"),
            ({"embed": values(3, 4)}, {"layouts": {"embed": "TXY"}}, "does not fit"),
            ({"em bed": values(3, 4)}, {}, "no name"),
            ({"embed": values(3)}, {}, "of two or more"),
            ({"embed": values(3, 4)}, {"producer": ""}, "has a name"),
            ([{"embed": values(1, 4)}], {"positions": [[5]]}, "positions of 1"),
            ([{"embed": values(2, 4)}, {"embed": values(2, 4)}], {}, "step 1: expected 1 to 1 rows"),
            ([{"embed": values(2, 4)}, {"embed": values(1, 8)}], {}, r"rows of \(8,\), but of \(4,\)"),
        ]
        for tensors, options, message in cases:
            with self.subTest(message), self.assertRaisesRegex(DumpError, message):
                parity_dump.save(tensors, self.out, tokens=TOKENS, **options)
            manifest = self.out / "manifest.json"
            self.assertFalse(manifest.exists() and reading.manifest(self.out)["complete"])
        with self.assertRaisesRegex(TypeError, "complex"):
            parity_dump.save({"embed": values(3, 4).astype(complex)}, self.out, tokens=TOKENS)
        with self.assertRaisesRegex(TypeError, "integers"):
            parity_dump.save({"embed": values(3, 4)}, self.out, tokens=[0.5, 1.0, 2.0])

    def test_a_folder_of_something_else_is_left_alone(self):
        self.out.mkdir()
        (self.out / "thesis.tex").write_text("x")
        with self.assertRaisesRegex(DumpError, "thesis.tex"):
            parity_dump.save({"embed": values(3, 4)}, self.out, tokens=TOKENS)
        self.assertEqual((self.out / "thesis.tex").read_text(), "x")

    def test_an_interruption_keeps_the_steps_before(self):
        with self.assertRaises(KeyboardInterrupt):
            with Writer(self.out, "mine") as dump:
                with dump.step(TOKENS[:2]):
                    dump.tensor("embed", values(2, 4))
                with dump.step(TOKENS[2:]):
                    dump.tensor("embed", values(1, 4))
                    raise KeyboardInterrupt
        found = reading.manifest(self.out)
        self.assertEqual((found["complete"], found["tokens"], len(found["steps"])), (False, TOKENS[:2], 1))
        self.assertEqual(sorted(p.name for p in self.out.iterdir()), ["manifest.json", "step-0000.safetensors"])

    def test_more_tensors_than_the_header_foresaw(self):
        with Writer(self.out, "mine") as dump:
            for step, count in enumerate((3, 5000, 2)):
                with dump.step([step]):
                    for layer in range(count):
                        dump.tensor(f"blk.{layer}.ffn_out", values(1, 3) + layer)
        for _, tensors in reading.steps(self.out):
            for layer in range(len(tensors)):
                np.testing.assert_array_equal(tensors[f"blk.{layer}.ffn_out"][1], values(1, 3) + layer)

    def test_a_name_that_comes_again_is_numbered(self):
        with Writer(self.out, "mine") as dump, dump.step([1]):
            dump.tensor("blk.0.ffn_out", values(1, 3))
            dump.tensor("blk.0.ffn_out", values(1, 3))
        self.assertEqual(list(reading.steps(self.out)[0][1]), ["blk.0.ffn_out", "blk.0.ffn_out#2"])

    def test_experts_of_a_decode_step(self):
        prompt = {"embed": values(3, 4), "blk.0.ffn_moe_gate": values(3, 2, 5), "blk.0.ffn_moe_out": values(1, 3, 4)}
        step = {"embed": values(1, 4), "blk.0.ffn_moe_gate": values(1, 2, 5), "blk.0.ffn_moe_out": values(1, 1, 4)}
        parity_dump.save([prompt, step], self.out, [1, 2, 3, 4])
        for (_, tensors), rows in zip(reading.steps(self.out), (3, 1)):
            self.assertEqual(tensors["blk.0.ffn_moe_gate"][1].shape, (rows, 2, 5))
            self.assertEqual(tensors["blk.0.ffn_moe_out"][1].shape, (rows, 4))

    def test_rows_of_a_tensor_that_some_steps_lack(self):
        with Writer(self.out, "mine") as dump:
            with dump.step([1, 2]):
                dump.tensor("embed", values(2, 3))
            with dump.step([3, 4]):
                dump.tensor("embed", values(2, 3))
                dump.tensor("logits", values(1, 3), rows=[3])
            with dump.step([5]):
                dump.tensor("embed", values(1, 3))
                dump.tensor("logits", values(1, 3))
        self.assertEqual(reading.manifest(self.out)["rows"], {"logits": [3, 4]})


if __name__ == "__main__":
    unittest.main()
