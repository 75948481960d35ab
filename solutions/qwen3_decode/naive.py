"""One decode step from the first rungs of the chapters: where the ladder of this chapter starts.

Every operation is a launch of its own. Torch looks the embedding up, writes the new row of keys and
values into the cache, and finds the largest logit.
"""

from __future__ import annotations

import torch

from solutions import decode_attention, gemv, rms_norm, rope, swiglu, vector_add

from .step import Step


class NaiveStep(Step):
    """The first rung of every chapter, one launch an operation."""

    @torch.no_grad()
    def run(self) -> None:
        """One step. The rungs allocate what they return."""
        model, cache, position = self.model, self.cache, self.position
        D, eps = model.config.head_dim, model.config.rms_norm_eps
        norm, product = rms_norm.rms_norm_naive, gemv.gemv_naive
        context, slot = position + 1, position.long()
        x = model.embed[self.tokens[position]]  # [1, hidden]
        for w, k_cache, v_cache in zip(model.layers, cache.k, cache.v, strict=True):
            self.at("qkv")
            h = norm(x, w.input_norm, eps)
            q, k, v = (product(h, m).view(-1, D) for m in (w.q, w.k, w.v))  # [H, D], [H_kv, D]
            self.at("attention")
            q, k = norm(q, w.q_norm, eps), norm(k, w.k_norm, eps)
            q, k = rope.rope_naive(q[None], k[None], cache.cos_sin, position)  # [1, H, D]
            k_cache.index_copy_(0, slot, k)
            v_cache.index_copy_(0, slot, v[None])
            o = decode_attention.decode_attention_naive(q, k_cache[None], v_cache[None], context)
            self.at("o")
            o = product(o.view(1, -1), w.o)
            x = vector_add.vector_add_naive(x[0], o[0])[None]
            self.at("gate_up")
            h = norm(x, w.post_norm, eps)
            y = swiglu.swiglu_naive(product(h, w.gate), product(h, w.up))
            self.at("down")
            x = vector_add.vector_add_naive(x[0], product(y, w.down)[0])[None]
            self.saw(x)
        self.at("head")
        self.finish(product(norm(x, model.norm, eps), model.head)[0])
