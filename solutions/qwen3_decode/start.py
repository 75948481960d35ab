"""The start of a decode step: a kernel that finds its token itself, and norms its embedding.

    x = embed[tokens[position]],  h = norm(x)

The token before may just have been written by the GPU; Python does not know it. In torch this is
two look-ups, one after the other, and then chapter 03's norm.

Shapes   tokens [S] and position [1] int32, embed [V, N], w [N] -> h and x [1, N]
Cost     a row of embed and w read, h and x written: 4·N·itemsize bytes, so the launch is the cost
"""

from __future__ import annotations

import labkit as lab
from labkit import bars

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from solutions import rms_norm

from .weights import STD

EPS = rms_norm.EPS
Tokens, Position = Int32[Tensor, " S"], Int32[Tensor, " 1"]
Table, Gain, Row = Float[Tensor, "V N"], Float[Tensor, " N"], Float[Tensor, "1 N"]

# Problem -------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, S: int, V: int, N: int) -> tuple[Tensor, ...]:
    """Rows as small as a model's, gains near one, neighbours that differ, a position amid them."""
    embed, w = lab.randn((V, N), (N,), dtype=dtype, seed=seed)
    embed *= STD
    tokens = (5 * torch.arange(S, dtype=torch.int32, device=embed.device) + 7 + seed) % V
    return tokens, tokens.new_tensor([S // 2]), embed, 1 + 0.1 * w


def reference(
    tokens: Tokens, position: Position, embed: Table, w: Gain, eps: float = EPS
) -> tuple[Row, Row]:
    """The formula: the norm of the token's row, and the row."""
    x = embed[tokens[position]]
    return rms_norm.reference(x, w, eps), x


def library(
    tokens: Tokens, position: Position, embed: Table, w: Gain, eps: float = EPS
) -> tuple[Row, Row]:
    """Two look-ups, and Qwen3RMSNorm: its operations, one kernel each."""
    x = embed[tokens[position]]
    return rms_norm.library(x, w, eps), x


def of_row(choose):
    """The formula with the row that `choose` takes instead."""

    def formula(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor) -> tuple:
        x = embed[choose(tokens, position)]
        return rms_norm.reference(x, w), x

    return formula


def of_norm(change):
    """The formula with another norm: `change` takes the row and the gain."""

    def formula(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor) -> tuple:
        x = embed[tokens[position]]
        return change(x, w), x

    return formula


def without_stride(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor) -> tuple:
    """The row that begins at number `token` of the table, not at row `token`."""
    first = int(tokens[position])
    x = embed.flatten()[None, first : first + embed.shape[1]]
    return rms_norm.reference(x, w), x


def past_the_end(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor) -> tuple:
    """The row's mean square has the numbers after it too, up to a power of two."""
    token, N = int(tokens[position]), embed.shape[1]
    more = embed.flatten()[token * N :][: triton.next_power_of_2(N)]
    x = embed[token][None]
    return w * x * (more.square().sum() / N + EPS).rsqrt(), x


def normed_row(tokens: Tensor, position: Tensor, embed: Tensor, w: Tensor) -> tuple:
    """The second output is the norm without the gain, instead of the row."""
    x = embed[tokens[position]]
    return rms_norm.reference(x, w), rms_norm.reference(x, torch.ones_like(w))


EMBED_NORM = lab.Problem(
    name="embed_norm",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, S, V, N: lab.Work(bytes=4 * N * dtype.itemsize + 8, flops=4 * N),
    terms=lambda S, V, N: N,
    dtypes=(torch.bfloat16, torch.float32),
    # One of all; rows shorter and longer than a power of two; the small model's, and Qwen3-0.6B's.
    test_sizes=(
        {"S": 1, "V": 1, "N": 1},
        {"S": 9, "V": 31, "N": 33},
        {"S": 9, "V": 31, "N": 256},
        {"S": 5, "V": 17, "N": 1000},
        {"S": 1, "V": 29, "N": 1024},
    ),
    bench_size={"S": 513, "V": 151_936, "N": 1024},
    sweep=(),
    target=(
        bars.ratio(
            "embed_norm_fused",
            "Two look-ups, and Qwen3RMSNorm",
            0.5,
            dtype="bfloat16",
            S=513,
            V=151_936,
            N=1024,
        ),
    ),
    suspects={
        "takes the position for the token": of_row(lambda tokens, position: position),
        "takes the first token": of_row(lambda tokens, position: tokens[:1]),
        "takes the next token": of_row(
            lambda tokens, position: tokens[(position + 1) % len(tokens)]
        ),
        "takes the token before": of_row(lambda tokens, position: tokens[position - 1]),
        "forgets the length of a row": without_stride,
        "stores the norm for the row": normed_row,
        "multiplies by the rms": of_norm(
            lambda x, w: w * x * (x.square().mean(1, keepdim=True) + EPS).sqrt()
        ),
        "forgets the gain": of_norm(lambda x, w: rms_norm.reference(x, torch.ones_like(w))),
        "forgets eps": of_norm(lambda x, w: rms_norm.reference(x, w, 0.0)),
        "sum instead of mean": of_norm(
            lambda x, w: rms_norm.reference(x, w, EPS / len(w)) / len(w) ** 0.5
        ),
        "mean over the padded width": of_norm(
            lambda x, w: rms_norm.reference(x, w) * (triton.next_power_of_2(len(w)) / len(w)) ** 0.5
        ),
        "sums past the end of the row": past_the_end,
        "swaps its outputs": lambda *args: reference(*args)[::-1],
    },
)

# The rung ------------------------------------------------------------------------------------


@triton.jit
def embed_norm_fused_kernel(
    tokens_ptr, position_ptr, embed_ptr, w_ptr, h_ptr, x_ptr, N, eps, BLOCK_N: tl.constexpr
):
    """The one program looks its token up, copies that row of embed to x, and its norm to h."""
    position = tl.load(position_ptr)
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    w = tl.load(w_ptr + offs, mask=mask)  # needs no token, so it is on the way beside it
    token = tl.load(tokens_ptr + position).to(tl.int64)
    x = tl.load(embed_ptr + token * N + offs, mask=mask, other=0.0)
    tl.store(x_ptr + offs, x, mask=mask)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide) / N + eps)
    tl.store(h_ptr + offs, w * (wide * rstd).to(x.dtype), mask=mask)


def embed_norm_fused(
    tokens: Tokens, position: Position, embed: Table, w: Gain, eps: float = EPS
) -> tuple[Row, Row]:
    """A kernel that looks up its own token: the look-ups and the norm in one launch.

    Returns (h, x). TypeError or ValueError for arguments other than contiguous ones of these
    shapes and dtypes, N at most rms_norm.MAX_N. A position or a token that is not there is not
    checked: it is on the GPU.
    """
    lab.check_tensors(tokens=tokens, position=position, dtypes=(torch.int32,))
    lab.check_tensors(embed=embed, w=w)
    for name, x, shape in (
        ("tokens", tokens, "[S]"), ("position", position, "[1]"), ("embed", embed, "[V, N]"),
    ):  # fmt: skip
        if x.dim() != shape.count(",") + 1 or (name == "position" and len(x) != 1):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be {shape}")
    N = embed.shape[1]
    if w.shape != (N,):
        raise ValueError(f"w has shape {tuple(w.shape)}, must be ({N},)")
    if embed.device != tokens.device:
        raise ValueError(f"embed is on {embed.device}, must be on {tokens.device} like tokens")
    if not eps > 0:
        raise ValueError(f"{eps=} must be above zero")
    lab.check_contiguous(tokens=tokens, position=position, embed=embed, w=w)
    h, x = embed.new_empty((1, N)), embed.new_empty((1, N))
    warps = rms_norm.warps(1, N)
    embed_norm_fused_kernel[(1,)](
        tokens, position, embed, w, h, x, N, eps,
        BLOCK_N=triton.next_power_of_2(N), num_warps=warps,
    )  # fmt: skip
    return h, x


# The exercise --------------------------------------------------------------------------------

EXERCISE = lab.Exercise(
    "embed_norm_fused",
    "embed_norm_fused_kernel",
    hints=(
        "Two loads of a single number: `tl.load(position_ptr)` says where the step stands, and "
        "`tokens_ptr` plus that says where its token is. Row `token` begins `token * N` numbers "
        "into `embed`. In a larger model that is past 2³¹, so make the token an int64 first.",
        "The rest is chapter 03's fused norm for one row: load the row and the gain with a mask, "
        "sum the squares of `wide`, the row in float32, divide by `N` (not by `BLOCK_N`), add "
        "`eps`. One over the root of that is `rstd`.",
        "Store the row itself to `x_ptr`: it begins the residual stream. Store "
        "`w * (wide * rstd).to(x.dtype)` to `h_ptr`: round first, then multiply by the gain.",
    ),
    mutants=(
        lab.Mutant(
            "no_token",
            "takes the position for the token",
            {"tl.load(tokens_ptr + position).to(tl.int64)": "position.to(tl.int64)"},
        ),
        lab.Mutant(
            "first_token",
            "takes the first token",
            {"tl.load(tokens_ptr + position)": "tl.load(tokens_ptr)"},
        ),
        lab.Mutant(
            "before",
            "takes the token before",
            {"tl.load(tokens_ptr + position)": "tl.load(tokens_ptr + position - 1)"},
        ),
        lab.Mutant(
            "no_stride",
            "forgets the length of a row",
            {"token * N + offs": "token + offs"},
        ),
        lab.Mutant(
            "normed_row",
            "stores the norm for the row",
            {
                "    tl.store(x_ptr + offs, x, mask=mask)\n": "",
                "    tl.store(h_ptr": "    tl.store(x_ptr + offs, wide * rstd, mask=mask)\n"
                "    tl.store(h_ptr",
            },
        ),
        lab.Mutant("times", "multiplies by the rms", {"tl.rsqrt": "tl.sqrt"}),
        lab.Mutant(
            "padded_mean", "mean over the padded width", {") / N + eps": ") / BLOCK_N + eps"}
        ),
        lab.Mutant(
            "no_load_mask",
            "sums past the end of the row",
            {"embed_ptr + token * N + offs, mask=mask, other=0.0": "embed_ptr + token * N + offs"},
        ),
        lab.Mutant("no_eps", "forgets eps", {" / N + eps)": " / N)"}),
        lab.Mutant("sample_mean", "wrong formula", {" / N + eps)": " / (N - 1) + eps)"}),
        lab.Mutant("no_gain", "forgets the gain", {"w * (wide * rstd)": "(wide * rstd)"}),
        lab.Mutant(
            "swapped",
            "swaps its outputs",
            {
                "x_ptr + offs, x,": "h_ptr + offs, x,",
                "tl.store(h_ptr + offs, w *": "tl.store(x_ptr + offs, w *",
            },
        ),
        lab.Mutant(
            "no_mask", "missing tail guard", {"x_ptr + offs, x, mask=mask": "x_ptr + offs, x"}
        ),
    ),
)

embed_norm = embed_norm_fused

torch.library.custom_op(
    "kernel_ladder::embed_norm",
    embed_norm,
    mutates_args=(),
    schema="(Tensor tokens, Tensor position, Tensor embed, Tensor w, float eps=1e-6)"
    " -> (Tensor, Tensor)",
).register_fake(
    lambda tokens, position, embed, w, eps=EPS: tuple(
        embed.new_empty((1, embed.shape[1])) for _ in range(2)
    )
)
