"""The gate: does a rung still compute the model? Judged against the same weights in float32.

Each prompt is read by the reference in bfloat16, up to its last tokens. Those the rung reads one by
one, whatever it would have written itself (teacher forcing), with the keys and values that it wrote
for those before. The longest prompt it reads whole, so that all of them are its own. Beside it
stands what the reference in bfloat16 does, which is what Transformers does: that much is bfloat16's
doing, and allowed.

    nll        mean over tokens of -ln p(the token that follows), in nats
    nll_gap    mean over tokens of its distance from that of float32, either way: a mean of signed
               distances could be zero by chance
    kl         mean over tokens of KL(float32 ‖ rung)
    agreement  share of tokens after which the rung writes the one float32 ranks first; near-ties
               count. `exact` is without them
    cosine     of each layer's residual stream and float32's, for each layer its lowest token

A near-tie. Let a be the token that float32 ranks first, and margin(b) by how much the logit of a is
above that of b. Token b is as good as a if margin(b) is at most what bfloat16 changes of a margin
at this position: the largest |margin(b) in float32 - margin(b) in bfloat16| over all b. So the
reference in bfloat16 agrees everywhere, and a rung's own errors widen nothing.

The rung passes if kl and nll_gap are at most ALLOWED times the allowance, agreement is at least
AGREEMENT, every cosine at least COSINE, and its CUDA graph writes the tokens that its kernels write
when Python launches them. ALLOWED leaves room for sums in another order, which scatter as much as
the reference's and otherwise; twice the rounding error would be 4 times the kl. A rung that does
not pass is opt-in: it stays in the table, and nothing uses it unless asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .prompts import random_prompts, text_prompts
from .reference import Cache, forward, new_cache
from .step import Build, Step
from .weights import HELD_OUT, SMALL, Model, cast, load_model

ALLOWED = 1.5
AGREEMENT = 0.99
COSINE = 0.999
LAST = 8  # tokens of a prompt that the rung reads: some rungs take Python 50 ms and more for one
FREE = 1024  # tokens that graph and eager write on their own
STALE = 4.0  # in all slots past the context: zeros would hide that someone looks there
TEXT = SMALL / HELD_OUT  # what the small model was not trained on


@dataclass(frozen=True)
class Scores:
    """How near logits and residual stream are to float32's; see above."""

    nll: float
    nll_gap: float
    kl: float
    agreement: float
    exact: float
    cosine: tuple[float, ...]  # [L]


@dataclass(frozen=True)
class Gate:
    """One rung's scores, those that bfloat16 is allowed, and on how much they rest.

    `graph_tokens` is how many tokens the graph and Python's launches wrote, 0 if there is no graph,
    and `graph_agrees` whether they were the same ones. Where they were not, `repeats` says whether
    Python's launches write the same tokens once more, and end with the same bits in the logits.
    """

    rung: str
    weights: str
    prompts: int
    tokens: int  # judged, of all prompts
    shortest: int
    longest: int
    nll_float32: float
    scores: Scores
    allowance: Scores
    graph_tokens: int
    graph_agrees: bool
    repeats: bool

    @property
    def failures(self) -> tuple[str, ...]:
        """What keeps the rung out, a line each. NaN does."""
        found, own, allowed = [], self.scores, self.allowance
        for name in ("kl", "nll_gap"):
            value, limit = getattr(own, name), ALLOWED * getattr(allowed, name)
            if not value <= limit:
                found.append(f"{name} {value:.3g}, allowed {limit:.3g}")
        if not own.agreement >= AGREEMENT:
            found.append(f"agreement {own.agreement:.2%}, wanted {AGREEMENT:.0%}")
        low = [i for i, value in enumerate(own.cosine) if not value >= COSINE]
        if low or not own.cosine:
            where = f"{own.cosine[low[0]]:.5f} after layer {low[0]}" if low else "not seen"
            found.append(f"cosine {where}, wanted {COSINE}")
        if not self.graph_agrees:
            own = "" if self.repeats else ", which do not repeat their own bits"
            found.append(f"the graph's tokens are not those of Python's launches{own}")
        return tuple(found)

    @property
    def opt_in(self) -> bool:
        """Whether the rung failed."""
        return bool(self.failures)

    def as_json(self) -> dict:
        """Plain data for the results, the verdict with it. JSON has no NaN: null stands for it."""
        data = asdict(self) | {"opt_in": self.opt_in, "failures": list(self.failures)}
        for scores in (data["scores"], data["allowance"]):
            for name, value in scores.items():
                scores[name] = [*map(number, value)] if name == "cosine" else number(value)
        return data

    def __repr__(self) -> str:
        """The verdict, then what it rests on, with the allowance in brackets."""
        own, allowed = self.scores, self.allowance
        low, limit = (min(x.cosine, default=math.nan) for x in (own, allowed))
        verdict = "\n   ".join(("fails", *self.failures)) if self.opt_in else "passes"
        return (
            f"{self.rung}, {self.weights}, {self.tokens} tokens of {self.prompts} prompts: "
            f"{verdict}\n"
            f"   kl {own.kl:.3g} (bf16 {allowed.kl:.3g}), nll gap {own.nll_gap:.3g} "
            f"({allowed.nll_gap:.3g}), nll {own.nll:.4f} ({allowed.nll:.4f}, fp32 "
            f"{self.nll_float32:.4f})\n"
            f"   agreement {own.agreement:.2%}, exact {own.exact:.2%} ({allowed.exact:.2%}), "
            f"cosine {low:.5f} ({limit:.5f})"
        )


def number(value: float) -> float | None:
    """`value`, or None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


# The reference -------------------------------------------------------------------------------


def read(model: Model, tokens: Tensor, cache: Cache, last: int) -> tuple[Tensor, Tensor]:
    """reference.forward of a whole prompt: logits [last, V], and x after each layer, [last, L, …].

    Both in float32.
    """
    seen: list[Tensor] = []
    logits = forward(model, tokens, cache, last=last, seen=seen)
    return logits.float(), torch.stack([x[-last:] for x in seen], dim=1).float()


def divergence(truth: Tensor, logits: Tensor) -> Tensor:
    """KL(truth ‖ logits) in nats of each row of logits [T, V]."""
    p, q = (torch.log_softmax(x.double(), dim=1) for x in (truth, logits))
    return (p.exp() * (p - q)).sum(1)


@dataclass(frozen=True)
class Truth:
    """What float32 and bfloat16 say of the last tokens of one prompt."""

    following: Tensor  # [last]: the tokens to be predicted
    logits: Tensor  # [last, V]: float32's
    residuals: Tensor  # [last, L, hidden]
    noise: Tensor  # [last]: what bfloat16 changes of a margin, at most

    @classmethod
    def of(cls, following: Tensor, full: tuple[Tensor, Tensor], bf16: Tensor) -> Truth:
        """From logits and residuals in float32, and logits in bfloat16."""
        logits, residuals = full
        first = logits.argmax(1, keepdim=True)
        changed = (logits.gather(1, first) - logits) - (bf16.gather(1, first) - bf16)
        return cls(following, logits, residuals, changed.abs().amax(1))


@dataclass
class Tally:
    """What was seen of each token."""

    nll: list[Tensor] = field(default_factory=list)
    gap: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    near: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)

    def add(self, truth: Truth, logits: Tensor, chosen: Tensor, residuals: Tensor | None) -> None:
        """Judge logits [last, V], the tokens written after them [last], and x [last, L, hidden]."""
        p, q = (torch.log_softmax(x.double(), dim=1) for x in (truth.logits, logits))
        following, chosen = truth.following[:, None], chosen.long()[:, None]
        nll = -q.gather(1, following)[:, 0]
        self.nll.append(nll)
        self.gap.append((nll + p.gather(1, following)[:, 0]).abs())
        self.kl.append(divergence(truth.logits, logits))
        margin = truth.logits.amax(1) - truth.logits.gather(1, chosen)[:, 0]
        self.exact.append((truth.logits.argmax(1) == chosen[:, 0]).double())
        self.near.append((margin <= truth.noise).double())
        if residuals is not None:
            self.cosine.append(cosine_similarity(residuals.float(), truth.residuals, dim=2))

    def scores(self) -> Scores:
        """Means, and for each layer the lowest cosine."""
        lists = (self.nll, self.gap, self.kl, self.near, self.exact)
        joined = map(torch.cat, lists)  # a GPU's mean() of ones may be a little less than 1
        means = [values.sum().item() / len(values) for values in joined]
        lowest = torch.cat(self.cosine).amin(0).tolist() if self.cosine else ()
        return Scores(*means, tuple(lowest))


# The rungs -----------------------------------------------------------------------------------


def fill(step: Step, cache: Cache, count: int) -> None:
    """The first `count` slots of a cache into the step's; all others hold what nobody may use."""
    for mine, given in ((step.cache.k, cache.k), (step.cache.v, cache.v)):
        mine[:, :count].copy_(given[:, :count])
        mine[:, count:].fill_(STALE)


@torch.no_grad()
def forced(
    step: Step, tokens: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read `last` given tokens from position `first` on: as `Tally.add` wants what came of it.

    A captured step shows no residual stream.
    """
    logits, chosen = [], []
    step.residuals = [] if step.graph is None else None
    step.start(int(tokens[first]), first)
    for position in range(first, first + last):
        step.tokens[position] = tokens[position]  # whatever the step before wrote there
        chosen.append(step.decode_many(1).clone())
        logits.append(step.logits.float())
    seen = torch.stack(step.residuals).unflatten(0, (last, -1)) if step.residuals else None
    step.residuals = None
    return torch.stack(logits), torch.cat(chosen), seen


class Judged:
    """A rung under way: the step, the same one launched by Python, and what they did so far."""

    def __init__(self, build: Build, model: Model, S: int) -> None:
        self.step = self.eager = build(model, new_cache(model.config, S, *where(model)))
        if self.step.graph is not None:
            self.eager = build(model, new_cache(model.config, S, *where(model)))
            self.eager.graph = None
        self.graph_tokens, self.graph_agrees, self.repeats = 0, True, True
        self.own = Tally()

    def read(self, tokens: Tensor, truth: Truth, cache: Cache, last: int) -> None:
        """Judge one prompt; of a graph, the residual stream is that of Python's launches."""
        first = len(tokens) - 1 - last
        fill(self.step, cache, first)
        logits, chosen, seen = forced(self.step, tokens, first, last)
        if self.eager is not self.step:
            fill(self.eager, cache, first)
            _, same, seen = forced(self.eager, tokens, first, last)
            self.graph_agrees &= torch.equal(chosen, same)
        self.own.add(truth, logits, chosen, seen)

    def write(self, tokens: Tensor, cache: Cache, last: int, count: int) -> None:
        """Let graph and eager write up to `count` tokens after the start of a prompt."""
        first = len(tokens) - 1 - last
        count = min(count, self.step.S - first)

        def written(step: Step) -> tuple[Tensor, Tensor]:
            fill(step, cache, first)
            step.start(int(tokens[first]), first)
            return step.decode_many(count).clone(), step.logits.clone()

        graph, eager = written(self.step), written(self.eager)
        self.graph_tokens = count
        if not torch.equal(graph[0], eager[0]):
            self.graph_agrees = False
            self.repeats = all(map(torch.equal, written(self.eager), eager))


def where(model: Model) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of a model's cache."""
    return model.embed.dtype, model.embed.device


def gates(
    builds: Mapping[str, Build],
    model: Model,
    prompts: Sequence[Tensor],
    *,
    weights: str = "random",
    last: int = LAST,
    free: int = FREE,
) -> dict[str, Gate]:
    """The gate of several rungs, by name: the references read each prompt once for all of them.

    `prompts` are token ids [T + 1]: T that are read, the last `last` of them by the rung (of the
    longest prompt, all), and one that follows. `weights` says what model it is. A rung with a graph
    also writes `free` tokens, or as many as the model has positions for.
    ValueError for a model that is not in bfloat16, or a prompt too short for `last`.
    """
    config, device = model.config, model.embed.device
    if model.embed.dtype != torch.bfloat16:
        raise ValueError(f"model is {model.embed.dtype}, must be torch.bfloat16: it is the measure")
    read_lengths = [len(p) - 1 for p in prompts]
    if min(read_lengths) <= last:
        raise ValueError(f"a prompt of {min(read_lengths)} tokens is too short for {last=}")
    longest, full = max(read_lengths), cast(model, torch.float32)
    whole, shortest = (read_lengths.index(T) for T in (longest, min(read_lengths)))
    S = min(longest + free, config.max_position_embeddings)
    judged = {name: Judged(build, model, S) for name, build in builds.items()}
    caches = [new_cache(config, longest, t, device) for t in (torch.float32, torch.bfloat16)]
    float32, allowance, total = Tally(), Tally(), 0
    for n, prompt in enumerate(prompts):
        tokens, judges = prompt.to(device), longest if n == whole else last
        total += judges
        exact = read(full, tokens[:-1], caches[0], judges)
        bf16 = read(model, tokens[:-1], caches[1], judges)
        truth = Truth.of(tokens[-judges:], exact, bf16[0])
        float32.add(truth, exact[0], exact[0].argmax(1), None)
        allowance.add(truth, bf16[0], bf16[0].argmax(1), bf16[1])
        for rung in judged.values():
            if n == shortest and rung.eager is not rung.step:
                rung.write(tokens, caches[1], last, free)
            rung.read(tokens, truth, caches[1], judges)
    nll, count = torch.cat(float32.nll).mean().item(), len(prompts)
    return {
        name: Gate(
            name, weights, count, total, min(read_lengths), longest, nll,
            rung.own.scores(), allowance.scores(), rung.graph_tokens, rung.graph_agrees,
            rung.repeats,
        )
        for name, rung in judged.items()
    }  # fmt: skip


def gate(build: Build, model: Model, prompts: Sequence[Tensor], **how) -> Gate:
    """The gate of one rung; the rest as in `gates`."""
    name = getattr(build, "__name__", type(build).__name__)
    return gates({name: build}, model, prompts, **how)[name]


def recorded(ladder, model: Model, log: Callable = print, count: int = 256) -> list[dict]:
    """The gates of a ladder's rungs as the results keep them: on `model`, and on the small one.

    The small model reads text that it was not trained on.
    """
    from .generate import load_tokenizer  # here: it needs the extra `model`

    builds = {rung.name: rung.fn.build for rung in ladder}
    small = load_model(SMALL, torch.bfloat16)
    ids = load_tokenizer(SMALL).encode(TEXT.read_text(encoding="utf-8")).ids
    found = []
    for weights, given, prompts in (
        ("random, Qwen3-0.6B's shape", model, random_prompts(model.config, count)),
        ("small, on held-out text", small, text_prompts(small.config, ids, count)),
    ):
        judged = gates(builds, given, prompts, weights=weights)
        for result in judged.values():
            log(f"  {result!r}")
            found.append(result.as_json())
    return found
