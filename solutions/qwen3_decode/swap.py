"""Swap-in: the reader's own op in place of ours, inside the model.

    print(swap(model, prompt_tokens, "rms_norm", my_rms_norm))

`swap` decodes the same prompt twice with OpsStep: with the chapters' ops, and with one of them
replaced, by its name. The first token is looked at layer by layer: where does the
residual stream part? Then the texts: at which token? On a GPU, also: what does it cost?

Under the simulators `fn` runs as it is, and the slow ones of our ops do not: the chapters' library
functions stand in for them.

Rounding is no fault. As everywhere in the lab, twice the error of ours is allowed, against the
reference in float64, and what sums in float32 in another order may differ by. In bfloat16 that
hides small faults, such as a missing eps: look in float32, too.

The step calls six ops, OPS. The others of chapters 01 to 11 are parts of these: `inside` puts them
there, with torch for the rest, in both runs. So for "rms_norm" all norms of the residual stream are
launches of their own, and all are the reader's. For "paged_kv" the cache is cut into pages, which
are stored backwards. Ops for quantised weights are not there: this model has none; and
`vector_add_silu` is not: no step of the model is that.
"""

from __future__ import annotations

import labkit as lab

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from solutions import (
    decode_attention,
    gemv,
    paged_kv,
    rms_norm,
    rope,
    softmax,
    swiglu,
    vector_add,
)

from .config import ModelError
from .measure import loop
from .reference import Cache, forward, new_cache
from .step import OPS, OpsStep
from .weights import Model, cast

ROUNDS = 5  # timed texts of each version, one after the other
PAGE = 16  # slots
# Under the simulators these ops take seconds a token or do not run, and the library's functions
# take next to nothing.
STAND_INS = {
    "gemv": gemv.library,
    "gate_up_swiglu": swiglu.projection_library,
    "gate_up_swiglu_prefill": swiglu.projection_library,
    "decode_attention": decode_attention.library,
    "softmax": softmax.library,
    "paged_kv": paged_kv.library,
}
STAND_INS = STAND_INS if lab.SIMULATED else {}
OURS = {
    "rms_norm": rms_norm.rms_norm,
    **OPS,
    "vector_add": vector_add.vector_add,
    "softmax": softmax.softmax,
    "softmax_masked": softmax.softmax_masked,
    "rope": rope.rope,
    "swiglu": swiglu.swiglu,
    "gate_up_swiglu_prefill": swiglu.gate_up_swiglu_prefill,
    "paged_kv": paged_kv.paged_kv,
    "paged_kv_write": paged_kv.paged_kv_write,
    **STAND_INS,
}


@dataclass(frozen=True)
class Swapped:
    """What changed when `name` was replaced. The last difference is that of the logits.

    `differences[i]` is max |theirs - ours| of the residual stream after layer i, for the first
    token; above `allowed[i]`, it is more than rounding. `seconds` are those of one token with ours
    and with theirs, both eager; None without a GPU.
    """

    name: str
    dtype: str
    differences: tuple[float, ...]
    allowed: tuple[float, ...]
    ours: tuple[int, ...]  # tokens
    theirs: tuple[int, ...]
    seconds: tuple[float, float] | None

    @property
    def first_layer(self) -> int | None:
        """The first layer after which the outputs part; the number of layers is the head."""
        for i, (got, allowed) in enumerate(zip(self.differences, self.allowed, strict=True)):
            if not got <= allowed:  # NaN parts, too
                return i
        return None

    @property
    def first_token(self) -> int | None:
        """Number of the first token, from 0, at which the texts part."""
        for i, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            if ours != theirs:
                return i
        return None

    def __repr__(self) -> str:
        """A few lines of text."""
        at, count = self.first_layer, len(self.ours)
        lines = [f"{self.name}: yours in place of ours, in {self.dtype}"]
        if at is None:
            share = max(d / a for d, a in zip(self.differences, self.allowed, strict=True))
            lines.append(f"  outputs: the same in all layers ({share:.2g} of the allowed error)")
        else:
            where = f"layer {at}" if at < len(self.differences) - 1 else "the head"
            size = f"{self.differences[at]:.2g}, {self.allowed[at]:.2g} allowed"
            lines.append(f"  outputs: part in {where} (difference {size})")
        first = self.first_token
        if first is None:
            lines.append(f"  text: the same {count} tokens")
        else:
            ours, theirs = self.ours[first], self.theirs[first]
            lines.append(f"  text: parts at token {first + 1} of {count}: {theirs} for {ours}")
            if at is None:
                lines.append("        by rounding, or by what the first token does not show")
        if self.seconds:
            ours, theirs = map(lab.microseconds, self.seconds)
            lines.append(f"  time: {theirs} a token with yours, {ours} with ours, both eager")
        return "\n".join(lines)

    def table(self) -> lab.Table:
        """The difference after each layer, and what is allowed."""
        places = [*map(str, range(len(self.differences) - 1)), "head"]
        rows = zip(places, self.differences, self.allowed, strict=True)
        lines = [(at, f"{d:.2g}", f"{a:.2g}", "no" if d <= a else "yes") for at, d, a in rows]
        return lab.Table(("after layer", "max difference", "allowed", "parts"), tuple(lines))


def swap(
    model: Model, prompt_tokens: Sequence[int], name: str, fn: Callable, tokens: int = 32
) -> Swapped:
    """Decode `tokens` tokens after a prompt, with our op `name` and with `fn` in its place.

    `fn` takes what our op takes, and returns what that returns; contexts before the last token of
    the prompt come from reference.forward. ValueError for a name that is not in OURS and for
    results of another form than ours; RuntimeError that says in which layer `fn` failed;
    ModelError for a prompt that is empty or not of the vocabulary, where prompt and tokens are more
    than the model's positions, and under the simulators for a dtype but float32.
    """
    if name not in OURS:
        raise ValueError(f"op name={name!r} is not one of: {', '.join(OURS)}")
    if lab.SIMULATED and model.embed.dtype != torch.float32:
        raise ModelError(f"the simulators compute in float32, the model is in {model.embed.dtype}")
    if not len(prompt_tokens) or tokens < 1:
        raise ModelError(f"a prompt of {len(prompt_tokens)} and {tokens} tokens: one at least")
    for token in map(int, prompt_tokens):
        if not 0 <= token < model.config.vocab_size:
            raise ModelError(f"{token=} is outside the vocabulary of {model.config.vocab_size}")
    prompt = torch.tensor(list(map(int, prompt_tokens)), device=model.embed.device)
    before, device = len(prompt) - 1, prompt.device
    cache = new_cache(model.config, before + tokens, model.embed.dtype, device)
    if before:
        forward(model, prompt[:-1], cache, last=1)

    def started(ops) -> OpsStep:
        step = OpsStep(model, Cache(cache.k.clone(), cache.v.clone(), cache.cos_sin), ops=ops)
        step.start(prompt[-1], before)
        return step

    ours = Watch(name, OURS[name])
    theirs = Watch(name, fn, ours.forms)
    texts, places = zip(*(watch.decode(started, tokens) for watch in (ours, theirs)), strict=True)
    truth: list[Tensor] = []
    copy = Cache(*(x.double() for x in cache))
    logits = forward(cast(model, torch.float64), prompt[-1:], copy, before, seen=truth)
    truth.append(logits)
    slack = (1 + math.sqrt(model.config.hidden_size)) * torch.finfo(torch.float32).eps
    allowed = tuple(
        2 * largest(mine.double() - true) + slack * largest(true)
        for mine, true in zip(places[0], (x[0] for x in truth), strict=True)
    )
    seconds = None
    if device.type == "cuda":
        steps = [started(inside(name, f)) for f in (OURS[name], fn)]
        token = int(prompt[-1])
        rounds = [[loop(s, token, before, tokens) for s in steps] for _ in range(ROUNDS)]
        seconds = tuple(map(statistics.median, zip(*rounds, strict=True)))
    differences = (largest(a.double() - b.double()) for a, b in zip(*places, strict=True))
    dtype = str(model.embed.dtype).removeprefix("torch.")
    return Swapped(name, dtype, tuple(differences), allowed, *texts, seconds)


def inside(name: str, fn: Callable) -> dict[str, Callable]:
    """What OpsStep needs for `fn` to be the op `name`: the ops that it is a part of."""
    if name in OPS:
        return {name: fn}
    if name in ("rms_norm", "vector_add"):
        norm = fn if name == "rms_norm" else rms_norm.rms_norm
        add = fn if name == "vector_add" else torch.add

        def looked_up(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor, eps: float):
            x = embed[tokens[position]]
            return norm(x, w, eps), x

        def added(x: Tensor, residual: Tensor, w: Tensor, eps: float):
            x = add(x[0], residual[0])[None]
            return norm(x, w, eps), x

        return {"embed_norm": looked_up, "rms_norm_residual": added}
    if name in ("rope", "paged_kv_write"):
        turn = fn if name == "rope" else rope.library

        def cached(q, k, v, q_norm, k_norm, cos_sin, positions, k_cache, v_cache, slots, eps):
            q, k = rope.norm(q, q_norm, eps), rope.norm(k, k_norm, eps)
            q, k = turn(q, k, cos_sin, positions)
            if name == "rope":
                return rope.stored(q, k, v, k_cache, v_cache, slots.long())
            fn(k, v, k_cache[None], v_cache[None], slots)  # one page of all slots
            return q, k_cache, v_cache

        return {"qk_norm_rope_cache": cached}
    if name == "gate_up_swiglu_prefill":  # takes one token, too
        return {"gate_up_swiglu": fn}
    if name == "swiglu":
        return {"gate_up_swiglu": lambda h, w: fn(*(linear(h, part) for part in w.chunk(2)))}
    if name == "paged_kv":
        return {"decode_attention": partial(from_pages, fn)}
    return {"decode_attention": partial(with_scores, fn, name == "softmax_masked")}


def from_pages(fn: Callable, q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """Attention by `fn` of q [1, H, D] over pages, which k and v [1, S, H_kv, D] are cut into."""
    count = -(-k.shape[1] // PAGE)
    room = 0, 0, 0, 0, 0, count * PAGE - k.shape[1]
    pages = (pad(x[0], room).unflatten(0, (count, PAGE)).flip(0) for x in (k, v))
    table = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=q.device)[None]
    return fn(q, *pages, table, context_lens)


def with_scores(
    fn: Callable, masked: bool, q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor
) -> Tensor:
    """Attention of q [1, H, D] over k and v [1, S, H_kv, D]; the softmax of the scores is `fn`.

    With `masked`, it gets the scores of all slots and a mask, or else those of the context alone.
    """
    H, D = q.shape[1:]
    k, v = (x[0].repeat_interleave(H // x.shape[2], dim=1) for x in (k, v))  # [S, H, D]
    scores = (q[0][:, None] * k.transpose(0, 1)).sum(2) * D**-0.5  # [H, S]
    if masked:
        p = fn(scores, (torch.arange(len(k), device=q.device) < context_lens).repeat(H, 1))
    else:  # Python waits for the length: these steps are never captured
        p = pad(fn(scores[:, : int(context_lens)].contiguous()), (0, len(k) - int(context_lens)))
    return (p[..., None] * v.transpose(0, 1)).sum(1)[None]


def largest(x: Tensor) -> float:
    """max |x|; NaN if there is one."""
    return float(x.abs().max())


class Watch:
    """An op that says in which layer it failed, and notes in `forms` what its calls returned.

    If `wanted` is given, they must return the same.
    """

    def __init__(self, name: str, fn: Callable, wanted: Sequence[str] | None = None) -> None:
        self.name, self.fn, self.wanted = name, fn, wanted
        self.forms: list[str] = []

    def decode(
        self, started: Callable[..., OpsStep], tokens: int
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        """A text, and of its first token the residual stream after each layer, and the logits."""
        stand_ins = {name: fn for name, fn in STAND_INS.items() if name in OPS}
        self.step = started({**stand_ins, **inside(self.name, self)})
        text, places = [], []
        for _ in range(tokens):
            self.step.residuals = []  # their number says which layer is at work
            text += self.step.decode_many(1).tolist()
            places = places or [*self.step.residuals, self.step.logits.clone()]
        return tuple(text), places

    def __call__(self, *args):
        """The op."""
        layer, layers = len(self.step.residuals), self.step.model.config.num_hidden_layers
        where = f"{self.name} in " + (f"layer {layer}" if layer < layers else "the head")
        try:
            result = self.fn(*args)
        except Exception as why:
            raise RuntimeError(f"{where} failed: {type(why).__name__}: {why}") from why
        form = ", ".join(map(form_of, lab.outputs(result)))
        if self.wanted and form != self.wanted[len(self.forms)]:
            raise ValueError(f"{where} returned {form}, must return {self.wanted[len(self.forms)]}")
        self.forms.append(form)
        return result


def form_of(value: object) -> str:
    """Dtype and shape of a tensor, or what else it is."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
