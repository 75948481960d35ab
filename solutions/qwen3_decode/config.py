"""What a Qwen3 model's config.json says, checked before anything else is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What other models of the family may say here, and nothing in this package computes.
FIXED = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


class ModelError(ValueError):
    """One line on a model, a prompt or a download that the user can mend."""


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3 model under config.json's names. ModelError if they do not fit together."""

    vocab_size: int  # V
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # H_kv
    head_dim: int  # D; H·D need not be hidden_size
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool  # the rows of the embedding are those of the LM head too
    dtype: str  # of the stored weights
    stop_tokens: tuple[int, ...] = ()  # each of these ends a text

    def __post_init__(self) -> None:
        """Check every value, then that heads divide into groups and pairs."""
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"{name}={value!r} is not a positive integer")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise ModelError(f"{name}={value!r} is not a positive number")
            object.__setattr__(self, name, float(value))  # torch takes no integer beyond 64 bits
        if type(self.tie_word_embeddings) is not bool:
            raise ModelError(f"tie_word_embeddings={self.tie_word_embeddings!r}: true or false")
        if self.dtype not in tuple(DTYPES):
            raise ModelError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        H, H_kv = self.num_attention_heads, self.num_key_value_heads
        if H % H_kv:
            raise ModelError(
                f"num_attention_heads={H} is no multiple of num_key_value_heads={H_kv}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd: rotation pairs its halves")
        for token in self.stop_tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ModelError(
                    f"eos_token_id={token!r} is not a token: vocab_size={self.vocab_size}"
                )


QWEN3_0_6B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    dtype="bfloat16",
    stop_tokens=(151_645, 151_643),
)
"""The shape of Qwen/Qwen3-0.6B: random weights of it need no download."""


def read_json(path: Path) -> dict:
    """The object in a JSON file. ModelError that names the file if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as why:
        raise ModelError(f"{path}: {why.strerror}") from None
    except (ValueError, RecursionError) as why:  # broken, no text, or nested too deep
        raise ModelError(f"{path}: not JSON: {why}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is wanted, this is a {type(value).__name__}")
    return value


def read_config(folder: Path) -> Qwen3Config:
    """The configuration in a folder of Hugging Face's layout.

    ModelError for a folder or file that is not there or not readable, for another architecture,
    and for values that are missing or do not fit together.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    path = folder / "config.json"
    raw = read_json(path)
    for key, want in FIXED.items():
        if (key == "model_type" or key in raw) and raw.get(key) != want:
            raise ModelError(f"{path}: {key}={raw.get(key)!r}, and only {want!r} is computed here")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelError(
            f"{path}: layer_types={kinds!r}, and only 'full_attention' is computed here"
        )
    # Transformers 4 wrote rope_theta, rope_scaling and torch_dtype, 5 writes the other names.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: rope_parameters={rope!r} is no object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"{path}: rope_type={kind!r}, and only 'default' is computed here")
    values = {name: raw.get(name) for name in COUNTS}
    values |= {
        "rms_norm_eps": raw.get("rms_norm_eps"),
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta")),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "dtype": raw.get("dtype") or raw.get("torch_dtype"),
    }
    for name, value in values.items():
        if value is None:
            raise ModelError(f"{path}: {name} is missing")
    source, stops = stop_tokens(folder, raw)
    try:
        config = Qwen3Config(**values)
        path = source  # of what is wrong from here on
        return replace(config, stop_tokens=stops)
    except ModelError as why:
        raise ModelError(f"{path}: {why}") from None


def stop_tokens(folder: Path, raw: Mapping) -> tuple[Path, tuple[int, ...]]:
    """Ids that end a text, and their file: generation_config.json if it has any, or config.json."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        path, ids = folder / "config.json", raw.get("eos_token_id")
    if ids is None:
        ids = []
    return path, tuple(ids) if isinstance(ids, list) else (ids,)
