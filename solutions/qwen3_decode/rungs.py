"""Decode steps in plain torch: the reference's, with a cache that grows, with one that does not.

All round where Transformers rounds. With a static cache the shapes are the same in every step and
the position stays on the GPU, so that a CUDA graph can hold the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.nn.functional import scaled_dot_product_attention as sdpa

from solutions import rms_norm, rope, swiglu

from .reference import Cache, forward
from .step import Step
from .weights import Model


class ReferenceStep(Step):
    """reference.forward for one token: Transformers' operations. Python counts the positions."""

    def run(self) -> None:
        """One step, at the position that Python knows."""
        token = self.tokens[self.next : self.next + 1].long()
        self.finish(forward(self.model, token, self.cache, self.next)[0])


class TorchStep(Step):
    """What the two steps below share; they differ in how keys and values are kept."""

    def remember(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [1, H_kv, D] of the new token; all there are, [S, H_kv, D], for SDPA."""
        raise NotImplementedError

    def mask(self) -> Tensor | None:
        """Which of these keys count, [1, S]; None: all of them."""
        return None

    @torch.no_grad()
    def run(self) -> None:
        """One step; nothing in it waits for the GPU."""
        model, position = self.model, self.position
        D, eps, norm = model.config.head_dim, model.config.rms_norm_eps, rms_norm.library
        x, mask = embedding(self.tokens[position], model.embed), self.mask()  # x [1, hidden]
        for i, w in enumerate(model.layers):
            self.at("qkv")
            h = norm(x, w.input_norm, eps)
            q, k, v = (linear(h, m).view(1, -1, D) for m in (w.q, w.k, w.v))  # [1, H, D]
            self.at("attention")
            q, k = norm(q, w.q_norm, eps), norm(k, w.k_norm, eps)
            q, k = rope.library(q, k, self.cache.cos_sin, position)
            k, v = self.remember(i, k, v)
            q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))  # [1, H, 1, D], [1, H_kv, S, D]
            o = sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
            self.at("o")
            x = x + linear(o.reshape(1, -1), w.o)
            self.at("gate_up")
            h = norm(x, w.post_norm, eps)
            y = swiglu.library(linear(h, w.gate), linear(h, w.up))
            self.at("down")
            x = x + linear(y, w.down)
            self.saw(x)
        self.at("head")
        self.finish(linear(norm(x, model.norm, eps), model.head)[0])


class DynamicStep(TorchStep):
    """A cache that grows by torch.cat. `cache` holds the prompt and is not written."""

    def start(self, token: int | Tensor, position: int) -> None:
        """As Step.start; the keys and values so far are those of `cache`."""
        super().start(token, position)
        self.grown = [
            [k[:position], v[:position]] for k, v in zip(self.cache.k, self.cache.v, strict=True)
        ]

    def remember(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All rows copied, and one more."""
        now = [torch.cat(pair) for pair in zip(self.grown[layer], (k, v), strict=True)]
        self.grown[layer] = now
        return tuple(now)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens read so far."""
        return tuple(torch.stack(rows) for rows in zip(*self.grown, strict=True))


class StaticStep(TorchStep):
    """A cache of S slots: a row is written in place, attention sees all slots through a mask."""

    def __init__(self, model: Model, cache: Cache) -> None:
        super().__init__(model, cache)
        self.slots = torch.arange(self.S, device=self.position.device)

    def mask(self) -> Tensor:
        """Slots up to the position."""
        return (self.slots <= self.position)[None]

    def remember(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The row of the position, written in place."""
        k_cache, v_cache, slot = self.cache.k[layer], self.cache.v[layer], self.position.long()
        return k_cache.index_copy_(0, slot, k), v_cache.index_copy_(0, slot, v)
