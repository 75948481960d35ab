"""One decode step of the last chapter: its launches, what they compile to, its tokens."""

import labkit as lab
from labkit import compile_worker
from labkit.compile import ALL_ARCHS, compile_cuda

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

import pytest
import torch

from solutions.qwen3_decode import kernels, reference, weights
from solutions.qwen3_decode.config import QWEN3_0_6B, ModelError, Qwen3Config
from solutions.qwen3_decode.step import DecodeStep, OpsStep, count_kernels

gpu_only = pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
dependent_only = pytest.mark.skipif(
    lab.SIMULATED or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0",
)

SMALL = Qwen3Config(
    vocab_size=301,  # no multiple of a warp's rows
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
REAL = replace(QWEN3_0_6B, num_hidden_layers=2)
SIZES = {
    "small": SMALL,
    "0.6B": REAL,
    "no groups": replace(SMALL, num_attention_heads=4),
    "own head": replace(SMALL, tie_word_embeddings=False),
}
WAIT = "ACQBULK"  # griddepcontrol.wait in the assembler's language
SM_REGISTERS = 65536
SM_SHARED = 226 * 1024  # bytes of sm_90's 228 KiB; the rest for the small arrays


def model_of(config, dtype=torch.bfloat16):
    """Random weights with products of size one, so that every operation counts."""
    model = weights.random_model(config, dtype=dtype)
    for w in {id(w): w for w in matrices(model)}.values():
        w.mul_(1 / (weights.STD * w.shape[1] ** 0.5))
    return model


def matrices(model):
    layers = [w for layer in model.layers for w in vars(layer).values() if w.ndim == 2]
    return [model.embed, model.head, *layers]


def as_dtype(model, dtype):
    layers = tuple(
        weights.Layer(**{k: w.to(dtype) for k, w in vars(layer).items()}) for layer in model.layers
    )
    return replace(
        model,
        embed=model.embed.to(dtype),
        layers=layers,
        norm=model.norm.to(dtype),
        head=model.head.to(dtype),
    )


def started(make, model, length, S, **how):
    """A step whose cache holds `length` random tokens, and that reads one more."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(model.config.vocab_size, (length + 1,), generator=generator)
    tokens = tokens.to(model.embed.device)
    cache = reference.new_cache(model.config, S, model.embed.dtype, model.embed.device)
    if length:
        reference.forward(model, tokens[:length], cache, last=1)
    step = make(model, cache, **how)
    step.start(tokens[length], length)
    return step, tokens[length:]


def planned(config):
    model = weights.random_model(config)
    cache = reference.new_cache(config, 64, torch.bfloat16, model.embed.device)
    return DecodeStep(model, cache).sequence


def kernels_of(config):
    """The kernels of a step, each once, in launch order."""
    return list({launch.kernel.name: launch.kernel for launch in planned(config)}.values())


@cache
def code_dump(kernel, arch):
    """What the disassembler prints."""
    return compile_worker._disassemble(compile_cuda(kernel, arch).code)


@cache
def code_of(kernel, arch):
    """Registers, bytes of stack and the instructions in order."""
    dump = code_dump(kernel, arch)
    registers, stack = (int(re.search(rf"{what}:(\d+)", dump)[1]) for what in ("REG", "STACK"))
    return registers, stack, re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", dump, re.MULTILINE)


def streamed_by(name):
    """Loads of W, or of keys and values, that a thread has under way when it begins to wait."""
    a, b, c, *_ = map(int, re.findall(r"\d+", name.partition("<")[2] + ", 0"))
    return {
        "norm_gemv": a * b,  # rows, packs of a row
        "attention": a * (c - 1) // 8,  # 16 bytes of 16 keys and values, for all tiles but one
        "gemv_residual": a,
        "norm_gate_up": 2 * a * b,  # of gate and of up
        "norm_head": 2 * a * b,  # these and the next rows
    }[name.partition("_kernel")[0]]


# The plan and the compilers ------------------------------------------------------------------


def test_a_step_has_five_launches_a_layer_and_one():
    assert len(planned(SMALL)) == 5 * SMALL.num_hidden_layers + 1
    assert len(planned(replace(SMALL, num_hidden_layers=3))) == 16


@pytest.mark.parametrize("arch", ALL_ARCHS)
@pytest.mark.parametrize("config", [SMALL, REAL], ids=["small", "0.6B"])
def test_kernels_compile_without_spills(config, arch):
    for kernel in kernels_of(config):
        registers, stack, code = code_of(kernel, arch)
        assert stack == 0, f"{kernel.name} on {arch}: {stack} bytes of stack, {registers} registers"
        assert any(WAIT in line for line in code) == (int(arch[3:]) >= 90)


@pytest.mark.parametrize("arch", [a for a in ALL_ARCHS if int(a[3:]) >= 90])
def test_weights_are_asked_for_before_the_wait(arch):
    """The compiler could put the loads off: then nothing would be there when the wait ends."""
    for kernel in kernels_of(REAL):
        *_, code = code_of(kernel, arch)
        wait = next(i for i, line in enumerate(code) if WAIT in line)
        early, late = (
            [line for line in part if "LDG" in line] for part in (code[:wait], code[wait:])
        )
        streamed = [line for line in early if re.search(r"\.NA\.128|LDGSTS.*\.128", line)]
        assert len(streamed) == streamed_by(kernel.name), f"{kernel.name} on {arch}: {early}"
        assert late, f"{kernel.name} on {arch} reads nothing after the wait"


def test_a_kernel_has_room_beside_the_one_before():
    """A block of the next kernel must fit into an SM beside those of this one, to load early.

    Of shared memory, only attention's ring counts: the others' is a few bytes.
    """
    sequence = planned(REAL)[:8]  # a layer and the start of the next
    registers = {k.name: -(-code_of(k, "sm_90")[0] // 8) * 8 for k in kernels_of(REAL)}
    cramped = set()
    for now, following in pairwise(sequence):
        blocks, more = (-(-prod(launch.grid) // 132) for launch in (now, following))
        left = SM_REGISTERS - blocks * now.block * registers[now.kernel.name]
        room = left // (following.block * registers[following.kernel.name])
        assert room >= 1, f"{now.kernel.name} and {following.kernel.name}"
        assert blocks * now.shared + following.shared <= SM_SHARED
        if room < more:
            cramped.add(following.kernel.name)
    down = sequence[4].kernel.name  # and no other: chapter 21 says so
    assert cramped == {down}


@pytest.mark.parametrize(("most", "warps"), [(227, 8), (163, 8), (99, 4)])
def test_attention_fits_into_the_shared_memory_of_smaller_gpus(most, warps, monkeypatch):
    monkeypatch.setattr(kernels.decode_attention, "SHARED", (most - 8) * 1024)
    launch = planned(REAL)[1]
    assert launch.kernel.name == f"attention_kernel<128, 2, 2, {warps}>"
    static = int(re.search(r"SHARED:(\d+)", code_dump(launch.kernel, "sm_120"))[1])
    assert launch.block == 32 * warps
    assert launch.shared + static <= most * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 320},
        {"hidden_size": 2048},
        {"intermediate_size": 300},
        {"head_dim": 32, "num_attention_heads": 16},
        {"num_attention_heads": 16},
    ],
    ids=str,
)
def test_sizes_that_no_kernel_takes_are_refused(change):
    with pytest.raises(ModelError, match="the kernels take"):
        planned(replace(SMALL, **change))


def test_other_mistakes_are_refused():
    model = weights.random_model(SMALL, dtype=torch.float32)
    cache = reference.new_cache(SMALL, 8, torch.float32, model.embed.device)
    with pytest.raises(TypeError, match="bfloat16"):
        DecodeStep(model, cache)
    with pytest.raises(ModelError, match="the cache's k is"):
        OpsStep(replace(model, config=replace(SMALL, num_key_value_heads=2)), cache)
    step = OpsStep(model, cache)
    with pytest.raises(ModelError, match="position=8"):
        step.start(1, 8)
    with pytest.raises(ModelError, match="token=301"):
        step.start(301, 0)
    step.start(1, 6)
    with pytest.raises(ModelError, match="3 tokens from position 6"):
        step.decode_many(3)


@pytest.mark.skipif(not lab.SIMULATED, reason="a GPU is here")
def test_without_a_gpu_a_step_says_so():
    step, _ = started(DecodeStep, weights.random_model(SMALL), 0, 8)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        step.run()
    with pytest.raises(RuntimeError, match="needs a GPU"):
        step.capture()


def test_chapters_attention_gets_its_memory_once():
    """Else every launch in a graph would have another one before it, to fill that memory."""
    model = model_of(replace(SMALL, hidden_size=64, vocab_size=67), torch.float32)
    op = started(OpsStep, model, 0, 12)[0].ops.decode_attention
    assert op.keywords["workspace"].partial.shape[:2] == (1, SMALL.num_attention_heads)

    def mine(*args):
        raise AssertionError("not called here")

    ops = {"decode_attention": mine}  # a reader's op is called with what it knows
    assert started(OpsStep, model, 0, 12, ops=ops)[0].ops.decode_attention is mine


def test_chapters_ops_follow_the_reference():
    """In float32, which is what the simulators compute right."""
    config = replace(SMALL, hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=67)
    model = model_of(config, torch.float32)
    step, tokens = started(OpsStep, model, 5, 12)
    cache = reference.Cache(step.cache.k.clone(), step.cache.v.clone(), step.cache.cos_sin)
    for position in (5, 6):
        wanted = reference.forward(model, tokens.long(), cache, position)[0]
        tokens = step.decode_many(1)
        torch.testing.assert_close(step.logits, wanted, rtol=1e-4, atol=1e-4)
        assert tokens.item() == wanted.argmax()
        assert step.position.item() == position + 1


# On a GPU ------------------------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("make", [DecodeStep, OpsStep])
@pytest.mark.parametrize("config", SIZES.values(), ids=SIZES)
def test_a_step_is_as_near_the_truth_as_transformers(config, make):
    """Logits against float64, whose error the reference in bfloat16 shows what to allow for."""
    model = model_of(config)
    for length in (0, 1, 63, 64, 127, 128, 513, 1500):
        step, tokens = started(make, model, length, 2048)
        caches = [
            reference.Cache(step.cache.k.to(t), step.cache.v.to(t), step.cache.cos_sin.to(c))
            for t, c in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32))
        ]
        caches[1] = caches[1]._replace(k=step.cache.k.clone(), v=step.cache.v.clone())
        before = [x.clone() for x in (step.cache.k, step.cache.v)]
        token = step.decode_many(1)
        truth = reference.forward(as_dtype(model, torch.float64), tokens.long(), caches[0], length)
        bf16 = reference.forward(model, tokens.long(), caches[1], length)
        allowed = 2 * (bf16.double() - truth).abs().max() + 1e-3
        assert (step.logits.double() - truth[0]).abs().max() <= allowed, f"{length=}"
        assert token.item() == step.logits.float().argmax()  # the first of equal ones
        for now, was in zip((step.cache.k, step.cache.v), before, strict=True):
            other = torch.arange(2048, device=now.device) != length
            assert torch.equal(now[:, other], was[:, other])  # one row is written in each layer
            assert not torch.equal(now[:, length], was[:, length])


@gpu_only
@pytest.mark.parametrize("config", [SMALL, REAL], ids=["small", "0.6B"])
def test_graph_and_eager_agree_token_for_token(config):
    model = model_of(config)
    how = {"eager": (False, False), "graph": (False, True)}
    if torch.cuda.get_device_capability() >= (9, 0):
        how |= {"dependent": (True, False), "dependent graph": (True, True)}
    results = {}
    for name, (dependent, graph) in how.items():
        step, _ = started(DecodeStep, model, 40, 512, dependent=dependent)
        if graph:
            step.capture()
        tokens = torch.cat((step.decode_many(64), step.decode_many(200)))
        results[name] = tokens.tolist(), step.logits.clone(), step.kept()[0].clone()
    tokens, logits, k = results["eager"]
    assert len(set(tokens)) > 8
    for name, got in results.items():
        assert got[0] == tokens, name
        assert torch.equal(got[1], logits), name
        assert torch.equal(got[2], k), name


@gpu_only
def test_ops_in_a_graph_agree_with_ops():
    model = model_of(SMALL)
    (eager, _), (graph, _) = (started(OpsStep, model, 400, 512) for _ in range(2))
    graph.capture()
    assert torch.equal(eager.decode_many(64), graph.decode_many(64))


@gpu_only
def test_a_step_allocates_nothing_and_waits_for_nothing():
    step, _ = started(DecodeStep, model_of(SMALL), 3, 256)
    for _ in ("eager", "graph"):
        step.decode_many(1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.decode_many(8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        step.capture()


@gpu_only
def test_launches_are_what_the_profiler_sees():
    step, _ = started(DecodeStep, model_of(SMALL), 3, 256)
    assert count_kernels(step.run) == step.launches


@dependent_only
def test_dependent_launch_gives_the_same_bits_many_times():
    """A read before the wait that should come after it would show now and then."""
    model = model_of(REAL)
    tokens = set()
    for _ in range(20):
        step, _ = started(DecodeStep, model, 100, 512, dependent=True)
        step.capture()
        tokens.add(tuple(step.decode_many(256).tolist()))
    assert len(tokens) == 1


def test_a_launch_has_its_memory():
    """Arguments of the wrong shape are named."""
    launch = planned(SMALL)[1]
    q_gain = launch.args[1]
    with pytest.raises(ValueError, match="x has shape"):
        kernels.check(torch.bfloat16, x=(q_gain, (1,)))
    with pytest.raises(TypeError, match="must be torch"):
        kernels.check(torch.float32, x=(q_gain, tuple(q_gain.shape)))
