"""Swap-in: another op in the place of ours, inside the model of the last chapter."""

import labkit as lab

import pytest
import torch
from test_qwen3_decode_parts import TINY, cache_of, model_of

from solutions import rms_norm
from solutions.qwen3_decode.config import ModelError
from solutions.qwen3_decode.step import OPS, OpsStep
from solutions.qwen3_decode.swap import OURS, swap

PROMPT = [1, 2, 3, 4, 5]
GOOD = rms_norm.rms_norm
WRONG_NORMS = {
    "no eps": lambda x, w, eps: GOOD(x, w, 1e-30),
    "scaled": lambda x, w, eps: GOOD(x, w, eps) * 1.01,
    "no weight": lambda x, w, eps: GOOD(x, torch.ones_like(w), eps),
}


@pytest.mark.parametrize("name", OURS)
def test_our_op_in_its_own_place_changes_nothing(name):
    result = swap(model_of(), PROMPT, name, {**OURS, **OPS}[name], tokens=2)
    assert result.first_layer is None
    assert result.first_token is None
    assert len(result.differences) == TINY.num_hidden_layers + 1
    assert "the same in all layers" in repr(result)
    assert (result.seconds is None) == lab.SIMULATED


@pytest.mark.parametrize("how", WRONG_NORMS)
def test_a_wrong_norm_is_found_in_the_first_layer(how):
    result = swap(model_of(), PROMPT, "rms_norm", WRONG_NORMS[how], tokens=3)
    assert result.first_layer == 0
    assert "part in layer 0" in repr(result)
    assert "yes" in repr(result.table())


@pytest.mark.parametrize("name", [name for name in OURS if name not in OPS])
def test_a_wrong_part_of_an_op_is_found_in_the_first_layer(name):
    def wrong(*args):
        if name == "paged_kv_write":  # which returns what it wrote into
            return OURS[name](args[0] * 1.05, *args[1:])
        got = OURS[name](*args)
        return tuple(x * 1.05 for x in got) if isinstance(got, tuple) else got * 1.05

    result = swap(model_of(), PROMPT, name, wrong, tokens=2)
    assert result.first_layer == 0


def test_a_wrong_op_changes_the_first_token():
    result = swap(model_of(), [1], "rms_norm", lambda x, w, eps: -GOOD(x, w, eps), tokens=4)
    assert result.first_token == 0
    assert "parts at token 1 of 4" in repr(result)


def test_an_op_that_is_wrong_later_parts_later():
    for wrong, layer in ((1, 1), (2, None)):  # which call is wrong, one a layer
        calls = []

        def late(*args, wrong=wrong, calls=calls):
            calls.append(len(calls))
            q, k, v = OPS["qk_norm_rope_cache"](*args)
            return (q * 1.5 if calls[-1] == wrong else q), k, v

        result = swap(model_of(), PROMPT, "qk_norm_rope_cache", late, tokens=2)
        assert result.first_layer == layer  # call 2 is of the second token

    def in_the_head(x, w):
        return lab.outputs(torch.nn.functional.linear(x, w))[0] * (-1 if len(w) == 41 else 1)

    result = swap(model_of(), PROMPT, "gemv", in_the_head, tokens=2)
    assert result.first_layer == TINY.num_hidden_layers
    assert "part in the head" in repr(result)
    assert result.first_token == 0


def test_another_precision_is_rounding():
    def rounded(x, w, eps):  # by a unit in the last place: ours may have the bits of float64
        return (rms_norm.library(x.double(), w.double(), eps) * (1 + 2**-22)).to(x.dtype)

    result = swap(model_of(), PROMPT, "rms_norm", rounded, tokens=3)
    assert result.first_layer is None
    assert max(result.differences) > 0


def test_mistakes_are_named():
    def fails(*args):
        raise KeyError("oh")

    model = model_of()
    with pytest.raises(ValueError, match="name='norm' is not one of: rms_norm, "):
        swap(model, PROMPT, "norm", fails)
    with pytest.raises(ValueError, match="name='norm' is not one of: embed_norm, "):
        OpsStep(model, cache_of(model), ops={"norm": fails})
    with pytest.raises(RuntimeError, match="decode_attention in layer 0 failed: KeyError: 'oh'"):
        swap(model, PROMPT, "decode_attention", fails, tokens=1)
    with pytest.raises(ValueError, match=r"rms_norm in layer 0 returned a NoneType, must return"):
        swap(model, PROMPT, "rms_norm", lambda *args: None, tokens=1)
    with pytest.raises(ValueError, match=r"gemv in layer 0 returned float32 \[128\], must"):
        swap(model, PROMPT, "gemv", lambda x, w: torch.nn.functional.linear(x, w)[0], tokens=1)
    if lab.SIMULATED:
        with pytest.raises(ModelError, match=r"in float32, the model is in torch\.bfloat16"):
            swap(model_of(dtype=torch.bfloat16), PROMPT, "gemv", fails)
    with pytest.raises(ModelError, match="one at least"):
        swap(model, [], "gemv", fails)
    with pytest.raises(ModelError, match="token=41"):
        swap(model, [41], "gemv", fails)
    with pytest.raises(ModelError, match="a cache of 68 slots"):
        swap(model, PROMPT, "gemv", fails, tokens=64)
