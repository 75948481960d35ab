"""Prompts for the gate: seeded lengths and tokens, random ones or windows of a text.

A prompt is one token longer than what is read of it: the last one is there to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import ModelError, Qwen3Config

SHORTEST, LONGEST = 32, 1024  # tokens of a prompt


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Seeded prompt lengths of SHORTEST to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHORTEST, longest + 1, (count,), generator=generator).tolist()


def random_prompts(config: Qwen3Config, count: int = 256, seed: int = 0) -> list[Tensor]:
    """Prompts of random tokens, and one token more for the last to be judged by."""
    generator, longest = torch.Generator().manual_seed(seed), min(LONGEST, room(config))
    return [
        torch.randint(config.vocab_size, (T + 1,), generator=generator)
        for T in lengths(count, longest, seed)
    ]


def text_prompts(
    config: Qwen3Config, tokens: Sequence[int], count: int = 256, seed: int = 0
) -> list[Tensor]:
    """Windows of a text, at seeded places. ModelError for a text that is too short."""
    generator, longest = torch.Generator().manual_seed(seed), min(LONGEST, room(config))
    if len(tokens) <= longest:
        raise ModelError(f"tokens: {len(tokens)}, a prompt needs {longest + 1}")
    windows = []
    for T in lengths(count, longest, seed):
        at = int(torch.randint(len(tokens) - T, (1,), generator=generator))
        windows.append(torch.tensor(tokens[at : at + T + 1]))
    return windows


def room(config: Qwen3Config) -> int:
    """The model's positions. ModelError if no prompt fits."""
    if config.max_position_embeddings < SHORTEST:
        raise ModelError(
            f"max_position_embeddings={config.max_position_embeddings}: a prompt has {SHORTEST}"
        )
    return config.max_position_embeddings
