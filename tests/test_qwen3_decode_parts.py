"""Parts round the last chapter's decode step: prefill and its dispatcher, the ledger."""

import labkit as lab

import json
from dataclasses import asdict, replace

import pytest
import torch

from solutions.qwen3_decode import dispatch, ledger, peers, prefill, reference, weights
from solutions.qwen3_decode.config import QWEN3_0_6B, ModelError, Qwen3Config
from solutions.qwen3_decode.naive import NaiveStep
from solutions.qwen3_decode.prefill import PLAIN, Plan, Prefill, Tried
from solutions.qwen3_decode.rungs import DynamicStep, StaticStep
from solutions.qwen3_decode.step import DecodeStep, OpsStep

gpu_only = pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")

TINY = Qwen3Config(
    vocab_size=41,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # 4·16 is not 32
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    dtype="float32",
)
SHAPES = {
    "tied": TINY,
    "own head": replace(TINY, tie_word_embeddings=False),
    "no groups": replace(TINY, num_key_value_heads=4),
}
# Of the logits, which are of size one: rounding, through two layers.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=["fp32", "bf16"])


def model_of(config=TINY, dtype=torch.float32):
    """Random weights with products of size one, so that every operation counts."""
    model = weights.random_model(config, dtype=dtype)
    matrices = [w for layer in model.layers for w in vars(layer).values() if w.ndim == 2]
    for w in {id(w): w for w in [model.embed, model.head, *matrices]}.values():
        w.mul_(1 / (weights.STD * w.shape[1] ** 0.5))
    return model


def cache_of(model, S=24):
    return reference.new_cache(model.config, S, model.embed.dtype, model.embed.device)


def tokens_of(model, T):
    return dispatch.random_tokens(model, T, 1)[0]


def agrees(model, T, run):
    """`run(tokens, cache)` has the logits and the cache of the reference."""
    tokens, wanted, got = tokens_of(model, T), cache_of(model), cache_of(model)
    got.k.fill_(7)  # what is past the prompt stays as it is
    logits = run(tokens, got)
    truth = reference.forward(model, tokens, wanted, last=1)[0]
    close = CLOSE[model.embed.dtype]
    assert logits.shape == truth.shape
    assert logits.dtype == truth.dtype
    torch.testing.assert_close(logits, truth, rtol=0, atol=close)
    for mine, theirs in ((got.k, wanted.k), (got.v, wanted.v)):
        torch.testing.assert_close(mine[:, :T], theirs[:, :T], rtol=0, atol=close)
    assert (got.k[:, T:] == 7).all()


# Prefill -------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_plain_prefill_is_the_reference(config, dtype):
    model = model_of(config, dtype)
    for T in (1, 2, 17, 24):
        agrees(model, T, lambda tokens, cache: prefill.prefill(model, tokens, cache))


@DTYPES
def test_plain_prefill_has_the_bits_of_transformers(dtype):
    """With the same kernel for attention, the same operations in the same order."""
    pytest.importorskip("transformers")
    for config in SHAPES.values():
        model = model_of(config, dtype)
        peer = peers.transformers_prefill(model)
        for T in (1, 5, 24):
            tokens = tokens_of(model, T)
            ours = prefill.prefill(model, tokens, cache_of(model))
            if lab.SIMULATED:
                assert torch.equal(peer(tokens), ours)
            torch.testing.assert_close(peer(tokens), ours, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("T", [1, 2, 19])
def test_every_candidate_computes_the_same(T):
    model, seen = model_of(), set()
    for part, shape, name in dispatch.candidates(model.config, T, gpu=not lab.SIMULATED):
        if name == "sdpa_cudnn":
            continue  # takes no float32
        plan = Plan(T, **{part: name})
        if name == "gemv" and shape["M"] > 8:
            with pytest.raises(ValueError, match=r"M=19 must be 1 to 8"):
                prefill.prefill(model, tokens_of(model, T), cache_of(model), plan)
            continue
        agrees(model, T, lambda tokens, cache, p=plan: prefill.prefill(model, tokens, cache, p))
        seen.add(part)
    assert {"qkv", "norm", "rotation", "gate_up", "head"} <= seen
    assert ("o" in seen) == (T <= 8)


def test_all_candidates_together_compute_the_same():
    model, T = model_of(), 3
    last = {part: name for part, _, name in dispatch.candidates(model.config, T, gpu=False)}
    model_plan = Plan(T, **last)
    run = Prefill(model, cache_of(model), [model_plan])
    agrees(model, T, lambda tokens, cache: prefill.prefill(model, tokens, cache, model_plan))
    truth = prefill.prefill(model, tokens_of(model, T), cache_of(model))
    torch.testing.assert_close(run(tokens_of(model, T)), truth, rtol=0, atol=1e-5)
    # Another number of tokens is not the plan's: plain torch, to the last bit.
    other = tokens_of(model, T + 1)
    assert torch.equal(run(other), prefill.prefill(model, other, cache_of(model)))


def test_prefill_goes_on_as_decode():
    """What prefill leaves in the cache is what a step needs."""
    model, cache = model_of(), cache_of(model_of())
    tokens = tokens_of(model, 9)
    prefill.prefill(model, tokens[:-1], cache)
    step = OpsStep(model, cache)
    step.start(tokens[-1], 8)
    step.decode_many(1)
    wanted = reference.forward(model, tokens, cache_of(model), last=1)[0]
    torch.testing.assert_close(step.logits, wanted, rtol=0, atol=1e-5)


def test_wrong_prompts_and_plans_are_refused():
    model = model_of()
    cache = cache_of(model)
    with pytest.raises(ModelError, match="25 tokens; the cache has 24"):
        prefill.prefill(model, tokens_of(model, 25), cache)
    with pytest.raises(ModelError, match="0 tokens"):
        prefill.prefill(model, tokens_of(model, 1)[:0], cache)
    with pytest.raises(ModelError, match="for 3 tokens, and these are 4"):
        prefill.prefill(model, tokens_of(model, 4), cache, Plan(3))
    with pytest.raises(ValueError, match="qkv='best' is not one of"):
        Plan(qkv="best")
    with pytest.raises(ValueError, match="holds one number of tokens"):
        Plan(launch="graph")


@pytest.mark.skipif(not lab.SIMULATED, reason="a GPU is here")
def test_without_a_gpu_there_is_no_graph_and_no_tuning():
    model = model_of()
    assert dispatch.tune(model, 8) == Plan(8)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        prefill.prefill(model, tokens_of(model, 4), cache_of(model), Plan(4, launch="graph"))


def test_a_plan_is_plain_data_and_shows_what_was_tried():
    rows = (
        Tried("launch", {"T": 8}, "graph", 2e-3, 1e-3, 0.01, True, "50 % less time"),
        Tried(
            "head", {"M": 1, "N": 41, "K": 32}, "gemv", None, None, None, False, "ValueError: no"
        ),
    )
    plan = Plan(8, launch="graph", head="gemv", tried=rows)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    text = repr(plan.table())
    assert "kept: 50 % less time" in text
    assert "M=1 N=41 K=32" in text


@pytest.mark.parametrize(
    ("before", "again", "after", "right", "kept", "why"),
    [
        (1.0, 1.0, 0.9, True, True, "10 % less time"),
        (1.0, 1.0, 1.1, True, False, "10 % more time"),
        (1.0, 1.0, 0.999, True, False, "0.1 % less time, within 0.5 %"),
        (1.0, 1.04, 0.97, True, False, "less time, within"),  # noise of 4 %
        (1.0, 1.0, 0.5, False, False, "the gate does not hold"),
        (1.0, 1.0, 1.0, True, False, "more time"),
    ],
)
def test_a_candidate_must_save_more_than_the_noise(before, again, after, right, kept, why):
    took = {"before": [before] * 3, "again": [again] * 3, "after": [after] * 3}
    verdict = dispatch.judged(took, right)
    assert verdict[3] is kept
    assert why in verdict[4]


def test_each_trial_starts_from_what_was_kept(monkeypatch):
    """A clock on which only these two save time, and a candidate that raises."""
    model, T = model_of(), 3
    saves = {"joined": 0.2, "swiglu": 0.5}
    trials = [t for t in dispatch.candidates(model.config, T, gpu=False) if t[2] != "gemv"]
    if lab.SIMULATED:
        trials = [("launch", {"T": T}, "graph"), *trials]
    names, asked, whole = iter([t[2] for t in trials if t[2] != "graph"]), [], [1.0]

    def clock(calls, rounds):
        before, name = whole[0], next(names)
        assert all(call().shape == (41,) for call in calls.values())
        after = before * (1 - saves.get(name, -0.1))
        if asked[-1] and after < before:
            whole[0] = after
        return {"before": [before] * 2, "again": [before] * 2, "after": [after] * 2}

    def holds(logits):
        assert logits.shape == (2, 41)
        asked.append(len(asked) != 3)  # it does not hold of the fourth that runs
        return asked[-1]

    monkeypatch.setattr(dispatch, "time_to_first_token", clock)
    prompts = dispatch.random_tokens(model, T, 2)
    plan = dispatch.search(model, prompts, cache_of(model), trials, holds, 2)
    kept = [(t.part, t.candidate) for t in plan.tried if t.kept]
    reasons = {(t.part, t.candidate): t.why for t in plan.tried}
    if lab.SIMULATED:
        assert reasons["launch", "graph"] == "RuntimeError: a CUDA graph needs a GPU"
    assert reasons["norm", "rms_norm_residual"] == "10 % more time"
    assert reasons["gate_up", "joined"] == "the gate does not hold (20 % less time)"
    assert kept == [("qkv", "joined"), ("gate_up", "swiglu")]
    assert replace(plan, tried=()) == Plan(T, qkv="joined", gate_up="swiglu")
    assert len(plan.tried) == len(trials)
    assert plan.tried[-1].before_s == pytest.approx(0.4)
    assert dispatch.random_tokens(model, T, 2).equal(prompts)


def test_the_gate_takes_rounding_and_no_mistakes():
    model = model_of(dtype=torch.bfloat16)
    prompts, cache = dispatch.random_tokens(model, 20), cache_of(model)
    holds = dispatch.as_near(model, prompts, cache)

    def logits(changed, plan=PLAIN):
        return torch.stack([prefill.prefill(changed, t, cache, plan) for t in prompts])

    assert holds(logits(model))
    assert holds(logits(model, Plan(qkv="joined", gate_up="joined")))
    layer = model.layers[1]
    for wrong in (
        replace(layer, post_norm=torch.ones_like(layer.post_norm)),
        replace(layer, o=layer.o * 1.05),
        replace(layer, v=torch.zeros_like(layer.v)),
    ):
        assert not holds(logits(replace(model, layers=(model.layers[0], wrong))))
    assert not holds(torch.full_like(logits(model), torch.nan))


def test_first_tokens_are_shown():
    rows = [dispatch.FirstToken(T, n, t, t, t, 20) for T in (128, 512) for n, t in (("a", 1e-3),)]
    assert "1,000 µs" in repr(dispatch.table(rows))


# The ledger ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*SHAPES.values(), QWEN3_0_6B], ids=[*SHAPES, "0.6B"])
def test_bytes_are_those_of_the_model(config):
    """Every weight once; an embedding that is not the head too is read by the row."""
    rows = ledger.bytes_of(config, 512, 2)
    sizes = weights.tensor_shapes(config)
    numbers = sum(torch.Size(shape).numel() for shape in sizes.values())
    if not config.tie_word_embeddings:
        numbers -= torch.Size(sizes["model.embed_tokens.weight"]).numel()
    assert sum(row[0] for row in rows.values()) == 2 * numbers
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert sum(row[1] for row in rows.values()) == 513 * cache
    if config is QWEN3_0_6B:
        assert round(2 * numbers / 1e9, 3) == 1.192
        assert sum(row[2] for row in rows.values()) < 0.002 * 2 * numbers


def rows_of(*rungs):
    """Rows as a GPU would give them; the times are invented, and only tested."""
    rows = []
    for n, rung in enumerate(rungs, 1):
        for phase, moved in (ledger.bytes_of(TINY, 8, 4) | {ledger.GAPS: (0, 0, 0)}).items():
            rows.append(ledger.Row(rung, 8, phase, *moved, sum(moved[:2]) / 1e9, n * 1e-3))
    return rows


def test_the_ledger_is_shown_from_stored_rows():
    stored = json.loads(json.dumps([asdict(row) for row in rows_of("first", "second")]))
    rows = [ledger.Row(**row) for row in stored]
    assert rows == rows_of("first", "second")
    text = repr(ledger.table(rows))
    assert text.count("one token") == 2
    assert all(phase in text for phase in ledger.PHASES)
    one = ledger.total(rows[:7])
    assert one.weights == sum(row[0] for row in ledger.bytes_of(TINY, 8, 4).values())
    assert one.measured_s == pytest.approx(7e-3)
    picture = ledger.figure(rows)
    assert "second: 14,000 µs a token" in repr(picture)
    assert 1000 < len(picture.png()) < 60_000


@pytest.mark.skipif(not lab.SIMULATED, reason="a GPU is here")
def test_without_a_gpu_the_ledger_has_bytes_and_no_times():
    model = model_of()
    step = OpsStep(model, cache_of(model))
    rows = ledger.ledger(step, 8)
    assert [row.phase for row in rows] == [*ledger.PHASES, ledger.GAPS]
    assert all(row.measured_s is None and row.floor_s is None for row in rows)
    rows = ledger.ledger(step, 8, rung="ops", read=1e9)
    assert rows[0].floor_s == rows[0].weights / 1e9
    assert "ops" in repr(ledger.table(rows))
    with pytest.raises(ValueError, match="no measured time"):
        ledger.figure(rows)
    with pytest.raises(ValueError, match="context=-1"):
        ledger.ledger(step, -1)


def named(*names):
    """Kernels that take 2 µs each, with 1 µs between them."""
    return [(3.0 * i, 3.0 * i + 2, name) for i, name in enumerate(names)]


def test_kernels_are_counted_to_their_phases():
    layer = ["qkv", "a", "b", "attention", "c", "o", "gate_up", "d", "down", "e"]  # `o` is empty
    token = ["qkv", "embed", *layer, *layer, "head", "f", "g"]
    names = [f"void {ledger.MARK}{n}()" if n in ledger.PHASES else n for n in 2 * token]
    kernels = named(*names)
    between = ledger.between_marks(reversed(kernels))  # the profiler's order is not theirs
    assert [k[:2] for k in between] == [k[:2] for k in kernels if ledger.MARK not in k[2]]
    of_layer = ["qkv", "qkv", "attention", "gate_up", "down"]
    assert [k[2] for k in between] == 2 * ["qkv", *of_layer, *of_layer, "head", "head"]
    times = ledger.per_phase(between, 2)
    counts = {"qkv": 5, "attention": 2, "o": 0, "gate_up": 2, "down": 2, "head": 2}
    assert times == pytest.approx({phase: n * 2e-6 for phase, n in counts.items()})
    assert ledger.per_phase(named(*3 * [ledger.ALL]), 1) == pytest.approx({ledger.ALL: 6e-6})


def test_what_overlaps_counts_once():
    """Kernel 1 starts while kernel 0 works, and waits for it: its time begins when that ends."""
    ends = [4.0, 6, 9, 13, 18, 24]
    kernels = [(max(0.0, end - 5), end, p) for p, end in zip(ledger.PHASES, ends, strict=True)]
    times = ledger.per_phase(kernels, 1)
    assert list(times) == list(ledger.PHASES)
    added = [4, 2, 3, 4, 5, 5]  # the last starts a µs after the one before ended
    assert times == pytest.approx(dict(zip(ledger.PHASES, (n * 1e-6 for n in added), strict=True)))


@pytest.mark.parametrize("phases", [ledger.PHASES, ()], ids=["named", "not named"])
def test_a_run_with_marks_says_whose_a_kernel_is(phases, monkeypatch):
    """A step of one kernel a phase, or of one in all. The profiler is played: see the GPU tests."""
    launched = []

    class Played(OpsStep):
        def run(self):
            for phase in phases:
                self.at(phase)
                launched.append(phase.upper())
            launched.append("last")

    def kernel(source, name):
        return {(1, 1): lambda: launched.append(name)}

    def kernels_of(run):
        run()
        return named(*launched)

    monkeypatch.setattr(lab, "cuda_kernel", kernel)
    monkeypatch.setattr(ledger, "kernels_of", kernels_of)
    model = model_of()
    step = Played(model, cache_of(model))
    seen = [phase for *_, phase in ledger.marked_run(step, 0, 2)]
    assert seen == 2 * ([*phases, "head"] if phases else [ledger.ALL])
    assert step.marker is None


# On a GPU ------------------------------------------------------------------------------------


@gpu_only
def test_tuning_keeps_what_is_faster_and_right():
    config = replace(QWEN3_0_6B, num_hidden_layers=2)
    model = model_of(config, torch.bfloat16)
    plan = dispatch.tune(model, 128, rounds=5)
    assert plan.launch == "graph"  # launches are most of the time
    assert {t.part for t in plan.tried} >= {"launch", "qkv", "norm", "rotation", "gate_up", "head"}
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    tokens = tokens_of(model, 128)
    cache = reference.new_cache(config, 128, torch.bfloat16, model.embed.device)
    run = Prefill(model, cache, [plan])
    first, k = run(tokens), cache.k.clone()
    assert torch.equal(run(tokens), first)
    assert torch.equal(cache.k, k)
    none = dispatch.tune(model, 128, holds=lambda logits: False, rounds=5)
    assert replace(none, tried=()) == Plan(128)
    rows = dispatch.compare(model, plan, rounds=5)
    assert {"plain torch", "plan"} <= {row.name for row in rows}


@gpu_only
def test_the_ledger_of_a_step_adds_up():
    config = replace(QWEN3_0_6B, num_hidden_layers=2)
    model = model_of(config, torch.bfloat16)
    cache = reference.new_cache(config, 600, torch.bfloat16, model.embed.device)
    step = DecodeStep(model, cache)
    step.capture()
    rows = ledger.ledger(step, 100)
    assert [row.phase for row in rows] == [*ledger.PHASES, ledger.GAPS]
    assert all(row.measured_s > 0 for row in rows[:-1])
    assert ledger.total(rows).measured_s > ledger.total(rows).floor_s
    for make in (OpsStep, NaiveStep, DynamicStep, StaticStep):
        for captured in (False, True):
            step = make(model, cache)
            if captured and make in (OpsStep, StaticStep):
                step.capture()
            rows = ledger.ledger(step, 511)  # here torch changes its kernels for attention
            assert [row.phase for row in rows] == [*ledger.PHASES, ledger.GAPS], step
            assert all(row.measured_s > 0 for row in rows[:-1])
            assert step.marker is None
