"""The ladder of this chapter: one decode step of Qwen3, from the first rungs to dependent launch.

A rung here is a way to build a `Step`, and `decodes` makes of it the function that the lab checks:
one token read at a position, with the keys and values of the tokens before it. measure.py times the
steps themselves.

Shapes   token and context: numbers; k_cache, v_cache [L, S, H_kv, D] with `context` rows in use
         -> logits [V], and keys and values of context + 1 tokens [L, context + 1, H_kv, D]
Cost     read every weight once, the embedding's rows as those of the LM head, and K and V of the
         context: bandwidth bound
"""

from __future__ import annotations

import labkit as lab
from labkit import bars
from labkit.exercise import patched

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from . import dispatch, gate, kernels, ledger
from .config import QWEN3_0_6B, ModelError, Qwen3Config
from .measure import TOKENS, cache_over, device_loops
from .naive import NaiveStep
from .peers import TransformersStep
from .reference import Cache
from .rungs import DynamicStep, ReferenceStep, StaticStep
from .start import EMBED_NORM, EXERCISE, embed_norm_fused
from .step import DecodeStep, OpsStep, Step
from .weights import STD, Model, cast, random_model, tensor_shapes

MOST_FETCHED = 16 * 2**20  # bytes that L2 fetches of the head, which would not fit
ROOM = TOKENS + 8  # slots after the context: those of a loop, and a few
# For tests. On a GPU the smallest that all kernels take; the simulators need a smaller one.
TEST = Qwen3Config(
    vocab_size=67 if lab.SIMULATED else 301,
    hidden_size=32 if lab.SIMULATED else 256,
    intermediate_size=48 if lab.SIMULATED else 512,
    num_hidden_layers=1,
    num_attention_heads=4 if lab.SIMULATED else 8,
    num_key_value_heads=2 if lab.SIMULATED else 4,
    head_dim=16 if lab.SIMULATED else 64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    dtype="bfloat16",
)

# Problem -------------------------------------------------------------------------------------


def config_of(layers: int | None) -> Qwen3Config:
    """Qwen3-0.6B's shape, or with `layers` a small one for tests."""
    return QWEN3_0_6B if layers is None else replace(TEST, num_hidden_layers=layers)


@lru_cache(maxsize=2)
def model_of(dtype: torch.dtype, layers: int | None = None) -> Model:
    """Random weights of the exact shape; in tests, with products of size one."""
    model = random_model(config_of(layers), dtype=dtype)
    if layers is not None:
        matrices = [model.embed] + [w for x in model.layers for w in vars(x).values() if w.ndim > 1]
        for w in matrices:
            w.mul_(1 / (STD * w.shape[1] ** 0.5))
    return model


def inputs(
    dtype: torch.dtype, seed: int = 0, *, context: int, layers: int | None = None
) -> tuple[Model, int, int, Tensor, Tensor]:
    """A model, a token, its position, and normal keys and values, in the slots not in use too."""
    model = model_of(dtype, layers)
    config = model.config
    shape = (config.num_hidden_layers, context + ROOM, config.num_key_value_heads, config.head_dim)
    k, v = lab.randn(shape, shape, dtype=dtype, seed=seed)
    return model, (seed + 1) % config.vocab_size, context, k, v


def decodes(build: Callable[[Model, Cache], Step]) -> Callable:
    """The function that reads one token with a step that `build` makes; it keeps `build`."""

    def one_step(
        model: Model, token: int, context: int, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            lab.check_tensors(dtypes=(torch.float64, *lab.FLOATS), **{name: x})
            if x.ndim != 4:
                raise ModelError(f"{name} has shape {tuple(x.shape)}, must be [L, S, H_kv, D]")
        step = build(model, cache_over(model, k_cache, v_cache))
        step.start(token, context)
        step.decode_many(1)
        return step.logits, *step.kept()

    one_step.__name__ = one_step.__qualname__ = build.__name__
    one_step.__doc__, one_step.build = build.__doc__, build
    return one_step


@decodes
def reference(model: Model, cache: Cache) -> Step:
    """Transformers' operations: reference.forward for one token, in the dtype of the cache."""
    return ReferenceStep(cast(model, cache.k.dtype), cache)


def work(dtype: torch.dtype, context: int, layers: int | None = None) -> lab.Work:
    """Every weight, K and V of the context; written are their new rows and the logits."""
    config = config_of(layers)
    shapes = tensor_shapes(config)
    if not config.tie_word_embeddings:
        del shapes["model.embed_tokens.weight"]  # of which a row is read, as of the tied one
    weights = sum(torch.Size(s).numel() for s in shapes.values())
    row = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    numbers = weights + config.hidden_size + 2 * (context + 1) * row + config.vocab_size
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return lab.Work(bytes=numbers * dtype.itemsize, flops=2 * weights + 4 * (context + 1) * heads)


def terms(context: int, layers: int | None = None) -> int:
    """Terms on the way to one logit: those of every product that one comes through."""
    c = config_of(layers)
    layer = 2 * c.hidden_size + c.num_attention_heads * c.head_dim + c.intermediate_size
    return c.num_hidden_layers * (layer + context + 1) + c.hidden_size


@decodes
def transformers_eager(model: Model, cache: Cache) -> Step:
    """Transformers, eager, with its DynamicCache and SDPA."""
    return TransformersStep(model, cache)


@decodes
def transformers_compiled(model: Model, cache: Cache) -> Step:
    """Transformers, its StaticCache, torch.compile with CUDA graphs."""
    return TransformersStep(model, cache, compiled=True)


def ledgers(log: Callable) -> list[dict]:
    """The byte ledger of each rung's step."""
    context = QWEN3_DECODE.bench_size["context"]
    model, _, _, k, v = inputs(torch.bfloat16, context=context)
    steps = ((r.name, r.fn.build(model, cache_over(model, k, v))) for r in DECODE)
    return ledger.recorded(steps, context, log)


def agreement(results) -> float:
    """The last rung's agreement in the gate, on the model where it is lower; 0 if it fails."""
    own = [g for g in results.data["model"]["gates"] if g["rung"] == "qwen3_decode_dependent"]
    return min(0.0 if g["opt_in"] else g["scores"]["agreement"] for g in own)


def first_token(results) -> float:
    """Time to the first token, without a plan or with it, over Transformers': the largest ratio."""
    rows = results.data["model"]["prefill"]["first_token"]
    theirs = {row["T"]: row["p50_s"] for row in rows if row["name"] == dispatch.TRANSFORMERS}
    return bars.three_digits(
        max(r["p50_s"] / theirs[r["T"]] for r in rows if r["name"] != dispatch.TRANSFORMERS)
    )


QWEN3_DECODE = lab.Problem(
    name="qwen3_decode",
    inputs=inputs,
    reference=reference,
    library=reference,
    work=work,
    terms=terms,
    dtypes=(torch.bfloat16,),
    # No token before it; one; the last slot of 128, for which the chain's attention has one block
    # in each head, and the first for which it has two, whose parts meet.
    test_sizes=(
        {"context": 0, "layers": 1},
        {"context": 1, "layers": 1},
        {"context": 127, "layers": 1},
        {"context": 128, "layers": 2},
        {"context": 5, "layers": 2},
    ),
    bench_size={"context": 512},
    sweep=tuple({"context": context} for context in (1, 512, 2048, 8192)),
    target=(
        bars.seconds("qwen3_decode_chained", 650e-6, dtype="bfloat16", context=512),
        bars.seconds("qwen3_decode_dependent", 550e-6, dtype="bfloat16", context=512),
        bars.seconds("qwen3_decode_dependent", 800e-6, dtype="bfloat16", context=8192),
        bars.ratio("qwen3_decode_dependent", "torch.compile", 0.2, dtype="bfloat16", context=512),
        lab.Bar(
            f"qwen3_decode_dependent passes the gate, with {gate.AGREEMENT:.0%} agreement "
            "(near-ties count)",
            agreement,
            at_least=gate.AGREEMENT,
        ),
        lab.Bar(
            "the first token takes no longer than with Transformers, at any length of the prompt, "
            "with a plan for it or without",
            first_token,
            at_most=1.0,
        ),
    ),
    peers={"Transformers": transformers_eager, "torch.compile": transformers_compiled},
    mutates=("k_cache", "v_cache"),
    ceiling="read",
    measure=device_loops,
    facts={
        "gates": lambda log: gate.recorded(DECODE, model_of(torch.bfloat16), log),
        "ledger": ledgers,
        "prefill": lambda log: dispatch.recorded(model_of(torch.bfloat16), log),
    },
)


# Rungs ---------------------------------------------------------------------------------------


def captured(step: Step) -> Step:
    """The same step, in a CUDA graph."""
    step.capture()
    return step


@decodes
def qwen3_decode_naive(model: Model, cache: Cache) -> Step:
    """The first rung of every chapter, one launch an operation."""
    return NaiveStep(model, cache)


@decodes
def qwen3_decode_dynamic(model: Model, cache: Cache) -> Step:
    """Plain torch: cuBLAS and SDPA, a cache that is copied whole to grow by a row."""
    return DynamicStep(model, cache)


@decodes
def qwen3_decode_static(model: Model, cache: Cache) -> Step:
    """A cache of fixed size, written in place: nothing in a step depends on Python any more."""
    return StaticStep(model, cache)


@decodes
def qwen3_decode_static_graph(model: Model, cache: Cache) -> Step:
    """So a CUDA graph can hold it: the same kernels, launched without Python."""
    return captured(StaticStep(model, cache))


@decodes
def qwen3_decode_fused(model: Model, cache: Cache) -> Step:
    """The last rungs of the chapters: each does in one launch what took several."""
    return OpsStep(model, cache)


@decodes
def qwen3_decode_fused_graph(model: Model, cache: Cache) -> Step:
    """The same in a CUDA graph: now the kernels' own time is left."""
    return captured(OpsStep(model, cache))


@decodes
def qwen3_decode_chained(model: Model, cache: Cache) -> Step:
    """Kernels written for this chain: norms join the products they feed, five launches a layer."""
    return captured(DecodeStep(model, cache))


@decodes
def qwen3_decode_dependent(model: Model, cache: Cache) -> Step:
    """Dependent launch: a kernel has its weights on the way while the one before it still works."""
    return captured(DecodeStep(model, cache, dependent=True))


# Attempts not kept ---------------------------------------------------------------------------


def chain_with(model: Model, cache: Cache, patches: Mapping[str, str]) -> DecodeStep:
    """The last rung's step, from a patched text, not yet captured."""
    text = patched(kernels.SOURCE, patches, "attempt")

    def cuda_kernel(name: str, **options):
        return lab.cuda_kernel(text, name, options=options)

    with patch.object(kernels, "cuda_kernel", cuda_kernel):
        return DecodeStep(model, cache, dependent=True)


@decodes
def qwen3_decode_late(model: Model, cache: Cache) -> Step:
    """Every kernel lets the next one start when it has waited itself, not before."""
    head = "template <bool EARLY> __device__ void previous_kernel() {\n"
    late = head.replace("<bool EARLY>", "<bool>") + "    constexpr bool EARLY = false;\n"
    return captured(chain_with(model, cache, {head: late}))


@decodes
def qwen3_decode_evicting(model: Model, cache: Cache) -> Step:
    """Weights are marked as the first that L2 shall give up."""
    load = 'asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"'
    policy = (
        "unsigned long long policy;\n"
        '    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));\n'
    )
    hinted = load.replace("no_allocate", "no_allocate.L2::cache_hint").replace("[%4]", "[%4], %5")
    end = '"l"(from) : "memory");\n    return v;'
    more = end.replace("(from)", '(from), "l"(policy)')
    return captured(chain_with(model, cache, {load: f"{policy}    {hinted}", end: more}))


@decodes
def qwen3_decode_roomy(model: Model, cache: Cache) -> Step:
    """`o` and `down` with fewer registers: beside a block of `gate_up` there is room for two."""
    old = "__launch_bounds__(32 * WARPS, 2) gemv_residual_kernel"
    return captured(chain_with(model, cache, {old: old.replace(", 2)", ", 5)")}))


@decodes
def qwen3_decode_fetching(model: Model, cache: Cache) -> Step:
    """While they wait, `o` and `down` have L2 fetch the weights of the kernel that follows."""
    head, wait = "const uint4* w, bf16* x) {", "column + i * STEP);\n    previous_kernel<true>();"
    fetch = """
        #if __CUDA_ARCH__ >= 900
        if (tx == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                                  :: "l"(next + (long long)blockIdx.x * bytes), "r"(bytes));
        #endif
    """
    patches = {
        head: head.replace(")", ", const char* next, int bytes)"),
        wait: wait.replace("\n", fetch),
    }
    step = chain_with(model, cache, patches)
    sequence = list(step.sequence)
    for i, (now, following) in enumerate(pairwise(sequence)):
        if now.kernel.name.startswith("gemv_residual"):
            w = following.args[2]
            bytes = min(w.nbytes, MOST_FETCHED) // now.grid[0] // 16 * 16  # of a block
            sequence[i] = now._replace(args=(*now.args, w, np.int32(bytes)))
    step.sequence = tuple(sequence)
    return captured(step)


DECODE = lab.Ladder(
    problem=QWEN3_DECODE,
    rungs=(
        lab.Rung(qwen3_decode_naive, "numba"),
        lab.Rung(qwen3_decode_dynamic, "torch"),
        lab.Rung(qwen3_decode_static, "torch"),
        lab.Rung(qwen3_decode_static_graph, "torch", simulates=False),
        lab.Rung(qwen3_decode_fused, "triton"),
        lab.Rung(qwen3_decode_fused_graph, "triton", simulates=False),
        lab.Rung(qwen3_decode_chained, "cuda", simulates=False),
        lab.Rung(qwen3_decode_dependent, "cuda", simulates=False),
    ),
    rejected=(
        lab.Rejected(
            qwen3_decode_late,
            against="qwen3_decode_dependent",
            attempt="each kernel lets the next one start only when it has waited itself",
            expected="a kernel that starts at once asks for its weights before the one ahead has "
            "its input, which then waits behind them: 3 % less time without",
            cause="In the machine code only the place of the trigger differs: registers are the "
            "same, and so are the loads before the wait. What differs is when they begin: "
            "not when the kernel before starts, but when that one has its input. The head "
            "start is worth more than the place in the queue that it costs.",
        ),
        lab.Rejected(
            qwen3_decode_evicting,
            against="qwen3_decode_dependent",
            attempt="weights marked as the first that L2 shall give up",
            expected="a weight is used once a token, and pushes x, keys and values out of L2: "
            "2 % less time without",
            cause="In the machine code the loads of weights are the same, with the mark, and "
            "registers are the same. Before the first of them stand a few instructions that "
            "make the mark. Nothing was won by it. Why it costs time is not known.",
        ),
        lab.Rejected(
            qwen3_decode_roomy,
            against="qwen3_decode_dependent",
            attempt="o and down with so few registers that both blocks of down find room in an SM "
            "beside the one of gate_up",
            expected="down gains least by dependent launch because its second block starts late: "
            "less time for it",
            cause="48 registers hold a row's weights and half of the input, 56 all. So in the "
            "machine code only three of the input's six loads follow the wait at once; the "
            "others come as registers get free. The next kernel waits for all of that. What "
            "room alone would do, this does not tell.",
        ),
        lab.Rejected(
            qwen3_decode_fetching,
            against="qwen3_decode_dependent",
            attempt="before they wait, o and down have L2 fetch the weights of the next kernel",
            expected="gate_up's weights come while attention leaves memory idle: 9 % less time",
            cause="Not known: a profiler, which could count, runs kernels one after the other. A "
            "guess: what is fetched for later stands before what a kernel waits for now.",
        ),
    ),
)
"""The rungs of a whole step. The reader's exercise, the kernel that starts it, comes after them."""

LADDER = replace(
    DECODE,
    rungs=(*DECODE.rungs, lab.Rung(embed_norm_fused, "triton", problem=EMBED_NORM)),
    exercises=(EXERCISE,),
)
