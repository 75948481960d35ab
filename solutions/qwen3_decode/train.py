"""Train the small model that ships with the lab: tokenizer, weights, loss curve.

    python -m solutions.qwen3_decode.train TEXT --out FOLDER

The text is short for a model of this size. After some passes over it the loss on text that was not
trained on, its last tenth, rises again: the model learns the text by heart. So that loss is taken
every EVERY steps and the weights with the lowest are kept; training ends when PATIENCE of them in
a row bring no lower one. The tokenizer sees none of the last tenth either. But since the weights
are chosen by their held-out loss, that loss is a little lower than on text never looked at.

Writes FOLDER in Hugging Face's layout, or nothing: config.json, model.safetensors in bf16,
tokenizer.json, tokenizer_config.json, training.json with the loss curve, and held_out.txt, the last
tenth.
"""

from __future__ import annotations

import labkit as lab

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, embedding, linear
from torch.nn.functional import scaled_dot_product_attention as sdpa

from solutions import rms_norm, rope, swiglu

from .config import ModelError, Qwen3Config
from .weights import HELD_OUT, SINGLE, STD, Model, assemble, load_model, tensor_shapes

# 3.4 million weights, 6.8 MB in bf16.
SMALL = Qwen3Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,  # 8·64 is twice hidden_size, as in Qwen3-0.6B
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,  # Qwen3's 1e6 is for contexts of 32 Ki
    tie_word_embeddings=True,
    dtype="bfloat16",
)
TENTH = 0.1  # of the text, its end, is held out
EVERY, PATIENCE = 50, 12  # steps between two held-out losses; how many may pass without a lower one


@dataclass(frozen=True)
class Recipe:
    """What training.json must say so that someone can train the same model again."""

    steps: int = 3000  # at most
    batch: int = 4  # sequences of max_position_embeddings tokens
    learning_rate: float = 1e-3  # at its peak
    warmup: int = 100  # steps
    weight_decay: float = 0.1  # of matrices, not of gains
    dropout: float = 0.3  # of the embedding and of what each layer adds; in training only
    seed: int = 0


RECIPE = Recipe()


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-pair encoding over bytes: any text has tokens, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def initial(config: Qwen3Config, seed: int, device: str) -> dict[str, Tensor]:
    """Gains of one and small random matrices, drawn on the CPU: the same on every machine."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in tensor_shapes(config).items():
        # Two matrices a layer add to the residual stream, which should not grow with the layers.
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = STD / math.sqrt(2 * config.num_hidden_layers) if adds else STD
        x = torch.ones(shape) if len(shape) == 1 else std * torch.randn(shape, generator=generator)
        tensors[name] = x.to(device).requires_grad_()
    return tensors


def logits_of(model: Model, tokens: Tensor, p: float) -> Tensor:
    """Logits [B, T, V] of whole sequences [B, T]: reference.forward for batches, with dropout."""
    c = model.config
    B, T = tokens.shape
    D, eps = c.head_dim, c.rms_norm_eps
    cos_sin = rope.cos_sin_table(T, D, c.rope_theta, tokens.device)
    positions = torch.arange(T, device=tokens.device).repeat(B)
    x = dropout(embedding(tokens, model.embed), p)
    for w in model.layers:
        h = rms_norm.library(x, w.input_norm, eps)
        q = rms_norm.library(linear(h, w.q).view(B * T, -1, D), w.q_norm, eps)
        k = rms_norm.library(linear(h, w.k).view(B * T, -1, D), w.k_norm, eps)
        v = linear(h, w.v).view(B, T, -1, D).transpose(1, 2)  # [B, H_kv, T, D]
        q, k = (y.view(B, T, -1, D).transpose(1, 2) for y in rope.library(q, k, cos_sin, positions))
        o = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        x = x + dropout(linear(o.transpose(1, 2).flatten(2), w.o), p)
        h = rms_norm.library(x, w.post_norm, eps)
        h = linear(swiglu.library(linear(h, w.gate), linear(h, w.up)), w.down)
        x = x + dropout(h, p)
    return linear(rms_norm.library(x, model.norm, eps), model.head)


def loss_of(model: Model, tokens: Tensor, p: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of tokens 1 … T of sequences [B, T + 1]."""
    logits = logits_of(model, tokens[:, :-1], p).float().flatten(0, 1)
    return cross_entropy(logits, tokens[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def held_out_loss(model: Model, tokens: Tensor, batch: int) -> float:
    """Mean nats per token of a text, in windows that fill the model's positions."""
    T, count = model.config.max_position_embeddings, len(tokens) - 1
    whole = count // T
    pieces = list(tokens[: whole * T + 1].unfold(0, T + 1, T).split(batch)) if whole else []
    if count % T:
        pieces.append(tokens[whole * T :][None])  # the rest is one short window
    return sum(loss_of(model, piece, reduction="sum").item() for piece in pieces) / count


def rate_at(step: int, recipe: Recipe) -> float:
    """The share of the peak learning rate: up in a line, down in a cosine to a tenth."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def fit(
    config: Qwen3Config, recipe: Recipe, learn: Tensor, held_out: Tensor, say: Callable[[str], None]
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The tensors with the lowest held-out loss, and the loss curve."""
    device, T = learn.device, config.max_position_embeddings
    torch.manual_seed(recipe.seed)  # dropout
    draw = torch.Generator().manual_seed(recipe.seed)  # batches
    tensors = initial(config, recipe.seed, device)
    model = assemble(config, tensors)
    matrices = [x for x in tensors.values() if x.dim() > 1]
    gains = [x for x in tensors.values() if x.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, recipe))
    best, best_step, kept, curve, recent = math.inf, 0, {}, [], []
    for step in range(1, recipe.steps + 1):
        starts = torch.randint(len(learn) - T, (recipe.batch, 1), generator=draw).to(device)
        tokens = learn[starts + torch.arange(T + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, tokens, recipe.dropout)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.detach())
        if step % EVERY and step < recipe.steps:
            continue
        point = {
            "step": step,
            "train_loss": torch.stack(recent).mean().item(),  # with dropout, over these steps
            "held_out_loss": held_out_loss(model, held_out, recipe.batch),
        }
        curve.append(point)
        recent = []
        say(f"step {step}: loss {point['train_loss']:.3f}, held out {point['held_out_loss']:.3f}")
        if point["held_out_loss"] < best:
            best, best_step = point["held_out_loss"], step
            kept = {name: x.detach().clone() for name, x in tensors.items()}
        elif step - best_step >= PATIENCE * EVERY:
            break
    if not kept:
        raise ModelError("training diverged: the held-out loss is no number")
    return kept, curve


def train(
    text: str,
    folder: Path,
    config: Qwen3Config = SMALL,
    recipe: Recipe = RECIPE,
    say: Callable[[str], None] = print,
    device: str = lab.DEVICE.torch,
) -> dict:
    """Train on `text` and write `folder`, which must not exist. Returns what training.json holds.

    ModelError, and nothing written, if the folder is there or the text too short.
    """
    if folder.exists():
        raise ModelError(f"{folder}: already there; remove it first, or write to another folder")
    began = time.perf_counter()
    where = lab.DEVICE.name if device == "cuda" else "CPU"
    split = round(len(text) * (1 - TENTH))
    tokenizer = train_tokenizer(text[:split], config.vocab_size)
    learn, held_out = (
        torch.tensor(tokenizer.encode(part).ids, device=device)
        for part in (text[:split], text[split:])
    )
    if len(learn) <= config.max_position_embeddings or len(held_out) < 2:
        need = config.max_position_embeddings + 1
        raise ModelError(f"the text is too short: {len(learn)} tokens to learn from, {need} needed")
    say(f"{len(learn)} tokens to learn from, {len(held_out)} held out, on {where}")
    tensors, curve = fit(config, recipe, learn, held_out, say)
    record = {
        "text": {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "characters": len(text),
            "held_out_characters": len(text) - split,
            "train_tokens": len(learn),
            "held_out_tokens": len(held_out),
        },
        "recipe": asdict(recipe) | {"every": EVERY, "patience": PATIENCE},
        "weights": sum(x.numel() for x in tensors.values()),
        "best_step": min(curve, key=lambda point: point["held_out_loss"])["step"],
        "curve": curve,
        "device": where,
        "torch": torch.__version__,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".training-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        save(made, config, tensors, tokenizer)
        # Of the rounded weights, read back from the file in fp32: what a reader will have.
        shipped = load_model(made, torch.float32, device)
        per_token = held_out_loss(shipped, held_out, recipe.batch)
        characters = len(tokenizer.decode(held_out[1:].tolist()))
        record |= {
            "held_out_loss": per_token,
            "held_out_loss_per_character": per_token * (len(held_out) - 1) / characters,
            "seconds": round(time.perf_counter() - began, 1),
        }
        write_json(made / "training.json", record)
        (made / HELD_OUT).write_text(text[split:], encoding="utf-8", newline="")
        os.rename(made, folder)
    say(f"wrote {folder}: held-out loss {per_token:.3f} nats a token")
    return record


def write_json(path: Path, value: dict) -> None:
    """Write it for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save(folder: Path, config: Qwen3Config, tensors: dict[str, Tensor], tokenizer: Tokenizer):
    """Write the four files that Transformers reads, the tensors in the configuration's dtype."""
    raw = asdict(config)
    dtype = getattr(torch, raw.pop("dtype"))
    raw |= {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": STD,
        "torch_dtype": config.dtype,
        "eos_token_id": list(raw.pop("stop_tokens")) or None,
    }
    write_json(folder / "config.json", raw)
    save_file(
        {name: x.to("cpu", dtype).contiguous() for name, x in tensors.items()},
        folder / SINGLE,
        metadata={"format": "pt"},  # Transformers refuses files that do not say so
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "text", type=Path, help="a text file in UTF-8, for instance tinyshakespeare"
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=RECIPE.steps, help="at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=RECIPE.seed)
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if options.steps < 1:
            raise ModelError(f"--steps {options.steps}: at least one is needed")
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as why:
            raise ModelError(f"{options.text}: {getattr(why, 'strerror', None) or why}") from None
        train(text, options.out, recipe=Recipe(steps=options.steps, seed=options.seed))
    except ModelError as why:
        print(why, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
