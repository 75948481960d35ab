"""Swap-in: the reader's own op in place of ours, inside the model.

    print(swap(model, prompt_tokens, "rms_norm", my_rms_norm))

`swap` decodes the same prompt twice with OpsStep: with the chapters' ops, and with one of them
replaced, by its name in step.OPS. The first token is looked at layer by layer: where does the
residual stream part? Then the texts: at which token? On a GPU, also: what does it cost?

Under the simulators `fn` runs as it is, and the slow ones of our ops do not: the chapters' library
functions stand in for them.

Rounding is no fault. As everywhere in the lab, twice the error of ours is allowed, against the
reference in float64, and what sums in float32 in another order may differ by. In bfloat16 that
hides small faults, such as a missing eps: look in float32, too.

The model norms the residual stream 2·L + 1 times for a token, and all but the first of these norms
are fused with a sum. For "rms_norm", that sum is a launch of its own in both runs, so all norms are
the reader's.
"""

from __future__ import annotations

import labkit as lab

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from solutions import _decode_attention, gemv, rms_norm, swiglu

from .config import ModelError
from .reference import Cache, forward, layer_forward, new_cache
from .step import OPS, OpsStep
from .weights import Layer, Model

ROUNDS = 5  # timed texts of each version, one after the other
# Under the simulators these ops take seconds a token, and the library's functions next to nothing.
STAND_INS = {
    "gemv": gemv.library,
    "gate_up_swiglu": swiglu.projection_library,
    "decode_attention": _decode_attention.library,
}
OURS = {**OPS, **(STAND_INS if lab.SIMULATED else {})}


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
            lines.append(f"  outputs: the same in all layers, to {share:.2g} of what is allowed")
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

    `fn` takes what OpsStep gives to the op, and returns what the op returns; contexts before the
    last token of the prompt come from reference.forward. ValueError for a name that is not in
    step.OPS and for results of another form than ours; RuntimeError that says in which layer `fn`
    failed; ModelError for a prompt that is empty or not of the vocabulary, where prompt and tokens
    are more than the model's positions, and under the simulators for a dtype but float32.
    """
    if name not in OPS:
        raise ValueError(f"op name={name!r} is not one of: {', '.join(OPS)}")
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

    layers = model.config.num_hidden_layers
    ours = Watch(name, OURS[name], layers)
    theirs = Watch(name, fn, layers, ours.forms)
    texts, places = [], []
    for watch in (ours, theirs):
        step = started(watch.ops())
        text = step.decode_many(1).tolist()
        places.append([*watch.residuals, step.logits.clone()])
        texts.append(tuple(text + step.decode_many(tokens - 1).tolist()))
    truth = list(true_places(model, cache, prompt[-1:], before))
    slack = (1 + math.sqrt(model.config.hidden_size)) * torch.finfo(torch.float32).eps
    allowed = tuple(
        2 * largest(mine.double() - true) + slack * largest(true)
        for mine, true in zip(places[0], truth, strict=True)
    )
    seconds = None
    if device.type == "cuda":
        seconds = timed([started(replaced(name, f)) for f in (OURS[name], fn)], before, tokens)
    differences = (largest(a.double() - b.double()) for a, b in zip(*places, strict=True))
    dtype = str(model.embed.dtype).removeprefix("torch.")
    return Swapped(name, dtype, tuple(differences), allowed, *texts, seconds)


def replaced(name: str, fn: Callable) -> dict[str, Callable]:
    """What OpsStep needs for `fn` to be the op `name`."""

    def apart(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + residual
        return fn(x, w, eps), x

    return {name: fn, "rms_norm_residual": apart} if name == "rms_norm" else {name: fn}


def largest(x: Tensor) -> float:
    """max |x|; NaN if there is one."""
    return float(x.abs().max())


def true_places(model: Model, cache: Cache, token: Tensor, position: int) -> Iterator[Tensor]:
    """The residual stream after each layer, then the logits, in float64 [hidden] and [V]."""
    x, table = model.embed[token].double(), cache.cos_sin.double()
    for w, k, v in zip(model.layers, cache.k, cache.v, strict=True):
        w = Layer(**{field: tensor.double() for field, tensor in vars(w).items()})
        with torch.no_grad():
            x = layer_forward(model.config, w, x, k.double(), v.double(), table, position)
        yield x[0]
    h = rms_norm.library(x, model.norm.double(), model.config.rms_norm_eps)
    yield linear(h, model.head.double())[0]


class Watch:
    """Ops of an OpsStep that know where they are, and keep the first token's residual stream.

    `forms` says what each call of `fn` returned; if `wanted` is given, it must be the same.
    """

    def __init__(
        self, name: str, fn: Callable, layers: int, wanted: Sequence[str] | None = None
    ) -> None:
        self.name, self.fn, self.layers, self.wanted = name, fn, layers, wanted
        self.forms: list[str] = []
        self.residuals: list[Tensor] = []  # [hidden] after each layer
        self.sums = 0  # of this token so far, two a layer

    def ops(self) -> dict[str, Callable]:
        """What OpsStep takes."""
        ops = {**OURS, **replaced(self.name, self._guarded)}
        first, add = ops["rms_norm"], ops["rms_norm_residual"]

        def rms_norm(*args) -> Tensor:
            self.sums = 0  # a token begins with it
            return first(*args)

        def rms_norm_residual(*args) -> tuple[Tensor, Tensor]:
            h, x = add(*args)
            self.sums += 1
            if self.sums % 2 == 0 and len(self.residuals) < self.layers:
                self.residuals.append(x[0].clone())
            return h, x

        return {**ops, "rms_norm": rms_norm, "rms_norm_residual": rms_norm_residual}

    def _guarded(self, *args):
        layer = self.sums // 2
        where = (
            f"{self.name} in layer {layer}" if layer < self.layers else f"{self.name} in the head"
        )
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


def timed(steps: Sequence[OpsStep], position: int, tokens: int) -> tuple[float, ...]:
    """Median seconds of one token of each step, one after the other in each of ROUNDS rounds."""
    took: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, times in zip(steps, took, strict=True):
            step.start(step.tokens[position].clone(), position)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step.decode_many(tokens)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / tokens)
    return tuple(map(statistics.median, took))
