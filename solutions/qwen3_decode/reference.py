"""Qwen3's forward pass in plain torch with a static KV cache: prefill and decode are one function.

    x = embed[tokens]
    for every layer:  x += o · attention(rope(norm(q · h)), rope(norm(k · h)), v · h),  h = norm(x)
                      x += down · (silu(gate · h) · (up · h)),                          h = norm(x)
    logits = head · norm(x)

The parts are the `library` functions of chapters 03, 04 and 05, so values are rounded where
Transformers rounds them. On a CPU, models loaded from the same file give the logits of
Qwen3ForCausalLM with attn_implementation="eager" to the last bit, in fp32 and in bf16. Two things
change last bits:
- Transformers' default, "sdpa": its kernel adds attention up, and rounds it, in another order. With
  that kernel in place of `attention` the bits are equal again.
- Where weights lie in memory. In fp32, an LM head of 151,936 rows that starts 8 bytes past a
  multiple of 16, as in a mapped file, has other last bits than one that starts at a multiple.

Shapes   tokens [T] int64; caches [L, S, H_kv, D]: L layers of S slots, in each layer chapter 04's
         cache -> logits [T, V]
Source   Yang et al. 2025, arXiv:2505.09388 (Qwen3)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import embedding, linear

from solutions import rms_norm, rope, swiglu

from .config import ModelError, Qwen3Config
from .weights import Layer, Model


class Cache(NamedTuple):
    """Memory for S tokens, allocated once; the token at position p has slot p of every layer."""

    k: Float[Tensor, "L S H_kv D"]
    v: Float[Tensor, "L S H_kv D"]
    cos_sin: Float[Tensor, "S D"]  # float32, as in chapter 04


def new_cache(config: Qwen3Config, S: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """An empty cache of S slots. ModelError if the model or the memory has no room for so many."""
    if not 1 <= S <= config.max_position_embeddings:
        raise ModelError(f"a cache of {S} slots; the model has {config.max_position_embeddings}")
    shape = (config.num_hidden_layers, S, config.num_key_value_heads, config.head_dim)
    try:
        k, v = torch.zeros((2, *shape), dtype=dtype, device=device)
    except RuntimeError:  # torch has a class of its own for this on GPUs only
        size = 2 * math.prod(shape) * dtype.itemsize
        raise ModelError(f"no memory for a cache of {S} slots, {size / 1e9:,.1f} GB") from None
    return Cache(k, v, rope.cos_sin_table(S, config.head_dim, config.rope_theta, device))


def attention(
    q: Float[Tensor, "T H D"], k: Float[Tensor, "S H_kv D"], v: Float[Tensor, "S H_kv D"]
) -> Float[Tensor, "T H D"]:
    """Causal attention of the last T of S tokens, in Transformers' order of operations."""
    (T, H, D), S = q.shape, len(k)
    group = H // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [H, S, D]
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * D**-0.5  # [H, T, S]
    position = torch.arange(S - T, S, device=q.device)
    future = torch.arange(S, device=q.device) > position[:, None]  # [T, S]
    scores = scores.masked_fill(future, torch.finfo(q.dtype).min)
    p = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (p @ v).transpose(0, 1)


def layer_forward(
    config: Qwen3Config,
    w: Layer,
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    start: int,
) -> Tensor:
    """One layer on x [T, hidden]; writes keys and values of these tokens into the layer's cache."""
    T, D, eps = len(x), config.head_dim, config.rms_norm_eps
    h = rms_norm.library(x, w.input_norm, eps)
    q = rms_norm.library(linear(h, w.q).view(T, -1, D), w.q_norm, eps)  # [T, H, D]
    k = rms_norm.library(linear(h, w.k).view(T, -1, D), w.k_norm, eps)  # [T, H_kv, D]
    slots = torch.arange(start, start + T, device=x.device)
    q, k_cache[slots] = rope.library(q, k, cos_sin, slots)
    v_cache[slots] = linear(h, w.v).view(T, -1, D)
    o = attention(q, k_cache[: start + T], v_cache[: start + T])
    x = x + linear(o.reshape(T, -1), w.o)
    h = rms_norm.library(x, w.post_norm, eps)
    return x + linear(swiglu.library(linear(h, w.gate), linear(h, w.up)), w.down)


@torch.no_grad()
def forward(
    model: Model,
    tokens: Int64[Tensor, " T"],
    cache: Cache,
    start: int = 0,
    last: int | None = None,
    seen: list[Tensor] | None = None,
) -> Float[Tensor, "T V"]:
    """Logits after each of T tokens, the first of which stands at position `start`.

    `start` 0 and a whole prompt is prefill; one token and `start` > 0 is a decode step. Tokens
    before `start` must be in the cache. With `last`, logits after the last so many tokens only.
    The residual stream [T, hidden] after each layer is appended to `seen`. ModelError if the cache
    has too few slots.
    """
    S, end = cache.k.shape[1], start + len(tokens)
    if end > S:
        raise ModelError(f"{end} tokens do not fit into a cache of {S} slots")
    x = embedding(tokens, model.embed)
    for w, k_cache, v_cache in zip(model.layers, cache.k, cache.v, strict=True):
        x = layer_forward(model.config, w, x, k_cache, v_cache, cache.cos_sin, start)
        if seen is not None:
            seen.append(x)
    x = rms_norm.library(x, model.norm, model.config.rms_norm_eps)
    return linear(x if last is None else x[-last:], model.head)
