"""One decode step as a chain of launches: eager, in a CUDA graph, and with dependent launch.

Position, tokens and cache live on the GPU, at fixed addresses: a step reads where it stands there,
writes the next token and moves on. So a step can be captured once and replayed for as many tokens
as the cache has room for; Python does not see them before it wants to.

`OpsStep` is made of the chapters' ops, as they are. `DecodeStep` is made of kernels.py: the same
kernels eager, in a graph, and, with `dependent`, each started while the one before it still works.
The steps before these on the ladder are in naive.py and rungs.py.

The cache is reference.py's, so `reference.forward` does the prefill:

    cache = new_cache(model.config, S, torch.bfloat16, device)
    first = forward(model, prompt, cache, last=1)[0].argmax()
    step = DecodeStep(model, cache)
    step.start(first, len(prompt))
    step.capture()
    text = step.decode_many(64)
"""

from __future__ import annotations

import labkit as lab

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from solutions import decode_attention, gemv, rms_norm, rope, swiglu

from . import kernels
from .config import ModelError
from .reference import Cache
from .start import embed_norm
from .weights import Layer, Model

# Compute capability from which a kernel may start before its predecessor ends.
FIRST_DEPENDENT = (9, 0)
PHASES = ("qkv", "attention", "o", "gate_up", "down", "head")  # all but the last in each layer
PER_LAYER = 5  # launches of DecodeStep, one a phase


class Packed(NamedTuple):
    """A layer's projections as a step reads them: those of one input in one matrix."""

    qkv: Float[Tensor, "QKV hidden"]  # QKV: (H + 2·H_kv)·D rows, q's first, then k's
    gate_up: Float[Tensor, "I2 hidden"]  # gate's rows first


def packed(layer: Layer) -> Packed:
    """A copy of the projections of a layer, joined."""
    return Packed(torch.cat((layer.q, layer.k, layer.v)), torch.cat((layer.gate, layer.up)))


class Step:
    """What all kinds of step share: where the tokens are, how one becomes many.

    `tokens[p]` is the token at position p, `position` that of the token which the next step reads.
    `logits` are those of the last step. If `residuals` is a list, `run` appends the residual stream
    [hidden] after each layer; if there is a `marker`, it is called where a phase begins. ModelError
    for a cache that is not the model's.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        config, device = model.config, model.embed.device
        shape = (config.num_hidden_layers, cache.k.shape[1])
        shape = (*shape, config.num_key_value_heads, config.head_dim)
        for name, x in (("k", cache.k), ("v", cache.v)):
            if tuple(x.shape) != shape or x.dtype != model.embed.dtype or x.device != device:
                raise ModelError(
                    f"the cache's {name} is {x.dtype} {tuple(x.shape)} on {x.device}, the model "
                    f"wants {model.embed.dtype} {shape} on {device}"
                )
        self.model, self.cache, self.S = model, cache, shape[1]
        self.tokens: Int32[Tensor, " S+1"] = torch.zeros(
            self.S + 1, dtype=torch.int32, device=device
        )
        self.position: Int32[Tensor, " 1"] = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(config.vocab_size, dtype=model.embed.dtype, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.residuals: list[Tensor] | None = None
        self.marker: Callable[[str], None] | None = None
        self.next = 0  # the position again, as far as Python knows

    @cached_property
    def layers(self) -> tuple[Packed, ...]:
        """The projections of each layer, joined, for steps that read them so."""
        return tuple(map(packed, self.model.layers))

    def start(self, token: int | Tensor, position: int) -> None:
        """The next step reads `token` at `position`. The cache has all positions before it."""
        if not 0 <= position < self.S:
            raise ModelError(f"{position=} is not one of the cache's {self.S} slots")
        if not isinstance(token, Tensor) and not 0 <= token < self.model.config.vocab_size:
            raise ModelError(f"{token=} is outside the vocabulary of {self.logits.numel()}")
        self.tokens[position] = token
        self.position.fill_(position)
        self.next = position

    def run(self) -> None:
        """Launch the kernels of one step on torch's current stream."""
        raise NotImplementedError

    def finish(self, logits: Float[Tensor, " V"]) -> None:
        """Keep the logits, write the next token, go to its position. Nothing waits for the GPU."""
        self.logits.copy_(logits)
        self.position.add_(1)
        self.tokens.index_copy_(0, self.position.long(), logits.argmax().to(torch.int32)[None])

    def saw(self, x: Tensor) -> None:
        """Called by `run` with the residual stream after each layer."""
        if self.residuals is not None:
            self.residuals.append(x.flatten().clone())

    def at(self, phase: str) -> None:
        """Called by `run` where one of PHASES begins."""
        if self.marker is not None:
            self.marker(phase)

    def kept(self) -> tuple[Float[Tensor, "L T H_kv D"], Float[Tensor, "L T H_kv D"]]:
        """Keys and values of the T tokens read so far."""
        return self.cache.k[:, : self.next], self.cache.v[:, : self.next]

    def capture(self) -> None:
        """Capture a step, which `decode_many` then replays. The position stays as it is."""
        if not self.position.is_cuda:
            raise RuntimeError("a CUDA graph needs a GPU")
        where = self.position.clone()
        # Compile what is not compiled. At the last slot, whose token writes it before it is read:
        # so the cache may be full of tokens already.
        self.position.fill_(self.S - 1)
        self.run()
        self.position.copy_(where)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def decode_many(self, count: int) -> Int32[Tensor, " count"]:
        """The next `count` tokens, on the GPU: nothing here waits for them.

        ModelError if the cache has too few slots. Stop tokens are the caller's business.
        """
        if count < 0 or self.next + count > self.S:
            raise ModelError(f"{count} tokens from position {self.next}: the cache has {self.S}")
        first = self.next + 1
        for _ in range(count):
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()
            self.next += 1
        return self.tokens[first : first + count]


Build = Callable[[Model, Cache], Step]

OPS = {
    "embed_norm": embed_norm,
    "rms_norm_residual": rms_norm.rms_norm_residual,
    "qk_norm_rope_cache": rope.qk_norm_rope_cache,
    "decode_attention": decode_attention.decode_attention,
    "gate_up_swiglu": swiglu.gate_up_swiglu,
    "gemv": gemv.gemv,
}


class OpsStep(Step):
    """The chapters' ops, eight launches a layer; under the simulators, the rungs that run there.

    `ops` puts other functions in the place of some of OPS, by name; swap.py does. ValueError for a
    name that is not there.
    """

    def __init__(self, model: Model, cache: Cache, *, ops: Mapping[str, Callable] = OPS) -> None:
        for name in ops:
            if name not in OPS:
                raise ValueError(f"op name={name!r} is not one of: {', '.join(OPS)}")
        super().__init__(model, cache)
        self.ops = SimpleNamespace(**{**OPS, **ops})
        if self.ops.decode_attention is decode_attention.decode_attention:
            # In a graph, each of its launches would else get memory of its own, and fill it first.
            k, H, D = cache.k[:1], model.config.num_attention_heads, model.config.head_dim
            memory = decode_attention.decode_attention_workspace(k.new_empty((1, H, D)), k)
            self.ops.decode_attention = partial(self.ops.decode_attention, workspace=memory)

    @torch.no_grad()
    def run(self) -> None:
        """One step; allocates, so that only a graph of it has fixed addresses."""
        config, model, cache, op = self.model.config, self.model, self.cache, self.ops
        H, H_kv, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        first = model.layers[0].input_norm
        h, x = op.embed_norm(self.tokens, self.position, model.embed, first, eps)  # [1, hidden]
        gains = *(w.input_norm for w in model.layers[1:]), model.norm
        context = self.position + 1
        for i, (w, joined) in enumerate(zip(model.layers, self.layers, strict=True)):
            self.at("qkv")
            qkv = op.gemv(h, joined.qkv).view(1, H + 2 * H_kv, -1)
            self.at("attention")
            q, k, v = qkv.split((H, H_kv, H_kv), dim=1)
            q, k, v = op.qk_norm_rope_cache(
                q, k, v, w.q_norm, w.k_norm, cache.cos_sin, self.position,
                cache.k[i], cache.v[i], self.position, eps,
            )  # fmt: skip
            o = op.decode_attention(q, k[None], v[None], context)
            self.at("o")
            o = op.gemv(o.view(1, -1), w.o)
            h, x = op.rms_norm_residual(o, x, w.post_norm, eps)
            self.at("gate_up")
            y = op.gate_up_swiglu(h, joined.gate_up)
            self.at("down")
            down = op.gemv(y, w.down)
            h, x = op.rms_norm_residual(down, x, gains[i], eps)
            self.saw(x)
        self.at("head")
        self.finish(op.gemv(h, model.head)[0])


class DecodeStep(Step):
    """Five launches a layer and one for the head, on memory that is allocated here, once.

    `dependent`: each kernel may start while the one before it works, and asks for its weights, or
    older keys and values, before that one ends. ModelError for sizes that the kernels do not take,
    TypeError for weights that are not bfloat16, ValueError for `dependent` below compute capability
    9.0.
    """

    def __init__(self, model: Model, cache: Cache, *, dependent: bool = False) -> None:
        super().__init__(model, cache)
        device = model.embed.device
        if dependent and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < FIRST_DEPENDENT:
                raise ValueError(f"dependent launch needs compute capability 9.0, not {capability}")
        self.dependent = dependent
        self.x = model.embed.new_empty(model.config.hidden_size)  # the residual stream
        # Without a GPU, the chain is planned as for an H200, and cannot run.
        self.sequence = tuple(self._plan(lab.DEVICE.sms or 132))

    @property
    def launches(self) -> int:
        """Launches for a token."""
        return len(self.sequence)

    def _plan(self, sms: int):
        """The launches of a step, in order."""
        config, model, cache = self.model.config, self.model, self.cache
        H, H_kv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        eps, device, empty = config.rms_norm_eps, model.embed.device, model.embed.new_empty
        x, qkv, o = self.x, empty((H + 2 * H_kv) * D), empty(H * D)
        y = empty(config.intermediate_size)
        parts = kernels.new_parts(H, H_kv, D, device)
        best = torch.zeros(1, dtype=torch.int64, device=device)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        here = self.tokens, self.position
        for i, (w, joined) in enumerate(zip(model.layers, self.layers, strict=True)):
            yield kernels.norm_gemv(
                x, w.input_norm, joined.qkv, qkv, eps, model.embed, *here, first=i == 0
            )
            yield kernels.attention(
                qkv, w.q_norm, w.k_norm, cache.cos_sin, self.position, cache.k[i], cache.v[i], o,
                parts, eps, sms,
            )  # fmt: skip
            yield kernels.gemv_residual(o, w.o, x, name="num_attention_heads * head_dim")
            yield kernels.norm_gate_up(x, w.post_norm, joined.gate_up, y, eps)
            yield kernels.gemv_residual(y, w.down, x, name="intermediate_size")
        yield kernels.norm_head(
            x, model.norm, model.head, self.logits, eps, best, counter, *here, sms
        )

    def run(self) -> None:
        """One step: the launches, nothing else."""
        for done, launch in enumerate(self.sequence, 1):
            self.at("head" if done == len(self.sequence) else PHASES[(done - 1) % PER_LAYER])
            launch(programmatic=self.dependent)
            if done % PER_LAYER == 0:
                self.saw(self.x)


def kernels_of(run: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Start and end in µs, and name, of each kernel that `run()` starts, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:  # or torch warns
        run()
        torch.cuda.synchronize()
    return [
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not e.name.startswith(("Memcpy", "Memset"))
    ]


def count_kernels(run: Callable[[], object]) -> int:
    """How many kernels `run()` starts on the GPU."""
    run()  # whatever is compiled or chosen on a first call
    return len(kernels_of(run))
