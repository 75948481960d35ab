"""From a prompt to text: tokenizer, chat template, greedy decoding, `lab generate`."""

from __future__ import annotations

import labkit as lab

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .config import DTYPES, ModelError, read_config, read_json
from .prefill import prefill
from .reference import Cache, forward, new_cache
from .step import FIRST_DEPENDENT, DecodeStep, OpsStep, Step
from .weights import Model, fetch_weights, load_model, model_folder

Decoder = Callable[[Model, Cache], Step | None]  # if it makes no step, the reference decodes


class Template(NamedTuple):
    """A chat template and the file it is from."""

    text: str
    path: Path


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder. ModelError if tokenizer.json is not there or not readable."""
    path = folder / "tokenizer.json"
    read_json(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as why:  # the library raises no narrower class
        raise ModelError(f"{path}: not a tokenizer: {why}") from None


def chat_template(folder: Path) -> Template | None:
    """The chat template in a folder, from its own file or from tokenizer_config.json.

    ModelError for one that is no text, and for several of which none is the default.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return Template(path.read_text(encoding="utf-8"), path)
        except (OSError, UnicodeDecodeError) as why:
            raise ModelError(f"{path}: not readable: {why}") from None
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(template, list):  # several, each with its name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        if not named:
            raise ModelError(f"{path}: chat_template has none with the name 'default'")
        template = named[-1].get("template")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelError(f"{path}: chat_template is no text")
    return Template(template, path)


def as_chat(template: Template, prompt: str) -> str:
    """What a chat model reads: the prompt as a user's message, then the start of an answer."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str):
        raise TemplateError(message)

    # Templates come with the model, from anyone: the sandbox keeps them from running code.
    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    world.filters["tojson"] = lambda x, **how: json.dumps(x, **{"ensure_ascii": False, **how})
    world.globals["raise_exception"] = refuse
    try:
        return world.from_string(template.text).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True
        )
    except Exception as why:  # a template is a program: it may fail in any way
        line = " ".join(str(why).split())
        raise ModelError(f"{template.path}: the chat template fails: {line}") from None


def prompt_tokens(tokenizer: Tokenizer, template: Template | None, prompt: str) -> list[int]:
    """Token ids of a prompt."""
    if template is None:
        return tokenizer.encode(prompt).ids
    return tokenizer.encode(as_chat(template, prompt), add_special_tokens=False).ids


def decoder(model: Model) -> Decoder | None:
    """What decodes this model fastest: on a GPU, in bfloat16, kernels in a CUDA graph.

    None for the reference: on a CPU, or in another dtype.
    """
    on_gpu = model.embed.is_cuda and model.embed.dtype == torch.bfloat16
    return in_graph if on_gpu else None


def opt_in(rung: str) -> bool:
    """Whether the recorded gate keeps a rung from being used unasked.

    This machine's gate says it; without one, that of the device whose numbers the text quotes.
    """
    for device in (lab.DEVICE.slug, None):
        try:
            gates = lab.results("qwen3_decode", device).data["model"]["gates"]
        except FileNotFoundError:  # nothing was recorded
            continue
        if found := [g["opt_in"] for g in gates if g["rung"] == rung]:
            return any(found)
    return False


def in_graph(model: Model, cache: Cache) -> Step | None:
    """The chain of kernels where it passed the gate and takes the model, else the chapters' ops.

    None, for the reference, if those did not pass either.
    """
    step = None
    dependent = torch.cuda.get_device_capability(model.embed.device) >= FIRST_DEPENDENT
    dependent = dependent and not opt_in("qwen3_decode_dependent")
    if dependent or not opt_in("qwen3_decode_chained"):
        with contextlib.suppress(ModelError):  # sizes that the chain's kernels do not have
            step = DecodeStep(model, cache, dependent=dependent)
    if step is None and not opt_in("qwen3_decode_fused_graph"):
        step = OpsStep(model, cache)
    if step is not None:
        step.capture()
    return step


def greedy(
    model: Model,
    tokens: Sequence[int],
    count: int,
    S: int | None = None,
    build: Decoder | None = None,
) -> Iterator[int]:
    """Up to `count` tokens after `tokens`, each the likeliest one, one at a time.

    Ends early before a stop token, and when the cache of S slots is full. S is by default what is
    needed, at most the model's positions. `build` makes the step that decodes; without one the
    reference does. ModelError, at once, if `tokens` are none, not in the vocabulary, or more than
    S, and if `count` is negative.
    """
    V, room = model.config.vocab_size, model.config.max_position_embeddings
    S = min(len(tokens) + max(count, 1) - 1, room) if S is None else S  # the last one needs no slot
    if count < 0:
        raise ModelError(f"tokens={count}: it must not be negative")
    if not tokens:
        raise ModelError("the prompt has no tokens")
    for token in tokens:
        if not 0 <= token < V:
            raise ModelError(f"token {token} is outside the vocabulary of {V}")
    if len(tokens) > S:
        raise ModelError(f"the prompt has {len(tokens)} tokens, the cache {S} slots")
    return _greedy(model, tokens, min(count, S - len(tokens) + 1), S, build)


def _greedy(
    model: Model, tokens: Sequence[int], count: int, S: int, build: Decoder | None
) -> Iterator[int]:
    device, step = model.embed.device, None
    cache = new_cache(model.config, S, model.embed.dtype, device)
    for position in range(len(tokens), len(tokens) + count):  # of the token that comes
        if position == len(tokens):
            prompt = torch.tensor(tokens, device=device)
            read = prefill(model, prompt, cache) if build else forward(model, prompt, cache, last=1)
            token = int(read.argmax())
        else:
            if build and position == len(tokens) + 1 and (step := build(model, cache)):
                step.start(token, position - 1)
            if step:
                token = int(step.decode_many(1))
            else:
                last = torch.tensor([token], device=device)
                token = int(forward(model, last, cache, position - 1).argmax())
        if token in model.config.stop_tokens:
            return
        yield token


def write(prompt: str, model: str = "small", tokens: int = 100, dtype: str | None = None) -> None:
    """Print the model's text as it comes: what `lab generate` does.

    `model` is "small", a folder or a hub id. A model without a chat template goes on with the
    prompt; one with a template answers it. `tokens` is how many at most. `dtype` is a name of
    config.DTYPES, by default that of the files. ModelError for whatever the user can mend.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if not prompt:
        raise ModelError("prompt='': write at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text
        raise ModelError(f"{prompt=}: not UTF-8") from None
    if tokens < 0:
        raise ModelError(f"tokens={tokens}: it must not be negative")
    folder = model_folder(model)
    room = read_config(folder).max_position_embeddings
    tokenizer, template = load_tokenizer(folder), chat_template(folder)
    ids = prompt_tokens(tokenizer, template, prompt)
    if len(ids) > room:  # before there are any weights
        raise ModelError(f"the prompt has {len(ids)} tokens, the cache {room} slots")
    fetch_weights(model, folder)
    loaded = load_model(folder, dtype and DTYPES[dtype], lab.DEVICE.torch)
    new = greedy(loaded, ids, tokens, build=decoder(loaded))
    print(prompt if template is None else "", end="", flush=True)
    stream = DecodeStream(skip_special_tokens=True)  # holds back half a character
    count = 0
    for count, token in enumerate(new, 1):  # noqa: B007
        print(stream.step(tokenizer, token) or "", end="", flush=True)
    print()
    if count < tokens and len(ids) + count > room:
        print(f"(stopped: the model has {room} positions)", file=sys.stderr)
