"""Weights of a Qwen3 model: from a folder in Hugging Face's layout, from the hub, or random."""

from __future__ import annotations

import labkit as lab

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import DTYPES, ModelError, Qwen3Config, read_config, read_json

SMALL = Path(__file__).parent / "small"  # the model that ships with the lab, made by train.py
HELD_OUT = "held_out.txt"  # in that folder: the text it was not trained on
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names
STD = 0.02  # of random weights: initializer_range of Qwen3's config.json


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer. A projection is [out, in], as F.linear wants it."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [H·D, hidden]
    k: Tensor  # [H_kv·D, hidden]
    v: Tensor  # [H_kv·D, hidden]
    q_norm: Tensor  # [D]: one gain for all heads
    k_norm: Tensor  # [D]
    o: Tensor  # [hidden, H·D]
    post_norm: Tensor  # [hidden]
    gate: Tensor  # [intermediate, hidden]
    up: Tensor  # [intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class Model:
    """A configuration and its weights, all of one dtype on one device."""

    config: Qwen3Config
    embed: Tensor  # [V, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden]; with tied embeddings, `embed` itself


def layer_names(config: Qwen3Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of Layer -> name of its tensor in the files, after `model.layers.N.`, and its shape."""
    hidden, wide, D = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
    return {
        "input_norm": ("input_layernorm", (hidden,)),
        "q": ("self_attn.q_proj", (q_width, hidden)),
        "k": ("self_attn.k_proj", (kv_width, hidden)),
        "v": ("self_attn.v_proj", (kv_width, hidden)),
        "q_norm": ("self_attn.q_norm", (D,)),
        "k_norm": ("self_attn.k_norm", (D,)),
        "o": ("self_attn.o_proj", (hidden, q_width)),
        "post_norm": ("post_attention_layernorm", (hidden,)),
        "gate": ("mlp.gate_proj", (wide, hidden)),
        "up": ("mlp.up_proj", (wide, hidden)),
        "down": ("mlp.down_proj", (hidden, wide)),
    }


def tensor_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the files must hold."""
    table = (config.vocab_size, config.hidden_size)
    shapes = {"model.embed_tokens.weight": table}
    for i in range(config.num_hidden_layers):
        for name, shape in layer_names(config).values():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


def assemble(config: Qwen3Config, tensors: Mapping[str, Tensor]) -> Model:
    """The model whose tensors have these names."""
    names = layer_names(config)
    layers = tuple(
        Layer(**{f: tensors[f"model.layers.{i}.{name}.weight"] for f, (name, _) in names.items()})
        for i in range(config.num_hidden_layers)
    )
    embed = tensors["model.embed_tokens.weight"]
    head = embed if config.tie_word_embeddings else tensors["lm_head.weight"]
    return Model(config, embed, layers, tensors["model.norm.weight"], head)


def cast(model: Model, dtype: torch.dtype) -> Model:
    """The same model with its weights in another dtype."""
    layers = (
        Layer(**{name: w.to(dtype) for name, w in vars(layer).items()}) for layer in model.layers
    )
    embed, norm = model.embed.to(dtype), model.norm.to(dtype)
    head = embed if model.head is model.embed else model.head.to(dtype)
    return Model(model.config, embed, tuple(layers), norm, head)


def random_model(
    config: Qwen3Config,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str = lab.DEVICE.torch,
) -> Model:
    """Seeded random weights: for timings, which need no more than the exact shape.

    Drawn on the device, where the 0.6 billion of QWEN3_0_6B take no time: the same seed gives
    other numbers on a GPU than on a CPU. `dtype` is the configuration's by default.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype or DTYPES[config.dtype]
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        x = torch.randn(shape, generator=generator, device=device)
        # Trained gains scatter around one; the rest is as it is before training.
        tensors[name] = (1 + 0.1 * x if len(shape) == 1 else STD * x).to(dtype)
    return assemble(config, tensors)


def load_model(
    folder: Path, dtype: torch.dtype | None = None, device: str = lab.DEVICE.torch
) -> Model:
    """The model in a folder: config.json and model.safetensors, or several shards and their index.

    `dtype` is that of the files by default. ModelError, before any tensor is read, for a shard that
    is missing or cut short, and for a tensor that is missing, unknown, in two shards, or of another
    shape or dtype than config.json says.
    """
    config = read_config(folder)
    shards = [(path, open_shard(path, device)) for path in shard_paths(folder)]
    count, held = config.num_hidden_layers, sum(len(shard.keys()) for _, shard in shards)
    if count > held:  # before shapes are listed, which takes memory for each layer
        why = f"num_hidden_layers={count}, and the weights hold {held} tensors"
        raise ModelError(f"{folder / 'config.json'}: {why}")
    shapes, tensors = tensor_shapes(config), {}
    # With tied embeddings, some files hold the embedding a second time, under the head's name.
    known = shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]}
    where = {}  # name of a tensor -> the shard that holds it
    for path, shard in shards:
        for name in sorted(shard.keys()):
            check_tensor(path, name, shard.get_slice(name), known.get(name), config.dtype)
            if name in where:
                raise ModelError(f"{path}: {name} is in another shard, too")
            where[name] = shard
    for name in shapes:
        if name not in where:
            single = shards[0][0].name == SINGLE
            file = SINGLE if single else read_json(folder / INDEX)["weight_map"].get(name, INDEX)
            raise ModelError(f"{folder / file}: {name} is missing")
    for name in shapes:
        tensors[name] = where[name].get_tensor(name).to(dtype or DTYPES[config.dtype])
    return assemble(config, tensors)


def shard_names(folder: Path) -> list[str]:
    """Names of a folder's weight files, there or not: what the index says, or the single one."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{folder / INDEX}: weight_map does not say which file holds which tensor")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:  # never outside the folder
            raise ModelError(f"{folder / INDEX}: {name!r} is not a file of this folder")
    return sorted(set(files.values()))


def shard_paths(folder: Path) -> list[Path]:
    """The weight files of a folder. ModelError for one that is not there."""
    paths = [folder / name for name in shard_names(folder)]
    for path in paths:
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            why = f"missing shard, which {INDEX} names" if path.name != SINGLE else "no such file"
            raise ModelError(f"{path}: {why}")
    return paths


def open_shard(path: Path, device: str):
    """A safetensors file mapped into memory. ModelError if it is cut short or none at all."""
    from safetensors import SafetensorError, safe_open  # here, so that the ladder needs it not

    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as why:
        line = " ".join(str(why).split())
        raise ModelError(f"{path}: cut short, or not a safetensors file: {line}") from None


def check_tensor(path: Path, name: str, entry, shape: tuple[int, ...] | None, dtype: str) -> None:
    """ModelError for a tensor that a model of this configuration does not have."""
    if shape is None:
        raise ModelError(f"{path}: unknown tensor {name}")
    if tuple(entry.get_shape()) != shape:
        got, want = list(entry.get_shape()), list(shape)
        raise ModelError(f"{path}: {name} has shape {got}, config.json wants {want}")
    got = entry.get_dtype()
    if STORED.get(got) != dtype:
        got = STORED.get(got, got)
        raise ModelError(f"{path}: {name} has dtype {got}, config.json says {dtype}")


def model_folder(model: str) -> Path:
    """Where a model's files are: `small`, a folder, or a hub id's, still without its weights.

    ModelError if there is no such thing, or no network.
    """
    if not model:
        raise ModelError("model='': write small, a folder, or a hub id such as Qwen/Qwen3-0.6B")
    if model == "small":
        return SMALL
    if os.path.isdir(model):
        return Path(model)
    if not HUB_ID.fullmatch(model):
        raise ModelError(f"model={model!r}: no such folder, and no hub id such as Qwen/Qwen3-0.6B")
    # The library warns of each attempt, and closes two of its bars at the end of the process only.
    # What came of it is said here, in one line, the last.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars("huggingface_hub.snapshot_download")
    with hub_errors(f"model={model!r}: no such folder, and the Hugging Face hub gave none"):
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja"]))


def fetch_weights(model: str, folder: Path) -> None:
    """Download what is not there yet of the weights of a hub id, whose folder this is.

    Shows its progress, and goes on where a download was interrupted. ModelError if it fails.
    """
    if model == "small" or os.path.isdir(model):
        return
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    for name in shard_names(folder):
        path, part = folder / name, folder / f"{name}.part"
        with (
            hub_errors(f"model={model!r}: the Hugging Face hub did not give {name}"),
            WeakFileLock(folder / f"{name}.lock"),  # two runs must not write one part
        ):
            if not path.exists():
                # The folder's name is the commit.
                download(hf_hub_url(model, name, revision=folder.name), part)
                part.rename(path)


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """One line for whatever the HTTP library raises; its classes change."""
    try:
        yield
    except (ModelError, ModuleNotFoundError):
        raise
    except Exception as why:
        line = (str(why).strip() or type(why).__name__).splitlines()[0]
        raise ModelError(f"{what}: {line}") from None


def download(url: str, part: Path) -> None:
    """Write a file of the hub to `part`, after what is there of it already.

    Since 1.18 the library starts a file that was interrupted from its beginning in the next run,
    and Qwen3-0.6B is a single file of 1.5 GB. So the part that came is kept.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    size, headers = get_hf_file_metadata(url).size, build_hf_headers()
    part.touch()
    if size is None or part.stat().st_size > size:  # nothing to go on from
        os.truncate(part, 0)
    try:
        with part.open("ab") as file:
            http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)
    except (Exception, KeyboardInterrupt) as why:
        if size is None or not part.stat().st_size:
            part.unlink()
            raise
        kept = f"{part}: the download stopped; this part is kept, and a second run goes on from it"
        if isinstance(why, KeyboardInterrupt):
            print(kept, file=sys.stderr)
            raise
        with hub_errors(kept):
            raise
