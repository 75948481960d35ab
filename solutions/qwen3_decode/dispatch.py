"""The dispatcher of prefill: our kernels tried inside the whole model, at exact shapes.

`tune` tries the candidates of prefill.CHOICES one by one, at one number of tokens. It keeps one
only where the time to the first token falls and the logits stay as near the truth as plain torch's.
The `Plan` that it returns also holds what was tried and dropped.

Time to the first token runs from the host's first launch to the GPU's last kernel, on an idle GPU,
as someone waits for it: at 128 tokens, launches are most of it.
"""

from __future__ import annotations

import labkit as lab

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .config import Qwen3Config
from .gate import divergence
from .peers import transformers_prefill
from .prefill import CHOICES, Plan, Prefill, Tried, prefill
from .reference import Cache, forward, new_cache
from .step import packed
from .weights import Model, cast

CONTEXTS = (128, 512, 2048, 4096)  # tokens that plans are made and shown for
GPU_ONLY = ("graph", "sdpa_cudnn")
ROUNDS = 20  # runs of each version, one a round
# A candidate must save this fraction, and twice what two medians of one plan differ by.
MARGIN = 0.005
TRANSFORMERS = "Transformers, SDPA"  # in tables
PROMPTS = 4  # that the gate looks at: one last token alone says little
LEAST_KL = 1e-9  # nats: what float32's own rounding gives


def shapes(config: Qwen3Config, T: int) -> dict[str, dict[str, int]]:
    """Part -> the exact shape of its work for T tokens: [M, K] · [N, K] for a projection."""
    hidden, wide, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, H_kv = config.num_attention_heads, config.num_key_value_heads
    heads = {"T": T, "H": H, "H_kv": H_kv, "D": D}
    return {
        "launch": {"T": T},
        "qkv": {"M": T, "N": (H + 2 * H_kv) * D, "K": hidden},
        "norm": {"M": T, "N": hidden},
        "rotation": heads,
        "attention": heads,
        "o": {"M": T, "N": hidden, "K": H * D},
        "gate_up": {"M": T, "N": 2 * wide, "K": hidden},
        "down": {"M": T, "N": hidden, "K": wide},
        "head": {"M": 1, "N": config.vocab_size, "K": hidden},
    }


def candidates(
    config: Qwen3Config, T: int, gpu: bool = True
) -> Iterable[tuple[str, dict[str, int], str]]:
    """Part, shape and name of every candidate for T tokens, in the order of trials."""
    for part, shape in shapes(config, T).items():
        for name in CHOICES[part][1:]:
            if gpu or name not in GPU_ONLY:
                yield part, shape, name


def time_to_first_token(
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds of each call on an idle GPU, launches included: one of each a round, shuffled.

    Needs a GPU.
    """
    for call in calls.values():
        for _ in range(2):  # compiles, captures, chooses kernels
            call()
    times, order, shuffle = {name: [] for name in calls}, list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3)
    return times


def as_near(
    model: Model, prompts: Int64[Tensor, "P T"], cache: Cache
) -> Callable[[Float[Tensor, "P V"]], bool]:
    """Whether logits after these prompts are as near the truth as plain torch's.

    The truth is reference.forward in float32 with the same weights. As everywhere in the lab, twice
    the error of the plain version is allowed: KL(truth ‖ logits) ≤ 2 · KL(truth ‖ plain).
    """
    plain = torch.stack([prefill(model, tokens, cache) for tokens in prompts])
    full = cast(model, torch.float32)
    room = new_cache(model.config, prompts.shape[1], torch.float32, prompts.device)
    truth = torch.cat([forward(full, tokens, room, last=1) for tokens in prompts])
    allowed = 2 * divergence(truth, plain).mean() + LEAST_KL
    return lambda logits: bool(divergence(truth, logits).mean() <= allowed)


def random_tokens(model: Model, T: int, count: int = PROMPTS) -> Int64[Tensor, "P T"]:
    """Seeded random tokens, the same on every device."""
    draw = torch.Generator().manual_seed(T)
    tokens = torch.randint(model.config.vocab_size, (count, T), generator=draw)
    return tokens.to(model.embed.device)


def tune(
    model: Model,
    T: int,
    *,
    holds: Callable[[Float[Tensor, "P V"]], bool] | None = None,
    rounds: int = ROUNDS,
) -> Plan:
    """Try every candidate for T tokens, one by one inside the whole model; without a GPU, none.

    A candidate is kept if the median time to the first token falls by MARGIN and by twice the noise
    (what the medians of the same plan, timed twice in the same rounds, differ by), and if `holds`
    says so of the logits after `random_tokens`: by default `as_near`. Whatever a candidate raises
    drops it, and is the reason in the table. ModelError for more tokens than the model's positions.
    """
    cache = new_cache(model.config, T, model.embed.dtype, model.embed.device)
    if not model.embed.is_cuda:
        return Plan(T)
    prompts = random_tokens(model, T)
    holds = holds or as_near(model, prompts, cache)
    return search(model, prompts, cache, candidates(model.config, T), holds, rounds)


def search(
    model: Model,
    prompts: Int64[Tensor, "P T"],
    cache: Cache,
    trials: Iterable[tuple[str, dict[str, int], str]],
    holds: Callable[[Float[Tensor, "P V"]], bool],
    rounds: int,
) -> Plan:
    """The plan after these trials, each of one candidate in the plan as it stands then."""
    plan, layers, tried = Plan(prompts.shape[1]), tuple(map(packed, model.layers)), []
    now = Prefill(model, cache, [plan], layers)
    for part, shape, name in trials:
        new = replace(plan, **{part: name})
        other = Prefill(model, cache, [new], layers)
        try:
            right = holds(torch.stack([other(tokens) for tokens in prompts]))
            runs = {"before": now, "again": now, "after": other}
            calls = {key: lambda run=run: run(prompts[0]) for key, run in runs.items()}
            verdict = judged(time_to_first_token(calls, rounds), right)
        except Exception as why:  # a kernel may refuse a shape, or a backend all of them
            line = (str(why).strip().splitlines() or [""])[0][:120]
            verdict = None, None, None, False, f"{type(why).__name__}: {line}"
        tried.append(Tried(part, shape, name, *verdict))
        if tried[-1].kept:
            plan, now = new, other
    return replace(plan, tried=tuple(tried))


def judged(took: Mapping[str, Sequence[float]], right: bool) -> tuple:
    """The last five values of `Tried`, from what `tune` timed and whether the gate holds."""
    before, again, after = (statistics.median(took[key]) for key in ("before", "again", "after"))
    before, noise = (before + again) / 2, abs(before - again)
    margin = max(MARGIN, 2 * noise / before)
    saved = 1 - after / before
    change = f"{lab.percent(abs(saved))} {'less' if saved > 0 else 'more'} time"
    if not right:
        return before, after, margin, False, f"the gate does not hold ({change})"
    kept = saved > margin
    why = change if kept or saved <= 0 else f"{change}, within {lab.percent(margin)}"
    return before, after, margin, kept, why


# Beside the others ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token of a prompt of T tokens: quartiles of `runs`, in seconds."""

    T: int
    name: str
    p25_s: float
    p50_s: float
    p75_s: float
    runs: int


def compare(model: Model, plan: Plan, rounds: int = 2 * ROUNDS) -> tuple[FirstToken, ...]:
    """Plain torch, the plan, and Transformers with SDPA if it is installed. Needs a GPU."""
    tokens = random_tokens(model, plan.T)[0]
    cache = new_cache(model.config, plan.T, model.embed.dtype, model.embed.device)
    calls = {"plain torch": Prefill(model, cache), "plan": Prefill(model, cache, [plan])}
    if find_spec("transformers"):
        calls[TRANSFORMERS] = transformers_prefill(model)
    took = time_to_first_token(
        {name: lambda run=run: run(tokens) for name, run in calls.items()}, rounds
    )
    return tuple(
        FirstToken(plan.T, name, *statistics.quantiles(times, n=4), len(times))
        for name, times in took.items()
    )


def recorded(model: Model, log: Callable = print) -> dict[str, list[dict]]:
    """Plans and times to the first token at CONTEXTS, as the results keep them."""
    plans, rows = [], []
    for T in CONTEXTS:
        plans.append(tune(model, T))
        rows += compare(model, plans[-1])
        log(f"  prefill of {T} tokens: " + ", ".join(map(repr, rows[-3:])))
    return {"plans": [p.as_json() for p in plans], "first_token": [asdict(r) for r in rows]}


def table(rows: Sequence[FirstToken]) -> lab.Table:
    """A line for each number of tokens: time to the first token of each version."""
    names = list(dict.fromkeys(row.name for row in rows))
    times = {(row.T, row.name): lab.microseconds(row.p50_s) for row in rows}
    lines = [
        (f"{T:,}", *(times.get((T, name), "–") for name in names))
        for T in sorted({row.T for row in rows})
    ]
    return lab.Table(("tokens", *names), tuple(lines))
