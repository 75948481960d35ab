"""Transformers on the same weights: eager, and compiled with a static cache and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .reference import Cache
from .step import Step
from .weights import Model, layer_names


def transformers_model(model: Model, attention: str = "sdpa"):
    """A Qwen3ForCausalLM that holds the tensors of `model` itself, no copies.

    `attention` is one of Transformers' implementations. ImportError without Transformers.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    c, device = model.config, model.embed.device
    config = Qwen3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # no memory: the weights come next
        net = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=model.embed.dtype
        )
    names = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    names["lm_head.weight"] = model.head
    for i, layer in enumerate(model.layers):
        for field, (name, _) in layer_names(c).items():
            names[f"model.layers.{i}.{name}.weight"] = getattr(layer, field)
    net.load_state_dict(names, assign=True)
    # Its frequencies are no weights, and were made without memory too.
    net.model.rotary_emb = type(net.model.rotary_emb)(config).to(device)
    return net.eval().requires_grad_(False)


def transformers_prefill(
    model: Model, attention: str = "sdpa"
) -> Callable[[Int64[Tensor, " T"]], Float[Tensor, " V"]]:
    """Logits after the last of T tokens, with a cache of Transformers' own.

    ImportError without Transformers.
    """
    net = transformers_model(model, attention)

    @torch.no_grad()
    def run(tokens: Tensor) -> Tensor:
        return net(input_ids=tokens[None], use_cache=True, logits_to_keep=1).logits[0, -1]

    return run


class TransformersStep(Step):
    """A call of Transformers' model for each token, with a cache of Transformers'.

    `compiled`: with its StaticCache, under torch.compile(mode="reduce-overhead"), which makes CUDA
    graphs; else eager, with its DynamicCache. `cache` holds the prompt and is not written.
    """

    def __init__(
        self, model: Model, cache: Cache, *, compiled: bool = False, attention: str = "sdpa"
    ) -> None:
        super().__init__(model, cache)
        from transformers import StaticCache

        self.compiled, self.past = compiled, None
        self.call = self.net = transformers_model(model, attention)
        if compiled:
            self.past = StaticCache(config=self.net.config, max_cache_len=self.S)
            self.call = torch.compile(self.net, mode="reduce-overhead", dynamic=False)

    def start(self, token: int | Tensor, position: int) -> None:
        """As Step.start; the keys and values so far are those of `cache`."""
        from transformers import DynamicCache

        super().start(token, position)
        if self.compiled:
            self.past.reset()  # at the same addresses, so graphs stay good
        else:
            self.past = DynamicCache(config=self.net.config)
        for i in range(len(self.model.layers) if position else 0):
            k, v = (x[i, :position].transpose(0, 1)[None] for x in (self.cache.k, self.cache.v))
            self.past.update(k, v, i)

    @torch.no_grad()
    def run(self) -> None:
        """One step."""
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        out = self.call(
            input_ids=self.tokens[self.position].long()[None],  # [1, 1]
            position_ids=self.position.long()[None],
            past_key_values=self.past,
            use_cache=True,
        )
        self.finish(out.logits[0, -1])

    def kept(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens read so far."""
        layers = [(x.keys, x.values) for x in self.past.layers]
        return tuple(
            torch.stack([x[0, :, : self.next].transpose(0, 1) for x in rows])
            for rows in zip(*layers, strict=True)
        )
