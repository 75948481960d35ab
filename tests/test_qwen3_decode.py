"""The model of the last chapter: configuration, weights, reference, generation, training."""

import labkit as lab

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from solutions.qwen3_decode import config, generate, reference, rungs, train, weights
from solutions.qwen3_decode.config import ModelError
from solutions.qwen3_decode.step import DecodeStep

ROOT = Path(__file__).resolve().parent.parent
TINY = replace(
    train.SMALL,
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # 4·32 is not 48
    max_position_embeddings=64,
)
RECIPE = replace(train.RECIPE, steps=6, batch=4, warmup=2)
TEXT = "".join(
    f"{n} bottles hang on the wall; if {n % 7} fall, {n + 1} are left.\n" for n in range(300)
)
SHAPES = {
    "tied": TINY,
    "own head": replace(TINY, tie_word_embeddings=False, vocab_size=301),
    "no groups": replace(TINY, num_key_value_heads=4, head_dim=16),
    "one kv head": replace(TINY, num_key_value_heads=1, intermediate_size=81),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that saw a little text, as train.py writes it."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    train.train(TEXT, made, TINY, RECIPE, say=lambda line: None, device="cpu")
    return made


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def save_random(shape, dtype, folder):
    """Random weights in `folder`, with products of size one, so that every operation counts."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(size, generator=generator) / size[-1] ** 0.5
        if len(size) > 1
        else 1 + 0.1 * torch.randn(size, generator=generator)
        for name, size in weights.tensor_shapes(shape).items()
    }
    folder.mkdir(exist_ok=True)
    train.save(folder, replace(shape, dtype=name), tensors, train.train_tokenizer(TEXT, 300))
    return folder


def transformers_model(folder, how="eager", dtype="auto"):
    transformers = pytest.importorskip("transformers")
    # From disk: .to(bfloat16) would round the frequencies of the rotation too.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=how, dtype=dtype, local_files_only=True
    ).eval()


def tokens_of(model, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator)


@torch.no_grad()
def both(folder, pieces, how="eager", dtype=None):
    """Logits of our reference and of Transformers for tokens that come in pieces of these sizes."""
    from transformers import DynamicCache

    ours = weights.load_model(folder, dtype, "cpu")
    theirs = transformers_model(folder, how, dtype or "auto")
    tokens, start, logits = tokens_of(ours, sum(pieces)), 0, ([], [])
    cache = reference.new_cache(ours.config, 64, ours.embed.dtype, "cpu")
    theirs_cache = DynamicCache(config=theirs.config)
    for piece in tokens.split(pieces):
        logits[0].append(reference.forward(ours, piece, cache, start))
        logits[1].append(
            theirs(piece[None], past_key_values=theirs_cache, use_cache=True).logits[0]
        )
        start += len(piece)
    return torch.cat(logits[0]), torch.cat(logits[1])


# The reference ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefill_and_decode_have_the_bits_of_transformers(shape, dtype, tmp_path):
    pytest.importorskip("transformers")
    save_random(shape, dtype, tmp_path)
    for pieces in ([1, 1, 1], [33, 1, 1, 1, 1], [7, 20, 1], [64]):  # [7, 20]: a prompt in two parts
        ours, theirs = both(tmp_path, pieces)
        assert ours.dtype == theirs.dtype == dtype
        assert torch.equal(ours, theirs), pieces


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_against_sdpa_only_attention_differs(dtype, tmp_path, monkeypatch):
    """Transformers' default has other last bits; with its attention, ours has them too."""
    pytest.importorskip("transformers")
    save_random(TINY, dtype, tmp_path)
    ours, theirs = both(tmp_path, [40], "sdpa")
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).abs().max() <= 64 * torch.finfo(dtype).eps * theirs.abs().max()

    def attention(q, k, v):
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    monkeypatch.setattr(reference, "attention", attention)
    ours, theirs = both(tmp_path, [40], "sdpa")
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_bits_are_equal_in_another_dtype_than_the_files(folder):
    pytest.importorskip("transformers")
    ours, theirs = both(folder, [30, 1, 1], dtype=torch.float32)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_only_the_last_logits_are_computed_if_asked():
    model = weights.random_model(TINY, dtype=torch.float32, device="cpu")
    tokens = tokens_of(model, 9)
    whole, last = (
        reference.forward(model, tokens, reference.new_cache(TINY, 9, torch.float32, "cpu"), last=n)
        for n in (None, 2)
    )
    assert last.shape == (2, TINY.vocab_size)
    torch.testing.assert_close(last, whole[-2:])


def test_slots_past_the_context_do_not_matter():
    model = weights.random_model(TINY, dtype=torch.float32, device="cpu")
    tokens, want = tokens_of(model, 9), None
    for fill in (0.0, float("nan")):
        cache = reference.new_cache(TINY, 20, torch.float32, "cpu")
        cache.k.fill_(fill)
        cache.v.fill_(fill)
        got = reference.forward(model, tokens, cache)
        got = torch.cat((got, reference.forward(model, tokens[:1], cache, 9)))
        assert cache.k.shape == (2, 20, 2, 32)  # chapter 04's [S, H_kv, D] for each layer
        want = got if want is None else want
        assert torch.equal(got, want)


def test_cache_larger_than_the_memory_is_named():
    config = replace(TINY, max_position_embeddings=10**15)
    with pytest.raises(ModelError, match=r"no memory for a cache of 10{15} slots, [\d,]+\.\d GB"):
        reference.new_cache(config, 10**15, torch.float32, "cpu")


def test_cache_refuses_what_does_not_fit():
    model = weights.random_model(TINY, dtype=torch.float32, device="cpu")
    cache = reference.new_cache(TINY, 8, torch.float32, "cpu")
    with pytest.raises(ModelError, match="9 tokens do not fit into a cache of 8 slots"):
        reference.forward(model, tokens_of(model, 9), cache)
    with pytest.raises(ModelError, match="9 tokens do not fit"):
        reference.forward(model, tokens_of(model, 2), cache, start=7)
    for slots in (0, 65):
        with pytest.raises(ModelError, match=f"cache of {slots} slots; the model has 64"):
            reference.new_cache(TINY, slots, torch.float32, "cpu")


# Weights ------------------------------------------------------------------------------------------


def test_shape_of_qwen3_0_6b():
    shapes = weights.tensor_shapes(config.QWEN3_0_6B)
    assert len(shapes) == 2 + 28 * 11
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 596_049_920


def test_random_weights_are_seeded():
    first, again, other = (weights.random_model(TINY, seed, device="cpu") for seed in (3, 3, 4))
    assert first.embed.dtype == torch.bfloat16
    assert first.head is first.embed
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.layers[1].down, other.layers[1].down)


def sharded(folder, to):
    """The same model, as Transformers writes it in several shards."""
    transformers_model(folder).save_pretrained(to, max_shard_size="50KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, to)
    assert len(list(to.glob("*.safetensors"))) > 2
    return to


def test_shards_load_like_one_file(folder, tmp_path):
    one, several = (
        weights.load_model(f, device="cpu") for f in (folder, sharded(folder, tmp_path))
    )
    assert torch.equal(one.embed, several.embed)
    for a, b in zip(one.layers, several.layers, strict=True):
        assert all(torch.equal(x, vars(b)[field]) for field, x in vars(a).items())
    assert one.config == several.config  # Transformers 5's names, and 4's that train.py writes


def test_dtype_may_be_chosen(folder):
    stored, wide = (weights.load_model(folder, d, "cpu") for d in (None, torch.float32))
    assert (stored.embed.dtype, wide.embed.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stored.embed.float(), wide.embed)


def test_a_tied_head_in_the_file_is_left_out(copied):
    """Qwen3-0.6B's file holds the embedding twice."""
    rewrite(copied, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    model = weights.load_model(copied, device="cpu")
    assert model.head is model.embed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1].clone(), r"lm_head.weight has shape \[299, 48\], .* wants \[300, 48\]"),
        (lambda x: x.float(), "lm_head.weight has dtype float32, config.json says bfloat16"),
    ],
    ids=["shape", "dtype"],
)
def test_a_tied_head_that_is_none_is_refused(change, message, copied):
    rewrite(copied, lambda t: t | {"lm_head.weight": change(t["model.embed_tokens.weight"])})
    with pytest.raises(ModelError, match=f"model.safetensors: {message}"):
        weights.load_model(copied, device="cpu")


# Bad folders --------------------------------------------------------------------------------------


def rewrite(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = change({name: x.clone() for name, x in load_file(path).items()})
    save_file(tensors, path, {"format": "pt"})


def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def replaced(name, change):
    return lambda f: rewrite(f, lambda t: t | {name: change(t[name])})


def without(name):
    return lambda f: rewrite(f, lambda t: {k: v for k, v in t.items() if k != name})


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_WEIGHTS = {
    "none": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "cut": (lambda f: cut(f / "model.safetensors", 0.5), "model.safetensors: cut short"),
    "cut in the header": (lambda f: cut(f / "model.safetensors", 0.001), "safetensors: cut short"),
    "empty file": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors: cut short"),
    "a pointer": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        "model.safetensors: cut short, or not a safetensors file",
    ),
    "shape": (replaced(Q, lambda x: x[:-1]), rf"{Q} has shape \[127, 48\], .* wants \[128, 48\]"),
    "turned": (replaced(Q, lambda x: x.T.contiguous()), rf"{Q} has shape \[48, 128\]"),
    "dtype": (
        replaced(Q, lambda x: x.float()),
        f"{Q} has dtype float32, config.json says bfloat16",
    ),
    "integers": (replaced(Q, lambda x: x.to(torch.int8)), f"{Q} has dtype I8, config.json says"),
    "missing": (without(Q), f"model.safetensors: {Q} is missing"),
    "layers": (
        lambda f: edit(f / "config.json", num_hidden_layers=30_000_000),  # no list of their names
        "config.json: num_hidden_layers=30000000, and the weights hold 24 tensors",
    ),
    "unknown": (
        lambda f: rewrite(f, lambda t: t | {"model.layers.2.extra": torch.ones(1)}),
        "unknown tensor model.layers.2.extra",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_named(case, copied):
    damage, message = BAD_WEIGHTS[case]
    damage(copied)
    with pytest.raises(ModelError, match=message) as failure:
        weights.load_model(copied, device="cpu")
    one_line(failure.value, copied)


def test_bad_shards_are_named(folder, tmp_path):
    sharded(folder, tmp_path)
    first, shard = sorted(tmp_path.glob("*.safetensors"))[:2]
    whole = shard.read_bytes()
    shard.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=rf"{shard.name}: \S+ is in another shard, too"):
        weights.load_model(tmp_path, device="cpu")
    shard.write_bytes(whole)
    cut(shard, 0.9)
    with pytest.raises(ModelError, match=f"{shard.name}: cut short"):
        weights.load_model(tmp_path, device="cpu")
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}: missing shard, which") as failure:
        weights.load_model(tmp_path, device="cpu")
    one_line(failure.value, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "y" * 300}}))
    with pytest.raises(ModelError, match="y: missing shard, which") as failure:
        weights.load_model(tmp_path, device="cpu")
    one_line(failure.value, tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index.json: weight_map does not say"):
        weights.load_model(tmp_path, device="cpu")
    index.write_text('{"weight_map": {"x": "../y"}}')
    with pytest.raises(ModelError, match=r"index.json: '../y' is not a file of this folder"):
        weights.load_model(tmp_path, device="cpu")


def test_a_missing_tensor_is_named_with_the_file_that_lacks_it(folder, tmp_path):
    sharded(folder, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    path = tmp_path / listed[Q]
    held = weights.open_shard(path, "cpu")
    others = {name: held.get_tensor(name).clone() for name in held.keys() if name != Q}  # noqa: SIM118
    train.save_file(others or {"x": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{path.name}: {Q} is missing"):
        weights.load_model(tmp_path, device="cpu")
    del listed[Q]
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ModelError, match=f"{index.name}: {Q} is missing"):
        weights.load_model(tmp_path, device="cpu")


def one_line(error, folder):
    assert "\n" not in str(error)
    assert str(folder) in str(error)


BAD_CONFIGS = {
    "model_type": ("llama", "model_type='llama', and only 'qwen3'"),
    "hidden_act": ("gelu", "hidden_act='gelu'"),
    "attention_bias": (True, "attention_bias=True"),
    "use_sliding_window": (True, "use_sliding_window=True"),
    "quantization_config": ({"bits": 4}, "quantization_config={'bits': 4}"),
    "layer_types": (["full_attention", "sliding_attention"], "layer_types="),
    "rope_scaling": ({"rope_type": "yarn", "factor": 4.0}, "rope_type='yarn'"),
    "rope_parameters": (7, "rope_parameters=7 is no object"),
    "num_hidden_layers": (0, "num_hidden_layers=0 is not a positive integer"),
    "hidden_size": ("48", "hidden_size='48' is not a positive integer"),
    "head_dim": (33, "head_dim=33 is odd"),
    "num_key_value_heads": (3, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    "rms_norm_eps": (-1e-6, "rms_norm_eps=-1e-06 is not a positive number"),
    "rope_theta": (None, "rope_theta is missing"),
    "torch_dtype": ("int8", "dtype='int8' is not one of"),
    "eos_token_id": (300, "eos_token_id=300 is not a token: vocab_size=300"),
    "tie_word_embeddings": ("yes", "tie_word_embeddings='yes'"),
}


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("key", BAD_CONFIGS)
def test_bad_configs_are_named(key, copied):
    value, message = BAD_CONFIGS[key]
    edit(copied / "config.json", **{key: value})
    with pytest.raises(ModelError, match=re.escape(message)) as failure:
        config.read_config(copied)
    one_line(failure.value, copied / "config.json")


def test_bad_files_are_named(copied, tmp_path):
    with pytest.raises(ModelError, match=r"nowhere: no such folder"):
        config.read_config(tmp_path / "nowhere")
    for text, message in (
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[]", "a JSON object is wanted, this is a list"),
    ):
        (copied / "config.json").write_text(text)
        with pytest.raises(ModelError, match=rf"config.json: {message}"):
            config.read_config(copied)
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        config.read_config(copied)
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
        generate.load_tokenizer(copied)


def test_the_published_configuration_is_read(tmp_path):
    """What Qwen/Qwen3-0.6B has in config.json and generation_config.json on the hub."""
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    stop = {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stop | {"temperature": 0.6}))
    assert config.read_config(tmp_path) == config.QWEN3_0_6B


def test_stop_tokens_come_from_generation_config_first(copied):
    edit(copied / "config.json", eos_token_id=7)
    assert config.read_config(copied).stop_tokens == (7,)
    (copied / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert config.read_config(copied).stop_tokens == (0, 9)
    for text in ('{"eos_token_id": [0, 300]}', '{"eos_token_id": "x"}', "{"):
        (copied / "generation_config.json").write_text(text)
        with pytest.raises(ModelError) as failure:
            config.read_config(copied)
        one_line(failure.value, copied / "generation_config.json")
        assert str(copied / "config.json") not in str(failure.value)


def test_large_numbers_in_a_config(copied):
    edit(copied / "config.json", rope_theta=10**400)
    with pytest.raises(ModelError, match=r"rope_theta=10+ is not a positive number"):
        config.read_config(copied)
    edit(copied / "config.json", rope_theta=10**30)  # torch takes such an integer only as a float
    model = weights.load_model(copied, device="cpu")
    assert len(list(generate.greedy(model, [1, 2], 2))) == 2


# Generation ---------------------------------------------------------------------------------------


def test_transformers_loads_the_folder_unchanged_and_says_the_same(folder):
    transformers = pytest.importorskip("transformers")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert theirs.dtype == torch.bfloat16
    tokenizer, ours = (
        transformers.AutoTokenizer.from_pretrained(folder),
        generate.load_tokenizer(folder),
    )
    for text in ("To be, or not\n\n to be", "  ünï … 42\t", "a"):
        assert tokenizer(text)["input_ids"] == ours.encode(text).ids
        assert tokenizer.decode(ours.encode(text).ids) == ours.decode(ours.encode(text).ids) == text
    ids = ours.encode("9 bottles").ids
    said = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    model = weights.load_model(folder, device="cpu")
    assert list(generate.greedy(model, ids, 20)) == said.tolist()


@pytest.fixture(scope="module")
def model():
    return weights.random_model(TINY, dtype=torch.float32, device="cpu")


BAD_PROMPTS = {
    "none": ([], {}, "the prompt has no tokens"),
    "too large": ([1, 300], {}, "token 300 is outside the vocabulary of 300"),
    "negative": ([-1], {}, "token -1 is outside the vocabulary"),
    "too long for the model": ([1] * 65, {}, "the prompt has 65 tokens, the cache 64 slots"),
    "too long for the cache": ([1] * 9, {"S": 8}, "the prompt has 9 tokens, the cache 8 slots"),
    "count": ([1], {"count": -1}, "tokens=-1: it must not be negative"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_refused_before_the_first_token(case, model):
    tokens, how, message = BAD_PROMPTS[case]
    with pytest.raises(ModelError, match=message):
        generate.greedy(model, tokens, **({"count": 3} | how))


def test_greedy_ends_at_a_stop_token_at_the_count_and_when_the_cache_is_full(model):
    said = list(generate.greedy(model, [1, 2, 3], 10))
    assert len(said) == 10
    assert list(generate.greedy(model, [1, 2, 3], 0)) == []
    assert list(generate.greedy(model, [1, 2, 3], 10, S=6)) == said[:4]
    assert len(list(generate.greedy(model, [1] * 64, 10))) == 1
    stop = said[5]
    stopped = replace(model, config=replace(TINY, stop_tokens=(stop,)))
    assert list(generate.greedy(stopped, [1, 2, 3], 10)) == said[: said.index(stop)]


def test_each_token_is_the_likeliest_after_all_before_it(model):
    tokens = [5, 4]
    for token in generate.greedy(model, [5, 4], 8):
        cache = reference.new_cache(TINY, 64, torch.float32, "cpu")
        logits = reference.forward(model, torch.tensor(tokens), cache)
        assert token == int(logits[-1].argmax())
        tokens.append(token)


def test_a_step_says_what_the_reference_says(model):
    said = list(generate.greedy(model, [1, 2, 3], 10))
    stopped = replace(model, config=replace(TINY, stop_tokens=(said[5],)))
    until = said[: said.index(said[5])]
    for build in (rungs.StaticStep, rungs.DynamicStep):
        assert list(generate.greedy(model, [1, 2, 3], 10, build=build)) == said
        assert list(generate.greedy(model, [1, 2, 3], 10, S=6, build=build)) == said[:4]
        assert list(generate.greedy(stopped, [1, 2, 3], 10, build=build)) == until
        assert list(generate.greedy(model, [1, 2, 3], 0, build=build)) == []
    asked = []
    nothing = generate.greedy(model, [1, 2, 3], 10, build=lambda *_: asked.append(1))
    assert (list(nothing), asked) == (said, [1]), "without a step, the reference decodes"
    assert generate.decoder(model) is None, "the reference decodes on a CPU"


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
def test_the_kernels_decode_on_a_gpu():
    small = weights.load_model(weights.SMALL, device="cuda")
    ids = generate.load_tokenizer(weights.SMALL).encode("To be").ids
    said = list(generate.greedy(small, ids, 64, build=generate.decoder(small)))
    cache = reference.new_cache(small.config, len(ids) + 63, torch.bfloat16, small.embed.device)
    first = int(generate.prefill(small, torch.tensor(ids, device="cuda"), cache).argmax())
    step = DecodeStep(small, cache)
    step.start(first, len(ids))
    assert said == [first, *step.decode_many(63).tolist()]
    larger = replace(small.config, hidden_size=1280)  # more than the chain's registers hold
    larger = weights.random_model(larger, device="cuda")
    assert len(list(generate.greedy(larger, ids, 4, build=generate.decoder(larger)))) == 4


RUNGS = "qwen3_decode_dependent", "qwen3_decode_chained", "qwen3_decode_fused_graph"


@pytest.mark.parametrize(
    ("failed", "wanted"),
    [
        ((), "chain, dependent"),
        (("qwen3_decode_dependent",), "chain"),
        (RUNGS[:2], "ops"),
        (RUNGS, None),
        (None, "chain, dependent"),
    ],
    ids=["all pass", "dependent fails", "both fail", "ops fail too", "nothing recorded"],
)
@pytest.mark.parametrize("here", [False, True], ids=["reference", "this machine"])
def test_what_failed_the_gate_is_not_used_unasked(failed, here, wanted, model, monkeypatch):
    record_gates(monkeypatch, {lab.DEVICE.slug if here else None: failed})
    assert used(model, monkeypatch) == wanted


@pytest.mark.parametrize(
    ("gates", "wanted"),
    [
        ({lab.DEVICE.slug: RUNGS[:1], None: ()}, "chain"),
        ({lab.DEVICE.slug: (), None: RUNGS}, "chain, dependent"),
    ],
    ids=["fails here", "passes here"],
)
def test_this_machines_gate_goes_before_the_references(gates, wanted, model, monkeypatch):
    record_gates(monkeypatch, gates)
    assert used(model, monkeypatch) == wanted


@pytest.mark.parametrize(("failed", "wanted"), [((), "ops"), (RUNGS[2:], None)])
def test_sizes_that_the_chain_does_not_take(failed, wanted, model, monkeypatch):
    def refuse(*_, **__):
        raise ModelError("sizes")

    record_gates(monkeypatch, {None: failed})
    assert used(model, monkeypatch, chain=refuse) == wanted


def record_gates(monkeypatch, failed):
    """Results of these devices, on each of which some rungs fail; None is the reference."""

    def recorded(slug, device=None):
        if failed.get(device) is None:
            raise FileNotFoundError(slug)
        gates = [  # on two models
            {"rung": r, "opt_in": second and r in failed[device]}
            for second in (False, True)
            for r in RUNGS
        ]
        return SimpleNamespace(data={"model": {"gates": gates}})

    monkeypatch.setattr(generate.lab, "results", recorded)


def used(model, monkeypatch, chain=None):
    """The kind of step that a GPU of compute capability 9.0 would take."""

    def made(name):
        def step(model, cache, *, dependent=False):
            return SimpleNamespace(name=name + ", dependent" * dependent, capture=lambda: None)

        return step

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(generate, "DecodeStep", chain or made("chain"))
    monkeypatch.setattr(generate, "OpsStep", made("ops"))
    step = generate.in_graph(model, None)
    return step and step.name


def test_write_goes_on_with_the_prompt(folder, capsys):
    generate.write("9 bottles", str(folder), tokens=5)
    printed = capsys.readouterr()
    tokenizer = generate.load_tokenizer(folder)
    ids = tokenizer.encode("9 bottles").ids
    said = generate.greedy(weights.load_model(folder), ids, 5)
    assert printed.out == tokenizer.decode(ids + list(said)) + "\n"
    assert printed.err == ""
    generate.write("9 bottles", str(folder), tokens=500, dtype="float32")
    assert capsys.readouterr().err == "(stopped: the model has 64 positions)\n"


def test_write_holds_back_half_a_character(folder, capsys, monkeypatch):
    ids = generate.load_tokenizer(folder).encode("… ünï").ids  # bytes of these letters are tokens
    monkeypatch.setattr(generate, "greedy", lambda *_, **__: iter(ids))
    generate.write("a", str(folder), tokens=len(ids))
    assert capsys.readouterr().out == "a… ünï\n"


TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["user"] %}{{ raise_exception("who?") }}{% endif %}
<<{{ message.role }}>> {{ message.content.strip() }}
{% endfor %}
{%- if add_generation_prompt %}<<answer>>{% endif %}
"""


# With what Qwen3's own template uses: a namespace, messages from the last to the first, tests and
# methods of strings, and a variable that may not be there.
LIKE_QWENS = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.content is string and not message.content.startswith('<tool>') %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '[' + message.role + ']\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
    {{- '[end]\\n' if loop.index0 >= ns.last and not loop.first else '[first]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{% endif %}
{%- endif %}
"""


def test_a_template_with_what_qwens_uses_renders_as_in_transformers(copied):
    transformers = pytest.importorskip("transformers")
    edit(copied / "tokenizer_config.json", chat_template=LIKE_QWENS)
    messages = [{"role": "user", "content": "\nWho's there? <b>"}]
    want = transformers.AutoTokenizer.from_pretrained(copied).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert generate.as_chat(generate.chat_template(copied), messages[0]["content"]) == want
    assert want == "[user]\nWho's there? <b>[first]\n[assistant]\n"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "list", "chat_template.jinja"])
def test_chat_template_renders_as_in_transformers(where, copied, monkeypatch):
    transformers = pytest.importorskip("transformers")
    assert generate.chat_template(copied) is None
    if where == "chat_template.jinja":
        (copied / where).write_text(TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        edit(copied / "tokenizer_config.json", chat_template=named if where == "list" else TEMPLATE)
    template = generate.chat_template(copied)
    messages = [{"role": "user", "content": " Who's there? <b> "}]
    want = transformers.AutoTokenizer.from_pretrained(copied).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert generate.as_chat(template, messages[0]["content"]) == want
    asked = []
    monkeypatch.setattr(
        generate, "greedy", lambda _, ids, *__, **___: asked.append(ids) or iter(())
    )
    generate.write("Who", str(copied), tokens=1)
    assert generate.load_tokenizer(copied).decode(asked[0]) == "<<user>> Who\n<<answer>>"


def test_a_template_cannot_run_code_and_its_failure_is_one_line():
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ 1 + '' }}",
        "{{ raise_exception('two\nlines') }}",
    ):
        with pytest.raises(ModelError, match=r"a\.json: the chat template fails") as failure:
            generate.as_chat(generate.Template(template, Path("a.json")), "x")
        assert "\n" not in str(failure.value)


def test_a_template_that_is_no_text_is_named(copied):
    (copied / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ModelError, match="not readable") as failure:
        generate.chat_template(copied)
    one_line(failure.value, copied)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_template_that_fails_is_named_with_its_file(where, copied):
    text = "{{ raise_exception('no') }}"
    if where == "chat_template.jinja":
        (copied / where).write_text(text)
    else:
        edit(copied / where, chat_template=text)
    with pytest.raises(ModelError, match="the chat template fails: no") as failure:
        generate.write("a", str(copied), 2)
    one_line(failure.value, copied / where)


def test_templates_without_a_default_are_named_with_their_file(copied):
    named = [{"name": "tool_use", "template": "x"}, {"name": [], "template": "x"}]
    edit(copied / "tokenizer_config.json", chat_template=named)
    with pytest.raises(ModelError, match="chat_template has none with the name") as failure:
        generate.chat_template(copied)
    one_line(failure.value, copied / "tokenizer_config.json")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt": ""}, "prompt='': write at least one character"),
        ({"prompt": "\udcff"}, r"prompt='\\udcff': not UTF-8"),
        ({"prompt": "9 bottles " * 40}, r"the prompt has \d+ tokens, the cache 64 slots"),
        ({"model": "no/such/folder"}, "model='no/such/folder': no such folder, and no hub id"),
        ({"model": "smal"}, "model='smal': no such folder, and no hub id"),
        ({"dtype": "int8"}, "dtype='int8' is not one of bfloat16, float16, float32"),
        ({"tokens": -1}, "tokens=-1"),
        ({"model": ""}, "model='': write small, a folder, or a hub id"),
        ({"model": "x" * 300}, "model='x+': no such folder, and no hub id"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_write_refuses_and_prints_nothing(how, message, folder, capsys):
    with pytest.raises(ModelError, match=message):
        generate.write(**({"prompt": "a", "model": str(folder), "tokens": 2} | how))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", [{"prompt": ""}, {"prompt": "\udcff"}, {"tokens": -1}])
def test_nothing_is_downloaded_for_what_is_refused_anyway(how, monkeypatch):
    monkeypatch.setattr(generate, "model_folder", lambda model: pytest.fail("asked for files"))
    with pytest.raises(ModelError):
        generate.write(**({"prompt": "a", "model": "lab/tiny", "tokens": 2} | how))


# The hub ------------------------------------------------------------------------------------------

COMMAND = """
import sys
import time
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 4096  # else a file as small as ours comes in one piece
time.sleep = lambda seconds: None  # between attempts
from solutions.qwen3_decode.generate import ModelError, write
try:
    write(sys.argv[1], "lab/tiny", 3)
except ModelError as why:
    sys.exit(str(why))
"""


class Hub(BaseHTTPRequestHandler):
    """Enough of the Hugging Face hub to download the files of `server.folder`."""

    protocol_version = "HTTP/1.1"
    SHA = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.path.partition("?")[0]
        files = {f.name: f.read_bytes() for f in self.server.folder.iterdir()}
        if path == "/api/models/lab/tiny/revision/main":
            siblings = [{"rfilename": name} for name in files]
            return self.send({"id": "lab/tiny", "sha": self.SHA, "siblings": siblings}, body)
        if path == f"/api/models/lab/tiny/tree/{self.SHA}":
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{abs(hash(name)):040x}"}
                for name, data in files.items()
            ]
            return self.send(rows, body)
        name = path.rpartition("/")[2]
        if path != f"/lab/tiny/resolve/{self.SHA}/{name}" or name not in files:
            return self.send({"error": "not found"}, body, status=404)
        data, asked = files[name], self.headers.get("Range")
        here, port = self.headers["Host"].split(":")
        if name.endswith(".safetensors") and here == "127.0.0.1":  # large files are elsewhere
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{port}{self.path}")
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Linked-ETag", f'"{abs(hash(name)):040x}"')
            self.send_header("X-Repo-Commit", self.SHA)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        first = int(re.match(r"bytes=(\d+)-", asked)[1]) if asked else 0
        if body:
            self.server.asked.append((name, first))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{abs(hash(name)):040x}"')
        self.send_header("X-Repo-Commit", self.SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return None
        if name == self.server.breaks_at:  # the line is cut in the middle, and again at once
            data = b"" if first else data[: len(data) // 2]
            self.close_connection = True
        self.wfile.write(data[first:])
        return None

    def send(self, value, body, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.breaks_at, server.asked = folder, None, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def from_hub(port, home, prompt="9 bottles"):
    """The command in a process of its own that takes localhost for the hub."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home)}
    environment["TQDM_POSITION"] = "-1"  # the library shows its bars without a terminal, too
    return subprocess.run(
        [sys.executable, "-c", COMMAND, prompt],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_hub_id_downloads_once_and_shows_progress(hub, tmp_path):
    first = from_hub(hub.server_port, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("9 bottles")
    assert "100%" in first.stderr
    names = [name for name, _ in hub.asked]
    assert "model.safetensors" in names
    second = from_hub(hub.server_port, tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert [name for name, _ in hub.asked] == names, "files were downloaded twice"
    hub.shutdown()
    hub.server_close()
    offline = from_hub(hub.server_port, tmp_path)
    assert (offline.returncode, offline.stdout) == (0, first.stdout), offline.stderr


def test_an_interrupted_download_goes_on_where_it_stopped(hub, tmp_path):
    hub.breaks_at = "model.safetensors"
    first = from_hub(hub.server_port, tmp_path)
    assert (first.returncode, first.stdout) == (1, "")
    (part,) = tmp_path.rglob("model.safetensors.part")
    assert f"{part}: the download stopped; this part is kept" in first.stderr.splitlines()[-1]
    assert "Trying to resume" not in first.stderr, "the library's own warnings"
    assert not list(tmp_path.rglob("*.safetensors"))
    size = part.stat().st_size
    hub.breaks_at, hub.asked[:] = None, []
    second = from_hub(hub.server_port, tmp_path)
    assert second.returncode == 0, second.stderr
    ((_, offset),) = [asked for asked in hub.asked if asked[0] == "model.safetensors"]
    assert offset == size > 0
    (whole,) = tmp_path.rglob("model.safetensors")
    assert whole.read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert not part.exists()


@pytest.fixture
def library(monkeypatch):
    """The hub's library, where a file has ten bytes and `library.get` brings it."""
    from huggingface_hub import file_download

    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata", lambda url: SimpleNamespace(size=library.size)
    )
    monkeypatch.setattr(file_download, "http_get", lambda *a, **how: library.get(*a, **how))
    library = SimpleNamespace(size=10)
    return library


@pytest.mark.parametrize("size", [10, None], ids=["known", "unknown"])
def test_a_part_longer_than_the_file_is_begun_anew(size, library, tmp_path):
    def get(url, file, *, resume_size, headers, expected_size):
        assert (resume_size, expected_size) == (0, size)
        file.write(b"0123456789")

    library.size, library.get = size, get
    part = tmp_path / "a.part"
    part.write_bytes(b"x" * 11)
    weights.download("http://hub/a", part)
    assert part.read_bytes() == b"0123456789"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("two\nlines")], ids=["Ctrl-C", "line"])
@pytest.mark.parametrize("came", [b"0123", b""], ids=["a part", "nothing"])
def test_a_stopped_download_says_what_it_keeps(came, stop, library, tmp_path, capsys):
    def get(url, file, **how):
        file.write(came)
        raise stop

    library.get = get
    part = tmp_path / "a.part"
    ctrl_c = stop is KeyboardInterrupt
    with pytest.raises(stop if ctrl_c else ModelError if came else OSError) as failure:
        weights.download("http://hub/a", part)
    assert part.exists() == bool(came)
    said = capsys.readouterr().err if ctrl_c else f"{failure.value}\n"
    kept = f"{part}: the download stopped; this part is kept, and a second run goes on from it"
    if came:
        assert said == kept + ("\n" if ctrl_c else ": two\n")
    else:
        assert "kept" not in said


def test_a_prompt_too_long_is_refused_before_the_weights_come(hub, tmp_path):
    answer = from_hub(hub.server_port, tmp_path, "9 bottles " * 40)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert re.fullmatch(r"the prompt has \d+ tokens, .*", answer.stderr.splitlines()[-1])
    assert "tokenizer.json" in [name for name, _ in hub.asked]
    assert "model.safetensors" not in [name for name, _ in hub.asked]


def test_no_network_is_one_line(tmp_path):
    answer = from_hub(9, tmp_path)  # nobody listens there
    assert (answer.returncode, answer.stdout) == (1, "")
    assert re.fullmatch(
        r"model='lab/tiny': no such folder, and the Hugging Face hub gave none: .*\n", answer.stderr
    ), answer.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Training -----------------------------------------------------------------------------------------


def test_training_learns_and_is_written_down(folder):
    record = json.loads((folder / "training.json").read_text())
    assert record["held_out_loss"] < 5.7, "no better than guessing: ln 300 is 5.70"
    assert record["curve"][-1]["step"] == RECIPE.steps
    assert record["recipe"]["seed"] == 0
    model = weights.load_model(folder, torch.float32, "cpu")
    ids = generate.load_tokenizer(folder).encode(TEXT[round(len(TEXT) * 0.9) :]).ids
    assert len(ids) == record["text"]["held_out_tokens"]
    assert (folder / "held_out.txt").read_text() == TEXT[round(len(TEXT) * 0.9) :]
    # The reference and the training's forward pass agree on the loss of what was written.
    total = 0.0
    for start in range(0, len(ids) - 1, 64):
        window = torch.tensor(ids[start : start + 65])
        cache = reference.new_cache(model.config, 64, torch.float32, "cpu")
        logits = reference.forward(model, window[:-1], cache)
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert total / (len(ids) - 1) == pytest.approx(record["held_out_loss"], rel=1e-5)


def test_same_seed_same_model(folder, tmp_path):
    train.train(TEXT, tmp_path / "again", TINY, RECIPE, lambda line: None, "cpu")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_weights_kept_are_those_with_the_lowest_held_out_loss(tmp_path, monkeypatch):
    """A text whose end is another language: what is learnt makes the held-out loss rise."""
    monkeypatch.setattr(train, "EVERY", 2)
    monkeypatch.setattr(train, "PATIENCE", 3)
    text = TEXT[: len(TEXT) * 8 // 9] + "QXZJKVW!?" * (len(TEXT) // 72)
    recipe = replace(RECIPE, steps=200, learning_rate=2e-2)
    record = train.train(text, tmp_path / "m", TINY, recipe, lambda line: None, "cpu")
    losses = [point["held_out_loss"] for point in record["curve"]]
    best = losses.index(min(losses))
    assert record["best_step"] == record["curve"][best]["step"]
    assert len(losses) == best + 1 + 3, "it went on for longer than PATIENCE"
    assert record["held_out_loss"] == pytest.approx(min(losses), rel=0.01)


def test_training_refuses_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    there, short = tmp_path / "there", tmp_path / "short.txt"
    there.mkdir()
    short.write_text("To be")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for arguments, message in (
        ([text, "--out", there], f"{there}: already there"),
        ([short, "--out", tmp_path / "new"], "the text is too short"),
        ([tmp_path / "none.txt", "--out", tmp_path / "new"], "none.txt: No such file"),
        ([tmp_path / "bytes.txt", "--out", tmp_path / "new"], "bytes.txt: 'utf-8' codec"),
        ([text, "--out", tmp_path / "new", "--steps", "0"], "--steps 0"),
    ):
        assert train.main([str(a) for a in arguments]) == 1
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    torch.use_deterministic_algorithms(False)

    def full(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "save_file", full)
    with pytest.raises(KeyboardInterrupt):
        train.train(TEXT, tmp_path / "new", TINY, RECIPE, lambda line: None, "cpu")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bytes.txt",
        "short.txt",
        "text.txt",
        "there",
    ]


# The model that ships with the lab ----------------------------------------------------------------


def test_small_model_is_what_its_record_says():
    files = {f.name: f.stat().st_size for f in weights.SMALL.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert files["held_out.txt"] <= 120_000
    small = weights.load_model(weights.SMALL, torch.float32, "cpu")
    assert replace(small.config, dtype="bfloat16") == train.SMALL
    record = json.loads((weights.SMALL / "training.json").read_text())
    assert record["weights"] == sum(
        torch.Size(shape).numel() for shape in weights.tensor_shapes(small.config).values()
    )
    recipe = {k: v for k, v in record["recipe"].items() if k not in ("every", "patience")}
    assert train.Recipe(**recipe) == train.RECIPE
    text = (weights.SMALL / "held_out.txt").read_text(encoding="utf-8")
    assert len(text) == record["text"]["held_out_characters"]
    ids = torch.tensor(generate.load_tokenizer(weights.SMALL).encode(text).ids)
    assert len(ids) == record["text"]["held_out_tokens"]
    loss = train.held_out_loss(small, ids, train.RECIPE.batch)
    assert loss == pytest.approx(record["held_out_loss"], rel=0.005)


def test_transformers_loads_the_small_model_and_has_our_logits():
    transformers = pytest.importorskip("transformers")
    text = (weights.SMALL / "held_out.txt").read_text(encoding="utf-8")
    ids = transformers.AutoTokenizer.from_pretrained(weights.SMALL)(text[:1000])["input_ids"][:256]
    assert ids == generate.load_tokenizer(weights.SMALL).encode(text[:1000]).ids[:256]
    net = transformers_model(weights.SMALL, dtype=torch.float32)
    ours = weights.load_model(weights.SMALL, torch.float32, "cpu")
    tokens, cache = torch.tensor(ids), reference.new_cache(ours.config, 256, torch.float32, "cpu")
    with torch.no_grad():
        theirs = net(tokens[None]).logits[0]
    assert torch.equal(reference.forward(ours, tokens, cache), theirs)


def test_small_model_writes(capsys):
    generate.write("To be", tokens=60)
    text = capsys.readouterr().out
    assert text.startswith("To be")
    assert text.isascii()
    assert len(text.split()) > 20
