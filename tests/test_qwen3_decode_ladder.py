"""The ladder of the last chapter: its rungs, its peers, its measurement."""

import labkit as lab
from labkit.check import error_over_allowed
from labkit.compile import compile_cuda
from labkit.exercise import definition
from labkit.record import versions_of
from labkit.results import Results, validate

import importlib
import json
from dataclasses import asdict, replace

import pytest
import torch
from test_results import good, write

from solutions import rope
from solutions.qwen3_decode import (
    dispatch,
    gate,
    ladder,
    ledger,
    measure,
    prefill,
    reference,
    weights,
)
from solutions.qwen3_decode.config import QWEN3_0_6B, Qwen3Config
from solutions.qwen3_decode.generate import greedy
from solutions.qwen3_decode.ladder import DECODE, QWEN3_DECODE
from solutions.qwen3_decode.naive import NaiveStep
from solutions.qwen3_decode.peers import TransformersStep, transformers_model
from solutions.qwen3_decode.rungs import DynamicStep, ReferenceStep, StaticStep
from solutions.qwen3_decode.step import PHASES, DecodeStep, Step

gpu_only = pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
RUNGS = {rung.name: rung for rung in DECODE}
TORCH = (ReferenceStep, DynamicStep, StaticStep)
TINY = Qwen3Config(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices are tiny: a second thread would cost more than it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(dtype, config=TINY):
    """Random weights with products of size one, so that every operation counts."""
    model = weights.random_model(config, dtype=dtype)
    matrices = [model.embed, model.head]
    matrices += [w for layer in model.layers for w in vars(layer).values() if w.ndim == 2]
    for w in {id(w): w for w in matrices}.values():
        w.mul_(1 / (weights.STD * w.shape[1] ** 0.5))
    return model


def started(make, model, length=9, S=64):
    """A step after a prompt of `length` random tokens, and that prompt."""
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(model.config.vocab_size, (length + 1,), generator=generator)
    cache = reference.new_cache(model.config, S, model.embed.dtype, model.embed.device)
    if length:
        reference.forward(model, prompt[:length].to(model.embed.device), cache, last=1)
    step = make(model, cache)
    step.start(int(prompt[length]), length)
    return step, prompt.tolist()


# Rungs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNGS)
def test_rung_states_its_idea_in_one_line(name):
    assert 20 <= len(RUNGS[name].idea) <= 95
    assert RUNGS[name].fn.build.__name__ == name


@pytest.mark.parametrize("name", RUNGS)
def test_rung_is_right(name):
    """Logits, keys and values of one token against float64, at every size, layout and seed."""
    rung = RUNGS[name]
    if lab.SIMULATED and not rung.simulates:
        assert lab.check(rung, QWEN3_DECODE).state == "⚪"
        return
    if lab.SIMULATED and rung.kind != "torch":
        pytest.skip("takes the simulators long: see the next test")
    verdict = lab.check(rung, QWEN3_DECODE)
    assert verdict.state == "🟢"
    assert verdict.worst <= 1


@pytest.mark.parametrize("name", ["qwen3_decode_naive", "qwen3_decode_fused"])
@pytest.mark.parametrize("context", [0, 5])
def test_rung_is_right_under_the_simulators(name, context):
    if not lab.SIMULATED:
        pytest.skip("a GPU is here")
    size = {"context": context, "layers": 1}
    assert error_over_allowed(RUNGS[name].fn, QWEN3_DECODE, torch.float32, **size) <= 1


@pytest.mark.parametrize("name", RUNGS)
def test_rung_names_the_phases_of_each_layer(name):
    if lab.SIMULATED and not RUNGS[name].simulates:
        pytest.skip("needs a CUDA GPU")
    dtype = torch.float32 if lab.SIMULATED else torch.bfloat16
    model, token, position, k, v = QWEN3_DECODE.inputs(dtype, context=1, layers=2)
    step, seen = RUNGS[name].fn.build(model, measure.cache_over(model, k, v)), []
    step.graph, step.marker = None, seen.append
    step.start(token, position)
    step.decode_many(1)
    assert seen == [*2 * PHASES[:-1], "head"]


@pytest.mark.parametrize("attempt", DECODE.rejected, ids=lambda a: a.fn.__name__)
def test_an_attempt_is_the_last_rung_from_another_text_that_compiles(attempt, monkeypatch):
    model = weights.random_model(replace(QWEN3_0_6B, num_hidden_layers=1), dtype=torch.bfloat16)
    cache = reference.new_cache(model.config, 64, torch.bfloat16, model.embed.device)
    monkeypatch.setattr(ladder, "captured", lambda step: step)
    chains = attempt.fn.build(model, cache), DecodeStep(model, cache, dependent=True)
    theirs, ours = ([launch.kernel for launch in step.sequence] for step in chains)
    assert [k.name for k in theirs] == [k.name for k in ours]
    down = theirs[4], ours[4]  # which every attempt changes
    assert len({compile_cuda(kernel, "sm_90").code for kernel in down}) == 2
    if not lab.SIMULATED:
        errors = (
            error_over_allowed(attempt.fn, QWEN3_DECODE, torch.bfloat16, **s)
            for s in QWEN3_DECODE.test_sizes
        )
        assert max(errors) <= 1
    with pytest.raises(ValueError, match="attempt: 'no such' occurs 0 times"):
        ladder.chain_with(model, cache, {"no such": ""})


@gpu_only
@pytest.mark.parametrize("name", RUNGS)
def test_rung_is_right_on_many_seeds(name):
    for seed in range(24):
        size = QWEN3_DECODE.test_sizes[seed % len(QWEN3_DECODE.test_sizes)]
        ratio = error_over_allowed(RUNGS[name].fn, QWEN3_DECODE, torch.bfloat16, seed, **size)
        assert ratio <= 1, (seed, size)


@pytest.mark.parametrize("make", TORCH)
def test_torch_rungs_write_the_tokens_of_the_reference(make):
    model = model_of(torch.float32)
    step, prompt = started(make, model)
    wanted = list(greedy(model, prompt, 24))
    assert step.decode_many(24).tolist() == wanted
    assert len(set(wanted)) > 3
    assert step.position.item() == step.next == 9 + 24


def test_naive_rung_writes_the_tokens_of_the_reference():
    config = replace(TINY, num_hidden_layers=1, hidden_size=32, head_dim=16, vocab_size=67)
    model = model_of(torch.float32, config)
    step, prompt = started(NaiveStep, model, 5, 12)
    assert step.decode_many(3).tolist() == list(greedy(model, prompt, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dynamic_equals_static(dtype):
    """Equal up to the order in which SDPA adds; the new rows of K and V in the same places."""
    model = model_of(dtype)
    (grows, _), (stays, _) = (started(make, model) for make in (DynamicStep, StaticStep))
    allowed = 32 * torch.finfo(dtype).eps
    for _ in range(3):
        a, b = grows.decode_many(1), stays.decode_many(1)
        torch.testing.assert_close(grows.logits, stays.logits, rtol=allowed, atol=allowed)
        grows.tokens[grows.next] = b[0]  # near-ties in bf16 must not end the comparison
        assert a.shape == b.shape == (1,)
    for ours, theirs in zip(grows.kept(), stays.kept(), strict=True):
        assert ours.shape == theirs.shape == (3, 12, 2, 32)
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


def test_a_grown_cache_starts_again():
    step, prompt = started(DynamicStep, model_of(torch.float32))
    first = step.decode_many(5).tolist()
    step.start(prompt[9], 9)
    assert step.decode_many(5).tolist() == first


@pytest.mark.parametrize("make", TORCH[1:])
def test_residuals_are_seen_after_each_layer(make):
    step, prompt = started(make, model_of(torch.float32))
    step.residuals = []
    step.decode_many(2)
    assert [x.shape for x in step.residuals] == 2 * 3 * [(48,)]
    _, wanted = gate.read(
        step.model, torch.tensor(prompt, device=lab.DEVICE.torch), fresh(step, 10), 1
    )
    got = torch.stack(step.residuals[:3])
    torch.testing.assert_close(got, wanted[0], rtol=1e-4, atol=1e-4)


def fresh(step, S):
    embed = step.model.embed
    return reference.new_cache(step.model.config, S, embed.dtype, embed.device)


def test_bad_input_is_named():
    dtype = torch.float32 if lab.SIMULATED else torch.bfloat16
    model, token, context, k, v = QWEN3_DECODE.inputs(dtype, context=3, layers=1)
    for rung in DECODE:
        if lab.SIMULATED and not rung.simulates:
            continue
        for bad, words in (
            ((model, token, context, k.tolist(), v), "k_cache"),
            ((model, token, context, k, v[None]), "v_cache has shape"),
            ((model, token, context, k.half(), v), "the cache's k is"),
            ((model, token, context, k[..., :-1].contiguous(), v), "the cache's k is"),
            ((model, token, context, k, v[:, :-1].contiguous()), "the cache's v is"),
            ((model, token, k.shape[1], k, v), "position="),
            ((model, -1, context, k, v), "token=-1"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                rung.fn(*bad)


@gpu_only
@pytest.mark.parametrize("name", [n for n in RUNGS if n.endswith(("graph", "dependent"))])
def test_capture_leaves_the_cache_as_it_was(name):
    """Tokens of the prompt are in the cache before the graph is made."""
    args = QWEN3_DECODE.inputs(torch.bfloat16, context=70, layers=2)
    model, token, context, k, v = args
    step = RUNGS[name].fn.build(model, measure.cache_over(model, k.clone(), v.clone()))
    for mine, given in ((step.cache.k, k), (step.cache.v, v)):
        assert torch.equal(mine[:, :-1], given[:, :-1])  # the last slot is written in any case
    step.start(token, context)
    step.decode_many(ladder.ROOM)


def test_definitions_of_a_package_are_those_of_its_modules():
    package = importlib.import_module("solutions.qwen3_decode")
    assert definition(package, "embed_norm_fused_kernel").startswith("@triton.jit\n")
    assert definition(package, "DECODE").startswith("DECODE = lab.Ladder(")
    with pytest.raises(ValueError, match="several top-level definition name='reference'"):
        definition(package, "reference")
    with pytest.raises(ValueError, match="no top-level definition name='nothing'"):
        definition(package, "nothing")


# Transformers --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_peer_holds_our_weights_and_has_the_bits_of_the_reference(dtype, tied):
    pytest.importorskip("transformers")
    if not lab.SIMULATED and dtype == torch.bfloat16:
        pytest.skip("on a GPU, other shapes may take other products, and near-ties differ")
    model = model_of(dtype, replace(TINY, tie_word_embeddings=tied))
    net = transformers_model(model)
    assert net.model.layers[1].mlp.up_proj.weight.data_ptr() == model.layers[1].up.data_ptr()
    assert net.lm_head.weight.data_ptr() == model.head.data_ptr()
    peer, _ = started(lambda m, c: TransformersStep(m, c, attention="eager"), model)
    ours, _ = started(ReferenceStep, model)
    for _ in range(4):
        assert torch.equal(peer.decode_many(1), ours.decode_many(1))
        if lab.SIMULATED:
            assert torch.equal(peer.logits, ours.logits)
    for theirs, mine in zip(peer.kept(), ours.kept(), strict=True):
        torch.testing.assert_close(theirs, mine)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_static_peer_starts_again(monkeypatch):
    """Without the compiler, which takes a minute: the static cache is filled and read right."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", lambda net, **how: net)
    model = model_of(torch.float32)
    step, prompt = started(lambda m, c: TransformersStep(m, c, compiled=True), model)
    wanted = list(greedy(model, prompt, 6))
    for _ in range(2):
        assert step.decode_many(6).tolist() == wanted
        step.start(prompt[9], 9)


# Measurement ---------------------------------------------------------------------------------


def test_work_is_every_weight_and_the_cache():
    """1.192 GB of weights, and 114,688 bytes of K and V a token."""
    at = {n: QWEN3_DECODE.work(torch.bfloat16, context=n) for n in (0, 1, 8192)}
    rest = 2 * (1024 + 151_936)  # the embedding's row and the logits
    row = 2 * 28 * 2 * 8 * 128
    assert at[0].bytes == 2 * 596_049_920 + row + rest
    assert at[8192].bytes - at[0].bytes == 8192 * row
    assert at[1].flops - at[0].flops == 4 * 28 * 16 * 128


def test_own_measure_is_used_and_peers_are_left_to_it(monkeypatch):
    seen = {}

    def measured(versions, problem, dtype, size, runs):
        seen.update(versions)
        return ["timed"]

    monkeypatch.setattr(torch, "compile", None)  # nothing is compiled, and no peer is tried
    problem = replace(QWEN3_DECODE, measure=measured)
    chapter = replace(DECODE, problem=problem)
    versions = versions_of(chapter, problem, torch.bfloat16, {"context": 512})
    assert lab.bench.__globals__["measure"](
        versions, problem, torch.bfloat16, {"context": 512}
    ) == ["timed"]
    assert list(seen) == [*RUNGS, "Transformers' operations", "Transformers", "torch.compile"]


def test_results_may_hold_more_and_a_model(tmp_path):
    data = good()
    data["timings"][0]["more"] = {"tokens": 64, "host_loop_s": 1e-3, "launches": 141}
    plan = prefill.Plan(
        8, tried=(prefill.Tried("o", {"M": 8}, "gemv", None, None, None, False, "no"),)
    )
    first = dispatch.FirstToken(8, "plan", 1e-3, 1e-3, 1e-3, 20)
    row = ledger.Row("mine", 8, "head", 100, 0, 10, 1e-6, 2e-6)
    data["model"] = {
        "gates": [],
        "ledger": [asdict(row)],
        "prefill": {"plans": [plan.as_json()], "first_token": [asdict(first)]},
    }
    assert validate(write(tmp_path, data)) is None
    timings = Results(json.loads((tmp_path / "h200" / "blend.json").read_text())).timings
    assert timings[0].more["launches"] == 141
    assert timings[1].more == {}
    data["timings"][0]["more"] = {"tokens": "many"}
    assert "more/tokens" in validate(write(tmp_path, data))
    data["model"]["ledger"][0]["measured_s"] = None
    assert "model/ledger/0/measured_s" in validate(write(tmp_path, data))


def test_a_function_without_a_step_is_refused():
    with pytest.raises(TypeError, match="mine builds no step"):
        measure.device_loops(
            {"mine": ("triton", lambda *args: None)}, QWEN3_DECODE, torch.float32,
            {"context": 1, "layers": 1},
        )  # fmt: skip


@gpu_only
def test_every_rung_is_timed_and_its_launches_counted():
    versions = {r.name: (r.kind, r.fn) for r in DECODE}
    size = {"context": 40, "layers": 2}
    timings = measure.device_loops(versions, QWEN3_DECODE, torch.bfloat16, size)
    assert [t.rung for t in timings] == list(RUNGS)
    more = {t.rung: t.more for t in timings}
    assert more["qwen3_decode_dependent"]["launches"] == 5 * 2 + 1
    assert all(m["launches"] > 0 for m in more.values())
    for t in timings:
        assert 0 < t.p25_s <= t.p50_s <= t.p75_s
        assert t.error_over_allowed <= 1
        assert t.more["host_loop_s"] > 0
        if not RUNGS[t.rung].simulates:  # captured: other processes hardly slow one loop alone
            assert t.more["host_loop_s"] >= 0.5 * t.p50_s


def test_subclasses_share_the_bookkeeping():
    for make in (NaiveStep, *TORCH, TransformersStep):
        assert issubclass(make, Step)
        assert make.decode_many is Step.decode_many


def test_table_of_the_rotation_is_that_of_the_cache():
    model = model_of(torch.float32)
    k = torch.zeros(3, 7, 2, 32, device=lab.DEVICE.torch)
    wanted = rope.cos_sin_table(7, 32, 1e4)
    assert torch.equal(measure.cache_over(model, k, k).cos_sin, wanted)


def test_bars_read_the_gate_and_the_first_token():
    def stored(opt_in, *agreements):
        gates = [
            {"rung": "qwen3_decode_dependent", "opt_in": opt_in, "scores": {"agreement": a}}
            for a in agreements
        ]
        other = {"rung": "qwen3_decode_naive", "opt_in": True, "scores": {"agreement": None}}
        times = {(128, "plan"): 1.0, (128, dispatch.TRANSFORMERS): 4.0}
        times |= {(512, "plan"): 3.0, (512, dispatch.TRANSFORMERS): 4.0}
        rows = [{"T": T, "name": name, "p50_s": s} for (T, name), s in times.items()]
        return Results({"model": {"gates": [*gates, other], "prefill": {"first_token": rows}}})

    assert ladder.agreement(stored(False, 1.0, 0.995)) == 0.995
    assert ladder.agreement(stored(True, 1.0, 0.995)) == 0
    assert ladder.first_token(stored(False, 1.0)) == 0.75
