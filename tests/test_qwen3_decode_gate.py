"""The gate of the last chapter: what it lets pass, what it rejects, what it says."""

from labkit.results import validate

import json
from dataclasses import replace

import pytest
import torch
from test_qwen3_decode_ladder import DECODE, RUNGS, TINY, TORCH, gpu_only, model_of
from test_qwen3_decode_ladder import one_thread as one_thread
from test_results import good, write

from solutions.qwen3_decode import gate, reference, weights
from solutions.qwen3_decode.config import QWEN3_0_6B, ModelError
from solutions.qwen3_decode.rungs import DynamicStep, ReferenceStep, StaticStep


@pytest.fixture(scope="module")
def judged_model():
    return model_of(torch.bfloat16)


@pytest.fixture(scope="module")
def prompts():
    return gate.random_prompts(TINY, 12, seed=3)


def test_prompts_are_seeded_and_fit(prompts):
    again, other = (gate.random_prompts(TINY, 12, seed) for seed in (3, 4))
    assert all(map(torch.equal, prompts, again))
    assert [len(p) for p in prompts] != [len(p) for p in other]
    assert all(33 <= len(p) <= 129 for p in prompts)  # 32 to 128 tokens and the one that follows
    long = gate.random_prompts(replace(TINY, max_position_embeddings=40960), 256)
    assert min(map(len, long)) < 64
    assert 1000 < max(map(len, long)) <= 1025
    text = list(range(150))
    for window in gate.text_prompts(TINY, text, 20):
        assert window.tolist() == list(range(int(window[0]), int(window[0]) + len(window)))
    with pytest.raises(ModelError, match="a prompt needs 129"):
        gate.text_prompts(TINY, text[:128])


@pytest.mark.parametrize("make", TORCH)
def test_gate_accepts_what_rounds_as_transformers_does(make, judged_model, prompts):
    if make is ReferenceStep:

        class make(ReferenceStep):  # one that shows its residual stream
            def run(self):
                at = self.next
                token = self.tokens[at : at + 1].long()
                x = torch.nn.functional.embedding(token, self.model.embed)
                c = self.cache
                for w, k, v in zip(self.model.layers, c.k, c.v, strict=True):
                    x = reference.layer_forward(self.model.config, w, x, k, v, c.cos_sin, at)
                    self.saw(x)
                super().run()

    found = gate.gate(make, judged_model, prompts, last=8)
    assert found.failures == (), found
    assert not found.opt_in
    longest = max(map(len, prompts)) - 1  # which is read whole
    assert (found.prompts, found.tokens) == (12, 11 * 8 + longest)
    assert len(found.scores.cosine) == 3
    assert found.allowance.agreement == 1  # by the definition of a near-tie
    assert 0 < found.scores.kl < 0.01


class ForgetsAResidual(StaticStep):
    def run(self):
        layers = list(self.model.layers)
        layers[1] = replace(layers[1], o=torch.zeros_like(layers[1].o))
        whole, self.model = self.model, replace(self.model, layers=tuple(layers))
        super().run()
        self.model = whole


class PositionOffByOne(StaticStep):
    def __init__(self, model, cache):
        super().__init__(model, cache._replace(cos_sin=cache.cos_sin.roll(-1, 0)))


class SlotOffByOne(StaticStep):
    def remember(self, layer, k, v):
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        slot = (self.position + 1).long() % self.S
        return k_cache.index_copy_(0, slot, k), v_cache.index_copy_(0, slot, v)


class SeesOneTooMany(StaticStep):
    def mask(self):
        return (self.slots <= self.position + 1)[None]


class AlwaysTokenZero(StaticStep):
    def finish(self, logits):
        super().finish(logits)
        self.tokens.index_fill_(0, self.position.long(), 0)


class WorseLogits(StaticStep):
    def finish(self, logits):
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(self.next))
        super().finish(logits + 0.05 * noise.to(logits))


class NotANumber(StaticStep):
    def finish(self, logits):
        super().finish(logits * float("nan"))


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (ForgetsAResidual, "after layer 1"),
        (PositionOffByOne, "kl"),
        (SlotOffByOne, "kl"),
        (SeesOneTooMany, "kl"),
        (AlwaysTokenZero, "agreement"),
        (WorseLogits, "kl"),
        (NotANumber, "kl nan"),
    ],
)
def test_gate_rejects(mutant, words, judged_model, prompts):
    found = gate.gate(mutant, judged_model, prompts, last=8)
    assert found.opt_in
    assert any(words in failure for failure in found.failures), found
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["opt_in"]


def test_gate_without_a_residual_stream_is_no_pass(judged_model, prompts):
    found = gate.gate(ReferenceStep, judged_model, prompts[:3], last=8)
    assert found.failures == ("cosine not seen, wanted 0.999",)


def test_a_graph_that_differs_is_rejected(judged_model, prompts):
    """A stand-in for a graph, whose replay is another step."""

    class Graphed(StaticStep):
        def __init__(self, model, cache):
            super().__init__(model, cache)
            self.graph = self

        def replay(self):
            (AlwaysTokenZero if self.wrong else StaticStep).run(self)
            if self.wrong:
                self.tokens.index_fill_(0, self.position.long(), 0)

    for wrong in (False, True):
        Graphed.wrong = wrong
        found = gate.gate(Graphed, judged_model, prompts[:2], last=8, free=20)
        assert found.graph_agrees is not wrong
        assert found.graph_tokens == 20
        assert found.repeats
        assert any("graph" in failure for failure in found.failures) is wrong


@pytest.mark.parametrize("what", ["tokens", "logits"])
def test_launches_that_do_not_repeat_are_told_from_a_graph_that_differs(
    judged_model, prompts, what
):
    class Moody(StaticStep):
        """Its launches write other tokens than its graph, and other `what` in the next text."""

        texts = 0

        def __init__(self, model, cache):
            super().__init__(model, cache)
            self.graph = self

        def replay(self):
            StaticStep.run(self)

        def start(self, token, position):
            super().start(token, position)
            Moody.texts += 1

        def run(self):
            super().run()
            mood = Moody.texts % 199
            self.tokens.index_fill_(0, self.position.long(), mood if what == "tokens" else 3)
            if what == "logits":
                self.logits[0] = mood

    found = gate.gate(Moody, judged_model, prompts[:2], last=8, free=20)
    assert not found.graph_agrees
    assert not found.repeats
    assert any("repeat" in failure for failure in found.failures)


def test_a_gate_says_what_it_rests_on(judged_model, prompts):
    builds = {"static": StaticStep, "dynamic": DynamicStep}
    found = gate.gates(builds, judged_model, prompts, last=4, weights="tiny")
    for judged in found.values():
        assert (judged.prompts, judged.tokens) == (12, 11 * 4 + max(map(len, prompts)) - 1)
        assert judged.longest == max(len(p) - 1 for p in prompts)
    stored = json.loads(json.dumps(found["dynamic"].as_json(), allow_nan=False))
    assert stored["opt_in"] is False
    assert stored["failures"] == []
    assert stored["weights"] == "tiny"
    assert len(stored["allowance"]["cosine"]) == 3


def test_gate_wants_bfloat16_and_long_prompts(judged_model, prompts):
    with pytest.raises(ValueError, match=r"torch.float32, must be torch.bfloat16"):
        gate.gate(StaticStep, model_of(torch.float32), prompts)
    with pytest.raises(ValueError, match="too short for last=40"):
        gate.gate(StaticStep, judged_model, [p[:40] for p in prompts], last=40)


def test_gates_are_recorded_on_both_models(tmp_path):
    """On the CPU: rungs that run there in bfloat16; a tiny model, and the one that ships."""
    names = ["qwen3_decode_dynamic", "qwen3_decode_static"]
    chapter, lines = replace(DECODE, rungs=tuple(RUNGS[name] for name in names)), []
    found = gate.recorded(chapter, model_of(torch.bfloat16), lines.append, count=3)
    assert [g["rung"] for g in found] == 2 * names
    assert ["text" in g["weights"] for g in found] == [False, False, True, True]
    assert not any(g["opt_in"] for g in found)
    assert len(lines) == 4
    model = {"gates": found, "ledger": [], "prefill": {"plans": [], "first_token": []}}
    data = good() | {"model": model}
    assert validate(write(tmp_path, data)) is None
    del found[1]["opt_in"]
    assert "model/gates/1: 'opt_in'" in validate(write(tmp_path, data))


@gpu_only
def test_every_rung_passes_the_gate():
    config = replace(QWEN3_0_6B, num_hidden_layers=4)
    prompts = gate.random_prompts(config, 6)
    builds = {rung.name: rung.fn.build for rung in DECODE}
    found = gate.gates(builds, weights.random_model(config), prompts)
    for name, result in found.items():
        # The library's attention does not repeat its bits, so its graph may write other tokens.
        moody = name == "qwen3_decode_static_graph"
        assert not [f for f in result.failures if not (moody and "graph's tokens" in f)], result
        assert result.repeats or moody, result
        assert (result.graph_tokens > 0) == (name.endswith(("graph", "chained", "dependent")))
