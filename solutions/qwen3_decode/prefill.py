"""Prefill: a whole prompt at once, by a plan for its exact number of tokens.

What is computed is reference.forward's, with scaled_dot_product_attention for attention. For each
part of it there are several candidates, the first of them plain torch. A `Plan` says which to take
for T tokens. dispatch.py makes it, from times measured inside the whole model:

    plan = dispatch.tune(model, 512)
    prefill = Prefill(model, cache, [plan])
    logits = prefill(tokens)               # by the plan if these are 512 tokens, else plain torch

Rounding. Every candidate rounds where the reference does, and adds up in an order of its own. In
plain torch only attention does: SDPA's kernels keep its weights in float32, too.

Shapes   tokens [T] int64 -> logits [V] after the last of them; the cache is reference.py's
Cost     every weight once; 2 FLOPs for each weight and token, and T²/2 products in each head
"""

from __future__ import annotations

import labkit as lab
from labkit.bench import captured

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from solutions import gemv, rms_norm, rope, swiglu

from .config import ModelError, Qwen3Config
from .reference import Cache
from .step import Packed, packed
from .weights import Layer, Model

# Part -> candidates. The first is plain torch, with one product for each matrix of the model;
# "joined" makes one of those that share their input. A graph comes first in the order of trials:
# with it, the parts after it are judged by the GPU's time, without it by the host's too.
CHOICES = {
    "launch": ("eager", "graph"),
    "qkv": ("apart", "joined", "gemv"),
    "norm": ("torch", "rms_norm_residual"),
    "rotation": ("torch", "qk_norm_rope_cache"),
    "attention": ("sdpa", "sdpa_cudnn"),
    "o": ("linear", "gemv"),
    "gate_up": ("apart", "joined", "swiglu", "gate_up_swiglu_prefill"),
    "down": ("linear", "gemv"),
    "head": ("linear", "gemv"),
}
PRODUCTS = {"linear": linear, "joined": linear, "gemv": gemv.gemv}
JOINED = {"qkv": ("joined", "gemv"), "gate_up": ("joined", "gate_up_swiglu_prefill")}


@dataclass(frozen=True)
class Tried:
    """One trial: a candidate for a part in place of what the plan had, inside the whole model."""

    part: str
    shape: Mapping[str, int]
    candidate: str
    before_s: float | None  # median time to the first token; None if it was not timed
    after_s: float | None
    margin: float | None  # fraction of `before_s` that it had to save
    kept: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """How a prompt of T tokens is computed, and what was tried. ValueError for an unknown choice.

    T None is for any length.
    """

    T: int | None = None
    launch: str = "eager"
    qkv: str = "apart"
    norm: str = "torch"
    rotation: str = "torch"
    attention: str = "sdpa"
    o: str = "linear"
    gate_up: str = "apart"
    down: str = "linear"
    head: str = "linear"
    tried: tuple[Tried, ...] = ()

    def __post_init__(self) -> None:
        """Check every choice."""
        for part, known in CHOICES.items():
            if getattr(self, part) not in known:
                raise ValueError(f"plan: {part}={getattr(self, part)!r} is not one of {known}")
        if self.launch == "graph" and self.T is None:
            raise ValueError("plan: launch='graph' holds one number of tokens, and T is None")

    @property
    def joins(self) -> bool:
        """Whether it reads projections that were joined."""
        return any(getattr(self, part) in choices for part, choices in JOINED.items())

    def as_json(self) -> dict:
        """Plain data, for the results."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping) -> Plan:
        """The plan that `as_json` made this of."""
        return cls(**{**data, "tried": tuple(Tried(**row) for row in data["tried"])})

    def table(self) -> lab.Table:
        """What was tried, in order."""
        columns = ("part", "shape", "candidate", "before", "after", "verdict")
        rows = []
        for t in self.tried:
            shape = " ".join(f"{k}={v:,}" for k, v in t.shape.items())
            times = ("–" if s is None else lab.microseconds(s) for s in (t.before_s, t.after_s))
            verdict = f"{'kept' if t.kept else 'dropped'}: {t.why}"
            rows.append((t.part, shape, t.candidate, *times, verdict))
        return lab.Table(columns, tuple(rows))


PLAIN = Plan()


# The forward pass ------------------------------------------------------------------------------


def prefill(
    model: Model, tokens: Int64[Tensor, " T"], cache: Cache, plan: Plan = PLAIN
) -> Float[Tensor, " V"]:
    """Logits after the last of T tokens, which stand at positions 0 … T - 1; fills the cache.

    For one prompt: projections are joined, and a graph is captured, in each call. `Prefill` keeps
    them. ModelError for no tokens, too many for the cache, or another number than the plan's.
    """
    if plan.T not in (None, len(tokens)):
        raise ModelError(f"the plan is for {plan.T} tokens, and these are {len(tokens)}")
    return Prefill(model, cache, [replace(plan, T=len(tokens))])(tokens)


class Prefill:
    """Prompts into one cache, each by the plan for its exact length, or in plain torch.

    Keeps what plans need from prompt to prompt: joined projections (`layers`, if a step has them
    already) and a CUDA graph for each plan that wants one.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        plans: Iterable[Plan] = (),
        layers: Sequence[Packed] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.plans = {plan.T: plan for plan in plans}
        if layers is None and any(plan.joins for plan in self.plans.values()):
            layers = tuple(map(packed, model.layers))
        self.layers = layers
        self.graphs: dict[int, tuple] = {}

    @torch.no_grad()
    def __call__(self, tokens: Int64[Tensor, " T"]) -> Float[Tensor, " V"]:
        """Logits after the last token. ModelError for no tokens, or more than the cache has room.

        Returns as soon as all is launched.
        """
        T, S = len(tokens), self.cache.k.shape[1]
        if not 1 <= T <= S:
            raise ModelError(f"a prompt of {T} tokens; the cache has {S} slots")
        plan = self.plans.get(T, PLAIN)
        if plan.launch == "eager":
            return self._run(plan, tokens)
        if T not in self.graphs:
            self.graphs[T] = self._capture(plan, tokens)
        graph, held, logits = self.graphs[T]
        held.copy_(tokens)
        graph.replay()
        return logits.clone()  # the graph's own memory is written again for the next prompt

    def _capture(self, plan: Plan, tokens: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """A graph of the prompt's launches, the tokens that it reads, the logits that it writes."""
        if not tokens.is_cuda:
            raise RuntimeError("a CUDA graph needs a GPU")
        held = tokens.clone()
        logits = self.model.head.new_empty(len(self.model.head))
        graph = captured(lambda: logits.copy_(self._run(plan, held)), [()])
        return graph, held, logits

    def _run(self, plan: Plan, tokens: Tensor) -> Tensor:
        config, cache, T = self.model.config, self.cache, len(tokens)
        eps, ours = config.rms_norm_eps, plan.norm != "torch"
        positions = torch.arange(T, device=tokens.device)
        turn = cos_and_sin(cache.cos_sin[:T], cache.k.dtype)
        x = embedding(tokens, self.model.embed)  # [T, hidden]
        first = self.model.layers[0].input_norm
        h = (rms_norm.rms_norm if ours else rms_norm.library)(x, first, eps)
        gains = *(w.input_norm for w in self.model.layers[1:]), self.model.norm
        for i, w in enumerate(self.model.layers):
            both, k_cache, v_cache = self.layers and self.layers[i], cache.k[i], cache.v[i]
            q, k, v = qkv_of(h, w, both, config, plan.qkv)
            if plan.rotation == "torch":
                q = rope.norm(q, w.q_norm, eps)
                q, k = turned(q, turn), turned(rope.norm(k, w.k_norm, eps), turn)
                k_cache[:T], v_cache[:T] = k, v
            else:
                where = cache.cos_sin, positions, k_cache, v_cache, positions
                q, *_ = rope.qk_norm_rope_cache(q, k, v, w.q_norm, w.k_norm, *where, eps)
            o = attention(q, k_cache[:T], v_cache[:T], plan.attention)
            h, x = add_and_norm(PRODUCTS[plan.o](o, w.o), x, w.post_norm, eps, ours)
            y = gate_up_of(h, w, both, plan.gate_up)
            h, x = add_and_norm(PRODUCTS[plan.down](y, w.down), x, gains[i], eps, ours)
        return PRODUCTS[plan.head](h[-1:], self.model.head)[0]


def cos_and_sin(table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both of chapter 04's table, for every column of a head: [T, 1, D]. Once for all layers."""
    cos, sin = table.to(dtype).chunk(2, dim=1)
    return cos.repeat(1, 2)[:, None], sin.repeat(1, 2)[:, None]


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """The rotation as Transformers rounds it."""
    return x * turn[0] + rope.rotate_half(x) * turn[1]


def qkv_of(
    h: Tensor, w: Layer, both: Packed | None, config: Qwen3Config, how: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, H_kv, D]; joined, they are parts of one matrix."""
    T, D, H_kv = len(h), config.head_dim, config.num_key_value_heads
    if how == "apart":
        return tuple(linear(h, x).view(T, -1, D) for x in (w.q, w.k, w.v))
    heads = config.num_attention_heads, H_kv, H_kv
    return PRODUCTS[how](h, both.qkv).view(T, -1, D).split(heads, dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """Causal attention: q [T, H, D], k and v [T, H_kv, D] -> [T, H·D]."""
    (T, H, _), H_kv = q.shape, k.shape[1]
    cudnn = how == "sdpa_cudnn"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext():
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H_kv != H)
    return o[0].transpose(0, 1).reshape(T, -1)


def add_and_norm(
    y: Tensor, x: Tensor, gain: Tensor, eps: float, ours: bool
) -> tuple[Tensor, Tensor]:
    """The norm of x + y, and the sum."""
    if ours:
        return rms_norm.rms_norm_residual(y, x, gain, eps)
    x = x + y
    return rms_norm.library(x, gain, eps), x


def gate_up_of(h: Tensor, w: Layer, both: Packed | None, how: str) -> Tensor:
    """silu(gate) · up of h: [T, intermediate]."""
    if how == "gate_up_swiglu_prefill":
        return swiglu.gate_up_swiglu_prefill(h, both.gate_up)
    if how == "joined":
        return swiglu.library(*linear(h, both.gate_up).chunk(2, dim=1))
    op = swiglu.swiglu if how == "swiglu" else swiglu.library
    return op(linear(h, w.gate), linear(h, w.up))
