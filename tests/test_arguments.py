"""What the ops refuse, by the argument's name and what is wrong with it; and what they take."""

import labkit as lab

import importlib
import inspect
import math
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from solutions.decode_attention import decode_attention_workspace
from solutions.paged_kv import paged_kv_workspace
from solutions.softmax import CLUSTERS

ROWS = {"M": 2, "N": 40}
TOKENS = {"T": 5, "H": 4, "H_kv": 2, "D": 16}
PROJECTION = {"M": 1, "N": 6, "K": 40}
WEIGHTS = {"M": 2, "N": 6, "K": 384}
DECODE = {"B": 2, "H": 4, "H_kv": 2, "S": 33, "D": 8}
PAGED = {**DECODE, "page": 16}  # a row of the table has room for 48 tokens
SIZES = {
    "softmax": ROWS,
    "softmax_masked": ROWS,
    "rms_norm": ROWS,
    "rms_norm_residual": ROWS,
    "rope": TOKENS,
    "qk_norm_rope_cache": TOKENS,
    "swiglu": ROWS,
    "gate_up_swiglu": PROJECTION,
    "gate_up_swiglu_prefill": PROJECTION,
    "gemv": WEIGHTS,
    "gemv_w8a16": WEIGHTS,
    "gemv_w4a16": WEIGHTS,
    "decode_attention": DECODE,
    "decode_attention_workspace": DECODE,
    "paged_kv": PAGED,
    "paged_kv_workspace": PAGED,
    "paged_kv_write": {"T": 5, "H_kv": 2, "D": 8, "page": 2},
}
OPS = [name for name in SIZES if not name.endswith("workspace")]
NO_TENSORS = {"eps", "group", "max_context", "workspace", "validate"}
gpu = pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")


def parts(name):
    """An op, its problem and its module. The maker of a workspace has the problem of its op."""
    ladder, problem = lab.find(name.removesuffix("_workspace"))
    module = importlib.import_module(f"solutions.{ladder.slug}")
    return getattr(module, name), problem, module


def takes(op):
    return inspect.signature(op).parameters


def inputs(name, dtype, size):
    """The arguments that an op needs, by name."""
    op, problem, module = parts(name)
    names = takes(getattr(module, problem.name))
    drawn = dict(zip(names, problem.inputs(dtype, **size), strict=False))
    return {n: drawn[n] for n in takes(op) if n in drawn}


def memory(name, args):
    """The `out` and `workspace` that go with these arguments, if the op takes them."""
    op, problem, module = parts(name)
    given = {}
    if "out" in takes(op):
        made = lab.outputs(op(**args))
        whole = len(made) > 1 and not problem.mutates
        given["out"] = tuple(map(torch.empty_like, made)) if whole else torch.empty_like(made[0])
    if "workspace" in takes(op):
        make = getattr(module, f"{name}_workspace")
        given["workspace"] = make(**{n: t for n, t in args.items() if n in takes(make)})
    return given


@cache
def drawn(name):
    args = inputs(name, torch.float32, SIZES[name])
    return args, memory(name, {n: t.clone() for n, t in args.items()})


def good(name):
    """An op, arguments that it takes, and `a`: these and the op's memory, as attributes.

    Past each argument lies as much of its memory again: see `inside`.
    """
    args, given = drawn(name)
    args = {n: torch.cat((t, t))[: len(t)] for n, t in args.items()}
    return parts(name)[0], args, SimpleNamespace(**args, **given)


def inside(memory, like, first=0):
    """A tensor of the form of `like` in the memory of another, from its number `first` on."""
    return memory.as_strided(like.shape, like.stride(), first)


def spread(t, dim):
    """The same numbers, with gaps along a dimension."""
    return torch.stack((t, t), dim + 1).select(dim + 1, 0)


def zeros(*shape):
    return torch.zeros(shape, device=lab.DEVICE.torch)


def replaced(a, **fields):
    return a.workspace._replace(**fields)


# Bad tensors ---------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another GPU than the rest; a machine need not have one."""

    device = torch.device(lab.DEVICE.torch, 1)


# What becomes of a tensor, the error, and what the message must show of the bad one.
CHANGES = {
    "list": (lambda t: t.tolist(), TypeError, lambda t: "list"),
    "dtype": (lambda t: t.to(torch.int16), TypeError, lambda t: "torch.int16"),
    "meta": (lambda t: t.to("meta"), ValueError, lambda t: "meta"),
    "elsewhere": (lambda t: t.as_subclass(Elsewhere), ValueError, lambda t: str(t.device)),
    "first": (lambda t: t[None], ValueError, lambda t: str(tuple(t.shape))),  # one more dimension
    "last": (lambda t: t[..., None], ValueError, lambda t: str(tuple(t.shape))),
    "size": (lambda t: t[..., :-1].contiguous(), ValueError, lambda t: str(tuple(t.shape))),
    "strides": (lambda t: spread(t, t.ndim - 1), ValueError, lambda t: str(t.stride())),
}


def is_bad(name, argument, change):
    if argument == next(iter(takes(parts(name)[0]))) and change in ("elsewhere", "size"):
        return False  # the others must be like the first, so they are named
    if name.endswith("workspace") and change in ("size", "strides"):
        return False  # only numbers of heads and slots are read
    # A shorter row of the table has room for shorter contexts; the last is a pair.
    return (argument, change) != ("block_table", "size") and (
        (name, argument) != ("rms_norm_residual", "out")
    )


TENSORS = [
    (name, argument, change)
    for name in SIZES
    for argument in takes(parts(name)[0])
    for change in CHANGES
    if argument not in NO_TENSORS and is_bad(name, argument, change)
]


@pytest.mark.parametrize(("name", "argument", "change"), TENSORS)
def test_bad_tensor_is_named(name, argument, change):
    op, args, a = good(name)
    make, error, shown = CHANGES[change]
    bad = make(getattr(a, argument))
    with pytest.raises(error, match=rf"\b{argument}\b.* {re.escape(shown(bad))}"):
        op(**args | {argument: bad})


# Bad values ----------------------------------------------------------------------------------

# For each op: an argument, or those that must change with it; their values, made of the good ones;
# and words of the message, with the name and what is wrong.
VALUES = {
    ("softmax",): [
        ("x", lambda a: zeros(1, 2**20), "N=1048576 must be"),
        ("out", lambda a: a.out[:1], "out has shape (1, 40)"),
    ],
    ("softmax", "softmax_masked"): [
        ("out", lambda a: inside(a.x, a.out, 40), "out shares memory with x"),
    ],
    ("softmax_masked",): [
        ("mask", lambda a: a.mask[:1], "mask has shape (1, 40)"),
        ("x", lambda a: zeros(1, 40000), "mask has shape (2, 40), must be (1, 40000) like x"),
        (
            "x mask",
            lambda a: (zeros(1, 40000), spread(zeros(1, 40000) > 0, 1)),
            "mask has shape (1, 40000) and strides (80000, 2)",
        ),
        ("out", lambda a: a.out[:1], "out has shape (1, 40)"),
    ],
    ("rms_norm", "rms_norm_residual"): [
        ("eps", lambda a: 0.0, "eps=0.0 must be positive"),
        ("eps", lambda a: -1e-6, "eps=-1e-06 must be positive"),
        ("eps", lambda a: math.nan, "eps=nan must be positive"),
        ("eps", lambda a: math.inf, "eps=inf must be positive"),
    ],
    ("rms_norm",): [
        ("x w", lambda a: (zeros(1, 2**20), zeros(2**20)), "N=1048576 must be"),
    ],
    ("rms_norm_residual",): [
        (
            "x residual w",
            lambda a: (*(zeros(1, 2**20) for _ in range(2)), zeros(2**20)),
            "N=1048576 must be",
        ),
        ("residual", lambda a: a.residual[:1], "residual has shape (1, 40)"),
        ("out", lambda a: (a.out[0][:1], a.out[1]), "out_y has shape (1, 40)"),
        ("out", lambda a: (a.out[0], a.w), "out_residual has shape (40,)"),
        ("out", lambda a: (a.out[0].to("meta"), a.out[1]), "out_y is on meta"),
        ("out", lambda a: (a.out[0], a.out[1].to("meta")), "out_residual is on meta"),
        (
            "out",
            lambda a: (spread(a.out[0], 1), a.out[1]),
            "out_y has shape (2, 40) and strides (80, 2)",
        ),
        (
            "out",
            lambda a: (a.out[0], spread(a.out[1], 1)),
            "out_residual has shape (2, 40) and strides (80, 2)",
        ),
        ("out", lambda a: (a.out[0], a.out[0]), "out_y shares memory with out_residual"),
        ("out", lambda a: (a.x, a.x), "out_y shares memory with out_residual"),
        ("out", lambda a: (inside(a.w, a.x), a.out[1]), "out_y shares memory with w"),
        ("out", lambda a: (a.out[0], inside(a.w, a.x)), "out_residual shares memory with w"),
        ("out", lambda a: (inside(a.x, a.x, 40), a.out[1]), "out_y shares memory with x"),
        (
            "out",
            lambda a: (inside(a.residual, a.x, 40), a.out[1]),
            "out_y shares memory with residual",
        ),
        ("out", lambda a: (a.out[0], inside(a.x, a.x, 40)), "out_residual shares memory with x"),
        (
            "out",
            lambda a: (a.out[0], inside(a.residual, a.x, 40)),
            "out_residual shares memory with residual",
        ),
    ],
    ("rope", "qk_norm_rope_cache"): [
        ("q", lambda a: a.q[:, :0], "q has shape (5, 0, 16)"),
        ("q", lambda a: a.q[:, :, :0], "q has shape (5, 4, 0)"),
        ("q", lambda a: a.q[:, :, :15], "q has shape (5, 4, 15), must be [T, H, D] with an even D"),
        ("q", lambda a: spread(a.q, 1), "q has shape (5, 4, 16) and strides (128, 32, 1)"),
        ("k", lambda a: a.k[:4], "k has shape (4, 2, 16)"),
        ("k", lambda a: a.k[:, :0], "k has shape (5, 0, 16)"),
        ("k", lambda a: a.k[:, [0, 1, 1]], "H=4 heads of q are no multiple of H_kv=3"),
        ("k", lambda a: spread(a.k, 1), "k has shape (5, 2, 16) and strides (64, 32, 1)"),
    ],
    ("qk_norm_rope_cache",): [
        ("v", lambda a: a.v[:4], "v has shape (4, 2, 16)"),
        ("v", lambda a: spread(a.v, 1), "v has shape (5, 2, 16) and strides (64, 32, 1)"),
        ("k_cache", lambda a: a.k_cache[:, :1].contiguous(), "k_cache has shape (8, 1, 16)"),
        ("v_cache", lambda a: a.v_cache[:7], "v_cache has shape (7, 2, 16)"),
        ("out", lambda a: a.out[:4], "out has shape (4, 4, 16)"),
        ("eps", lambda a: 0.0, "eps=0.0 must be positive"),
        ("eps", lambda a: -1e-6, "eps=-1e-06 must be positive"),
        ("eps", lambda a: math.nan, "eps=nan must be positive"),
        ("eps", lambda a: math.inf, "eps=inf must be positive"),
        ("out", lambda a: a.q, "out shares memory with q"),
        ("out", lambda a: inside(a.k, a.out), "out shares memory with k:"),
        ("out", lambda a: inside(a.v, a.out), "out shares memory with v:"),
        ("out", lambda a: inside(a.k_cache, a.out), "out shares memory with k_cache"),
        ("out", lambda a: inside(a.v_cache, a.out), "out shares memory with v_cache"),
        ("k_cache", lambda a: a.v_cache, "k_cache shares memory with v_cache"),
        ("k_cache", lambda a: inside(a.q, a.k_cache), "k_cache shares memory with q"),
        ("k_cache", lambda a: inside(a.k, a.k_cache), "k_cache shares memory with k:"),
        ("k_cache", lambda a: inside(a.v, a.k_cache), "k_cache shares memory with v:"),
        ("v_cache", lambda a: inside(a.q, a.v_cache), "v_cache shares memory with q"),
        ("v_cache", lambda a: inside(a.k, a.v_cache), "v_cache shares memory with k:"),
        ("v_cache", lambda a: inside(a.v, a.v_cache), "v_cache shares memory with v:"),
    ],
    ("swiglu",): [
        ("gate up", lambda a: (a.gate[0], a.up[0]), "gate has shape (40,) and up (40,)"),
        ("gate", lambda a: a.gate[:1], "gate has shape (1, 40) and up (2, 40)"),
        ("up", lambda a: a.up[:1], "gate has shape (2, 40) and up (1, 40)"),
    ],
    ("gate_up_swiglu", "gate_up_swiglu_prefill"): [
        ("x", lambda a: a.x[:, :0], "x has shape (1, 0), must be [M, K] with K above zero"),
        ("w_gate_up", lambda a: a.w_gate_up[:11], "w_gate_up has shape (11, 40)"),
        ("out", lambda a: inside(a.x, a.out), "out shares memory with x"),
        ("out", lambda a: inside(a.x, a.out, 39), "out shares memory with x"),
        ("out", lambda a: inside(a.w_gate_up, a.out), "out shares memory with w_gate_up"),
    ],
    ("gemv", "gemv_w8a16", "gemv_w4a16"): [
        ("x", lambda a: a.x[:0], "x has shape (0, 384): M=0 must be 1 to 8"),
        ("x", lambda a: zeros(9, 384), "x has shape (9, 384): M=9 must be 1 to 8"),
        ("x", lambda a: a.x[:, :0], "x has shape (2, 0): K=0 must be positive"),
        ("out", lambda a: a.out[:1], "out has shape (1, 6)"),
        ("out", lambda a: inside(a.x, a.out), "out shares memory with x"),
        ("out", lambda a: inside(a.x, a.out, 767), "out shares memory with x"),
    ],
    ("gemv",): [
        ("out", lambda a: inside(a.w, a.out), "out shares memory with w"),
    ],
    ("gemv_w8a16", "gemv_w4a16"): [
        ("out", lambda a: inside(a.scale, a.out), "out shares memory with scale"),
        ("w_q", lambda a: inside(a.w_q, a.w_q, 4), "w_q starts 4 bytes after a multiple of 16"),
    ],
    ("gemv_w8a16",): [
        (
            "x w_q",
            lambda a: (a.x[:, :376].contiguous(), a.w_q[:, :376].contiguous()),
            "K=376 must be a multiple of 16",
        ),
    ],
    ("gemv_w4a16",): [
        ("scale", lambda a: a.scale[:5], "scale has shape (5, 3)"),
        ("group", lambda a: 64, "scale has shape (6, 3), must be (6, 6)"),
        ("group", lambda a: 0, "group=0 must be a multiple of 32 and divide K=384"),
        ("group", lambda a: -32, "group=-32 must be a multiple of 32"),
        ("group", lambda a: 48, "group=48 must be a multiple of 32"),
        ("group", lambda a: 256, "group=256 must be a multiple of 32 and divide K=384"),
    ],
    ("decode_attention", "decode_attention_workspace", "paged_kv", "paged_kv_workspace"): [
        ("q", lambda a: a.q[:, :3].contiguous(), "H=3 query heads must be 1 to 16 times H_kv=2"),
        ("q", lambda a: a.q[:, :0], "H=0 query heads"),
        ("q", lambda a: zeros(2, 34, 8), "H=34 query heads"),
        ("max_context", lambda a: 0, "max_context=0 must lie in 1 "),
        ("max_context", lambda a: -1, "max_context=-1 must lie in 1 "),
    ],
    ("decode_attention", "decode_attention_workspace"): [
        ("k", lambda a: a.k[:, :0], "k has shape (2, 0, 2, 8)"),
        ("k", lambda a: a.k[:, :, :0], "k has shape (2, 33, 0, 8)"),
        ("max_context", lambda a: 34, "max_context=34 must lie in 1"),
    ],
    ("decode_attention",): [
        ("out", lambda a: inside(a.v, a.out), "out shares memory with v"),
        ("k", lambda a: a.k[:1], "k has shape (1, 33, 2, 8)"),
        ("v", lambda a: a.v[:1], "v has shape (1, 33, 2, 8)"),
        (
            "workspace",
            lambda a: decode_attention_workspace(a.q, a.k, max_context=32),
            "workspace.partial is (2, 4, 1, 8) ",
        ),
    ],
    ("paged_kv", "paged_kv_workspace"): [
        ("k_cache", lambda a: a.k_cache[:, :0], "k_cache has shape (8, 0, 2, 8)"),
        ("k_cache", lambda a: a.k_cache[:, :, :0], "k_cache has shape (8, 16, 0, 8)"),
        ("block_table", lambda a: a.block_table[:, :0], "block_table has shape (2, 0)"),
        ("max_context", lambda a: 49, "max_context=49 must lie in 1"),
    ],
    ("paged_kv",): [
        ("out", lambda a: inside(a.v_cache, a.out), "out shares memory with v_cache"),
        ("v_cache", lambda a: a.v_cache[:7], "v_cache has shape (7, 16, 2, 8)"),
        ("block_table", lambda a: a.block_table[:1], "block_table has shape (1, 3)"),
        (
            "workspace",
            lambda a: paged_kv_workspace(a.q, a.k_cache, a.block_table, max_context=32),
            "workspace.partial is (2, 4, 1, 8) ",
        ),
    ],
    ("decode_attention", "paged_kv"): [
        (
            "out workspace",
            lambda a: (inside(a.workspace.partial, a.out), a.workspace),
            "workspace.partial shares memory with out",
        ),
        ("out", lambda a: a.out[:1], "out has shape (1, 4, 8)"),
        ("out", lambda a: a.q, "out shares memory with q"),
        ("out", lambda a: inside(a.q, a.out, 63), "out shares memory with q"),
        *(
            (
                "workspace",
                lambda a, field=field: replaced(a, **{field: getattr(a.workspace, field)[:1]}),
                f"workspace.{field} is (1,",
            )
            for field in ("partial", "lse", "counters", "parts")
        ),
        (
            "workspace",
            lambda a: replaced(a, lse=spread(a.workspace.lse, 2)),
            "workspace.lse has shape (2, 4, 2) and strides (16, 4, 2)",
        ),
        (
            "workspace",
            lambda a: replaced(a, lse=a.workspace.lse.as_subclass(Elsewhere)),
            f"workspace.lse is (2, 4, 2) on {Elsewhere.device}",
        ),
    ],
    ("paged_kv_write",): [
        ("k v", lambda a: (a.k[:, :0], a.v[:, :0]), "k and v have shapes (5, 0, 8) and (5, 0, 8)"),
        (
            "k v",
            lambda a: (a.k[:, :, :0], a.v[:, :, :0]),
            "k and v have shapes (5, 2, 0) and (5, 2, 0)",
        ),
        ("k v", lambda a: (a.k[0], a.v[0]), "k and v have shapes (2, 8) and (2, 8)"),
        ("k", lambda a: a.k[:4], "k and v have shapes (4, 2, 8) and (5, 2, 8)"),
        ("v", lambda a: a.v[:4], "k and v have shapes (5, 2, 8) and (4, 2, 8)"),
        ("k", lambda a: spread(a.k, 1), "k has strides (32, 16, 1)"),
        ("v", lambda a: spread(a.v, 1), "v has strides (32, 16, 1)"),
        (
            "k_cache v_cache",
            lambda a: [c[:, :, :1].contiguous() for c in (a.k_cache, a.v_cache)],
            "k_cache and v_cache have shapes (4, 2, 1, 8) and (4, 2, 1, 8)",
        ),
        (
            "v_cache",
            lambda a: a.v_cache[:3],
            "k_cache and v_cache have shapes (4, 2, 2, 8) and (3, 2, 2, 8)",
        ),
        ("k_cache", lambda a: a.v_cache, "k_cache shares memory with v_cache"),
        ("k_cache", lambda a: inside(a.k, a.k_cache), "k_cache shares memory with k:"),
        ("k_cache", lambda a: inside(a.v, a.k_cache), "k_cache shares memory with v:"),
        ("v_cache", lambda a: inside(a.k, a.v_cache), "v_cache shares memory with k:"),
        ("v_cache", lambda a: inside(a.v, a.v_cache), "v_cache shares memory with v:"),
    ],
}
TYPES = {
    ("rms_norm", "rms_norm_residual", "qk_norm_rope_cache"): [
        ("eps", lambda a: "1e-6", "eps is a str"),
        ("eps", lambda a: torch.tensor(1e-6), "eps is a Tensor"),
    ],
    ("rms_norm_residual",): [
        ("out", lambda a: a.out[0], "out is a Tensor, must be a pair"),
        ("out", lambda a: (*a.out, a.w), "out is a tuple, must be a pair"),
        ("out", lambda a: (a.out[0].half(), a.out[1]), "out_y is torch.float16"),
        ("out", lambda a: (a.out[0], a.out[1].half()), "out_residual is torch.float16"),
        ("out", lambda a: (a.out[0], None), "out_residual must be a tensor, is NoneType"),
    ],
    ("gemv_w4a16",): [
        ("group", lambda a: 128.0, "group is a float"),
        ("group", lambda a: True, "group is a bool"),
        ("group", lambda a: torch.tensor(128), "group is a Tensor"),
    ],
    ("decode_attention", "decode_attention_workspace", "paged_kv", "paged_kv_workspace"): [
        ("max_context", lambda a: 2.5, "max_context is a float"),
        ("max_context", lambda a: True, "max_context is a bool"),
        ("max_context", lambda a: torch.tensor(8), "max_context is a Tensor"),
    ],
    ("decode_attention", "paged_kv"): [
        ("context_lens", lambda a: a.context_lens.long(), "context_lens is torch.int64"),
        ("workspace", lambda a: tuple(a.workspace), "workspace is a tuple, must be a Workspace"),
        (
            "workspace",
            lambda a: replaced(a, lse=None),
            "workspace.lse must be a tensor, is NoneType",
        ),
        (
            "workspace",
            lambda a: replaced(a, partial=a.workspace.partial.half()),
            "workspace.partial is torch.float16",
        ),
        (
            "workspace",
            lambda a: replaced(a, parts=a.workspace.parts.float()),
            "workspace.parts is torch.float32",
        ),
    ],
}
CASES = [
    (name, *case, error)
    for table, error in ((VALUES, ValueError), (TYPES, TypeError))
    for names, cases in table.items()
    for name in names
    for case in cases
]


def refused(name, arguments, make, words, error):
    op, args, a = good(name)
    names, values = arguments.split(), make(a)
    bad = dict(zip(names, values, strict=True)) if len(names) > 1 else {arguments: values}
    with pytest.raises(error, match=re.escape(words)):
        op(**args | bad)


@pytest.mark.parametrize(
    ("name", "arguments", "make", "words", "error"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES]
)
def test_bad_value_is_named(name, arguments, make, words, error):
    refused(name, arguments, make, words, error)


@pytest.mark.skipif(not CLUSTERS, reason="needs a GPU with clusters")
def test_long_rows_begin_with_a_vector():
    late = lambda a: zeros(20001)[1:].view(1, -1)
    words = "starts 4 bytes after a multiple of 16"
    refused("softmax", "x", late, f"x {words}", ValueError)
    pair = lambda a: (zeros(1, 20000), late(a))
    refused("softmax", "x out", pair, f"out {words}", ValueError)


# Numbers in tables ---------------------------------------------------------------------------

RANGES = [  # the lowest and the highest that an op takes
    ("rope", "positions", 0, lambda a: len(a.cos_sin) - 1),
    ("qk_norm_rope_cache", "positions", 0, lambda a: len(a.cos_sin) - 1),
    ("qk_norm_rope_cache", "slot_mapping", -1, lambda a: len(a.k_cache) - 1),
    ("decode_attention", "context_lens", 0, lambda a: a.k.shape[1]),
    ("paged_kv", "context_lens", 0, lambda a: a.block_table.shape[1] * a.k_cache.shape[1]),
    ("paged_kv", "block_table", 0, lambda a: len(a.k_cache) - 1),
    ("paged_kv_write", "slot_mapping", -1, lambda a: a.k_cache[:, :, 0, 0].numel() - 1),
]


@pytest.mark.parametrize("end", ["lowest", "highest"])
@pytest.mark.parametrize(
    ("name", "argument", "lowest", "highest"), RANGES, ids=["-".join(r[:2]) for r in RANGES]
)
def test_number_past_its_range_is_named(name, argument, lowest, highest, end):
    op, args, a = good(name)
    number, step = (lowest, -1) if end == "lowest" else (highest(a), 1)
    how = {} if lab.SIMULATED else {"validate": True}  # only then they are read from a GPU
    table = args[argument].view(-1)
    table[-1] = number
    op(**args, **how)
    table[-1] = number + step
    with pytest.raises(ValueError, match=rf"{argument} holds {number + step}\b"):
        op(**args, **how)


@pytest.mark.parametrize("page", [-1, 8])
def test_page_past_the_context_may_be_any(page):
    op, args, a = good("paged_kv")
    args["context_lens"][1] = 32  # two pages of three
    want = op(**args, validate=True)
    assert page not in range(len(a.k_cache))
    args["block_table"][1, 2] = page
    assert torch.equal(op(**args, validate=True), want)
    args["context_lens"][1] = 33
    with pytest.raises(ValueError, match=f"block_table holds {page} within a context"):
        op(**args, validate=True)


@pytest.mark.parametrize("name", ["qk_norm_rope_cache", "paged_kv_write"])
def test_refused_call_writes_nothing(name):
    op, args, _ = good(name)
    args["slot_mapping"][-1] = -2
    before = {n: t.clone() for n, t in args.items()}
    with pytest.raises(ValueError, match="slot_mapping holds -2"):
        op(**args, validate=True)
    assert all(torch.equal(args[n], before[n]) for n in args)


# What is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope_cache", "paged_kv_write"])
def test_one_head_may_have_any_stride(name):
    op = parts(name)[0]
    args = inputs(name, torch.float32, {**SIZES[name], "H_kv": 1})
    want = lab.outputs(op(**{n: t.clone() for n, t in args.items()}))
    T, _, D = args["k"].shape
    for n in {"k", "v"} & set(args):
        args[n] = torch.empty_like(args[n]).view(1, T, D).copy_(args[n].view(1, T, D))
        args[n] = args[n].transpose(0, 1)
        assert args[n].stride() == (D, T * D, 1)
    got = lab.outputs(op(**args))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=r"^k has .*strides"):
        op(**args | {"k": spread(args["k"], 2)})


def test_norm_may_write_over_what_it_reads():
    for order in (("x", "residual"), ("residual", "x")):
        op, args, _ = good("rms_norm_residual")
        y, new = op(**args)
        out = tuple(args[n] for n in order)
        got = op(**args, out=out)
        assert all(g is o for g, o in zip(got, out, strict=True))
        assert torch.equal(out[0], y)
        assert torch.equal(out[1], new)


@pytest.mark.parametrize("name", ["softmax", "softmax_masked"])
def test_softmax_may_write_over_what_it_reads(name):
    op, args, a = good(name)
    want = op(**args)
    assert op(**args, out=a.x) is a.x
    assert torch.equal(a.x, want)


def test_output_may_lie_beside_an_input():
    op, args, a = good("gemv")
    want, x = op(**args), a.x.clone()
    behind = inside(a.x, a.out, x.numel())
    assert torch.equal(op(**args, out=behind), want)
    args["x"], before = inside(a.x, x, 12).copy_(x), inside(a.x, a.out)
    assert torch.equal(op(**args, out=before), want)
    assert torch.equal(args["x"], x)


# On a GPU only -------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    "name",
    ["softmax", "softmax_masked", "gate_up_swiglu", "gemv", "decode_attention", "paged_kv"],
)
def test_kernel_in_cuda_takes_no_gaps(name):
    op, problem, _ = parts(name)
    args = inputs(name, torch.bfloat16, problem.bench_size)  # above, others take its place
    args["out"] = memory(name, args)["out"]
    for argument, t in args.items():
        bad = spread(t, t.ndim - 1)
        with pytest.raises(ValueError, match=rf"^{argument} .* {re.escape(str(bad.stride()))}"):
            op(**args | {argument: bad})


@gpu
@pytest.mark.parametrize("name", OPS)
def test_op_never_waits_for_the_gpu(name):
    op, problem, _ = parts(name)
    args = inputs(name, torch.bfloat16, problem.bench_size)
    calls = args, args | memory(name, args)
    for call in calls:  # the first compiles
        op(**call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            op(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
