"""GEMV, the matmul of decoding: a few rows of x times a whole weight matrix, read once.

    y[m, n] = Σ_k x[m, k] · w[n, k]                              bf16, fp16 or fp32 weights
    y[m, n] = scale[n] · Σ_k x[m, k] · w_q[n, k]                 W8A16: int8, a scale for each row
    y[m, n] = Σ_g scale[n, g] · Σ_{k in g} x[m, k] · q[n, k]     W4A16: q in -8 … 7, groups g of K

Byte j of a row of the packed W4 matrix holds q[n, 2j] + 8 in its low nibble and q[n, 2j + 1] + 8 in
its high one, so a 32-bit word holds eight neighbouring columns, the first in its lowest bits.
Sums are carried in float32; a scale multiplies a sum, in float32, and not the weights.

Shapes   x [M, K], M = 1 … 8; w [N, K] -> y [M, N]. W8A16: w_q [N, K] int8, scale [N].
         W4A16: w_q [N, K/2] uint8, scale [N, K/group]. scale has the dtype of x
Cost     read w, x and the scales, write y; 2·M·N·K FLOPs. Each weight is used M times, so the time
         is that of reading w: N·K·itemsize bytes, N·K, or N·K/2 + N·K/group·itemsize
Source   Lin et al. 2023, arXiv:2306.00978 (int4 weights in groups of 128); the float whose low bits
         are an integer: Kim et al. 2022, arXiv:2211.10017
"""

import labkit as lab
from labkit import bars
from labkit.bench import COMPILE_MODE
from labkit.problem import CPU_DRAW

from functools import cache, wraps
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int8, UInt8
from numba import config, cuda, float32
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

MAX_M = 8  # tokens; above that, the tensor cores of a matmul kernel are the better use of w
WARP = 32
FULL_WARP = 0xFFFFFFFF  # every lane takes part in a shuffle
THREADS = 64  # rung 1: rows of w in a block; 1,024 rows still make 16 blocks
BLOCK_ROWS = 4  # rungs 2 and 3: rows of w in a block, a warp each
VECTOR_BYTES = 16  # the widest load a thread can issue
PIECE_K = 1024  # rung 4: columns that a warp takes at a time; in bf16, four vectors a lane
TWO_ROWS_N = 16384  # rung 4: from here there are warps enough for two rows each
BLOCK_WARPS = 8  # rung 5: warps of a block; up to all of them share a row
ROWS = 4096  # of weights that the references dequantise at a time: all, in float64, are gigabytes
LANE_LOADS = 4  # rung 5: vectors of a row that a lane asks for before it uses the first
SMALL = 2**25  # rung 5: bytes of w; 12 MB want many warps with two loads, 311 MB fewer with more
W8_ROWS, W8_WARPS = 4, 2  # rung 6: rows of a program, so loads of w in a lane; its warps
W4_ROWS, W4_WARPS = 4, 4  # rung 7, the same
LONG_K = 16384  # rung 7: for rows from here on a program has twice as many, to share loads of x
W8_LANE, W4_LANE = 16, 32  # columns of a lane in rungs 6 and 7: a vector
GROUP = 128  # columns that share a W4 scale
# A float32 from 2²³ on has steps of 1: integers in its low 23 bits are added to 2²³. Kernels get
# these bits as arguments: a constant would need an instruction of its own beside the mask.
TWO_23_BITS = 0x4B000000
# The same with the sign bit of an int8, in the first byte or in the second: i becomes i + 128.
W8_BITS = (TWO_23_BITS | 0x80, TWO_23_BITS | 0x8000)
SIMULATED = bool(config.ENABLE_CUDASIM)
Tokens, Weights = Float[Tensor, "M K"], Float[Tensor, "N K"]

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int, K: int) -> tuple[Tensor, ...]:
    """Standard normal x; w normal with variance 1/K, so that y is of size one."""
    x, w = lab.randn((M, K), (N, K), dtype=dtype, seed=seed)
    return x, w.mul_(K**-0.5)


def reference(x: Tokens, w: Weights) -> Float[Tensor, "M N"]:
    """The formula, in the dtype it is given: the truth is this in float64."""
    return x @ w.T


def library(x: Tokens, w: Weights) -> Float[Tensor, "M N"]:
    """F.linear: cuBLAS."""
    return torch.nn.functional.linear(x, w)


def work(dtype: torch.dtype, M: int, N: int, K: int) -> lab.Work:
    """Every weight once; x and y beside them."""
    return lab.Work(bytes=(N * K + M * K + M * N) * dtype.itemsize, flops=2 * M * N * K)


def without_last_piece(columns):
    """The suspect that computes whole pieces only.

    A row shorter than one is left as it is: there the bug gives zeros, which the checker knows.
    """

    def formula(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        K = x.shape[1]
        x = x.clone()
        x[:, K // columns * columns or K :] = 0
        return x, *weights

    return formula


def last_piece_only(columns):
    """The suspect that begins its sum again at each piece, where it should go on."""

    def formula(x: Tensor, w: Tensor) -> Tensor:
        first = (x.shape[1] - 1) // columns * columns
        return reference(x[:, first:], w[:, first:])

    return formula


def tokens_are_independent(make):
    """A property: each row of x gives the same bits alone as among others."""

    def holds(kernel) -> str | None:
        x, *weights = make(torch.float32, seed=1, M=3, N=6, K=256)
        together = kernel(x, *weights)
        for m in range(len(x)):
            if not torch.equal(kernel(x[m : m + 1].clone(), *weights)[0], together[m]):
                return f"row {m} of y changes when x holds other rows too"
        return None

    return holds


# Qwen3-0.6B: q, k and v in one, o, gate and up in one, down.
LAYERS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
COMMON = {
    "empty_size": {"M": 1, "N": 0, "K": 128},
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
    "ceiling": "read",
    "timing": "graph",
}

GEMV = lab.Problem(
    name="gemv",
    inputs=inputs,
    reference=reference,
    library=library,
    work=work,
    terms=lambda M, N, K: K,
    **COMMON,
    # One weight; primes; K at a warp, a warp's vectors and one beside; more rows than a block and
    # than a program; every M at least once on each side of a power of two; a row in five pieces.
    test_sizes=tuple(
        {"M": m, "N": n, "K": k}
        for m, n, k in (
            (1, 1, 1),
            (1, 5, 31),
            (8, 2, 128),
            (2, 7, 129),
            (1, 3, 520),
            (1, 3, 4608),
            (1, 67, 8),
            (2, 3, 128),
        )
    ),
    huge_size={"M": 1, "N": 2**18 + 1, "K": 8192},
    bench_size={"M": 1, "N": 28672, "K": 8192},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in LAYERS),
        {"M": 1, "N": 151936, "K": 1024},  # Qwen3-0.6B's LM head
        *({"M": m, "N": 151936, "K": 1024} for m in (2, 4, 8)),
        *({"M": 8, "N": n, "K": k} for n, k in LAYERS),
        {"M": 1, "N": 6144, "K": 4096},  # q, k and v of Qwen3-8B and Llama-3-8B
        {"M": 1, "N": 4096, "K": 12288},  # Qwen3-8B's down
        {"M": 1, "N": 28672, "K": 4096},  # Llama-3-8B's gate and up
    ),
    target=(
        *(
            bars.seconds("gemv_split_k", us * 1e-6, dtype="bfloat16", M=1, N=n, K=k)
            for (n, k), us in zip(LAYERS, (4.2, 2.9, 5.3, 3.7), strict=True)
        ),
        *(
            bars.fraction("gemv_split_k", 0.92, dtype="bfloat16", M=1, N=n, K=k)
            for n, k in ((151936, 1024), (28672, 8192))
        ),
    ),
    suspects={
        "last partial split dropped": lambda x, w: reference(*without_last_piece(PIECE_K)(x, w)),
        "last column left out": lambda x, w: reference(x[:, :-1], w[:, :-1]),
        # Without the last step, half = 1, the sums of columns 1, 3, 5, ... are lost.
        "tree stops too early": lambda x, w: reference(x[:, ::2], w[:, ::2]),
        "one lane's sum only": lambda x, w: reference(x[:, ::WARP], w[:, ::WARP]),
        "sum begins again at each step": last_piece_only(WARP),
        "sum begins again at each piece": last_piece_only(PIECE_K),
        "same token for every row": lambda x, w: reference(x[:1].expand_as(x), w),
    },
    properties=(
        lab.Property(
            "a token's result does not depend on the other tokens",
            "same token for every row",
            tokens_are_independent(inputs),
        ),
    ),
)

# W8A16


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Uniform integers from low up to high - 1; few are drawn on the CPU, as in lab.randn."""
    where = "cpu" if shape[0] * shape[1] <= CPU_DRAW else lab.DEVICE.torch
    generator = torch.Generator(where).manual_seed(seed)
    drawn = torch.randint(low, high, shape, generator=generator, device=where, dtype=dtype)
    return drawn.to(lab.DEVICE.torch)


def w8_inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int, K: int) -> tuple[Tensor, ...]:
    """Standard normal x, uniform w_q in -127 … 127, and scales that make y of size one."""
    x, scale = lab.randn((M, K), (N,), dtype=dtype, seed=seed)
    w_q = integers(-127, 128, (N, K), torch.int8, seed)
    return x, w_q, (1 + 0.5 * scale.tanh()) / (73 * K**0.5)


def w8_reference(x: Tokens, w_q: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]) -> Tensor:
    """The product with the weights that the integers stand for, ROWS of them at a time."""
    parts = zip(w_q.split(ROWS), scale.split(ROWS), strict=True)
    return torch.cat([x @ (s[:, None] * q).T for q, s in parts], dim=1)


def w8_library(x: Tokens, w_q: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]) -> Tensor:
    """Dequantise, then F.linear: the weights go to memory and back in the dtype of x."""
    return torch.nn.functional.linear(x, scale[:, None] * w_q)


def packed_once(prepare):
    """A peer's packing, kept as long as the weights: users pack when they load a model."""
    kept = WeakIdKeyDictionary()

    @wraps(prepare)
    def packed(w_q: Tensor, *others):
        if w_q not in kept:
            kept[w_q] = prepare(w_q, *others)
        return kept[w_q]

    return packed


@packed_once
def torchao_w8_weights(w_q: Tensor, scale: Tensor) -> Tensor:
    """The weights as torchao keeps them; it chooses its own scales."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    N, K = w_q.shape
    linear = torch.nn.Linear(K, N, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(scale[:, None] * w_q, requires_grad=False)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.weight


@cache
def compiled_linear():
    """F.linear, compiled once for all weights of a shape."""
    linear = torch.nn.functional.linear
    return torch.compile(lambda x, w: linear(x, w), mode=COMPILE_MODE, dynamic=False)


def torchao_w8(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """Torchao's int8 weight-only linear under torch.compile."""
    with torch.no_grad():
        return compiled_linear()(x, torchao_w8_weights(w_q, scale))


@packed_once
def gemlite_w8_module(w_q: Tensor, scale: Tensor):
    """GemLite's layer; it chooses its own scales."""
    from gemlite.helper import A16W8

    return A16W8(device=str(w_q.device)).from_weights(scale[:, None] * w_q)


def gemlite_w8(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """GemLite's int8 weight-only kernel."""
    return gemlite_w8_module(w_q, scale)(x)


GEMV_W8A16 = lab.Problem(
    name="gemv_w8a16",
    inputs=w8_inputs,
    reference=w8_reference,
    library=w8_library,
    work=lambda dtype, M, N, K: lab.Work(
        bytes=N * K + (N + M * K + M * N) * dtype.itemsize, flops=2 * M * N * K
    ),
    terms=lambda M, N, K: K,
    **COMMON,
    test_sizes=tuple(
        {"M": m, "N": n, "K": k}
        for m, n, k in (
            (1, 1, 16),
            (1, 5, 48),
            (8, 2, 512),
            (1, 3, 4624),
            (2, 7, 528),
            (1, 67, 16),
            (2, 3, 272),
        )
    ),
    huge_size=GEMV.huge_size,
    bench_size={"M": 1, "N": 28672, "K": 8192},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in (*LAYERS, (151936, 1024))),
        {"M": 4, "N": 28672, "K": 8192},
    ),
    target=(
        lab.Bar(
            "gemv_w8a16_fused is at least 1.6 times as fast as gemv_split_k in bfloat16 at M=1, "
            "N=28,672, K=8,192",
            lambda results: bars.three_digits(
                results.time("gemv_split_k", "bfloat16", M=1, N=28672, K=8192)
                / results.time("gemv_w8a16_fused", "bfloat16", M=1, N=28672, K=8192)
            ),
            at_least=1.6,
        ),
    ),
    peers={"torchao": torchao_w8, "gemlite": gemlite_w8},
    suspects={
        "forgets the scale": lambda x, w_q, scale: w8_reference(x, w_q, torch.ones_like(scale)),
        "reads int8 as uint8": lambda x, w_q, scale: w8_reference(x, w_q.view(torch.uint8), scale),
        "last partial split dropped": lambda x, w_q, scale: w8_reference(
            *without_last_piece(W8_WARPS * WARP * W8_LANE)(x, w_q, scale)
        ),
        "same token for every row": lambda x, w_q, scale: w8_reference(
            x[:1].expand_as(x), w_q, scale
        ),
    },
    properties=(
        lab.Property(
            "a token's result does not depend on the other tokens",
            "same token for every row",
            tokens_are_independent(w8_inputs),
        ),
    ),
)

# W4A16


def w4_inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int, K: int) -> tuple[Tensor, ...]:
    """Standard normal x, uniform nibbles, and scales, one per GROUP, that make y of size one."""
    x, scale = lab.randn((M, K), (N, K // GROUP), dtype=dtype, seed=seed)
    w_q = integers(0, 256, (N, K // 2), torch.uint8, seed)
    return x, w_q, (1 + 0.5 * scale.tanh()) / (4.6 * K**0.5)


def unpacked(w_q: UInt8[Tensor, "N K/2"]) -> Int8[Tensor, "N K"]:
    """The integers -8 … 7: even columns from the low nibbles, odd ones from the high."""
    return torch.stack((w_q & 15, w_q >> 4), -1).flatten(1).to(torch.int8) - 8


def dequantised(w_q: UInt8[Tensor, "N K/2"], scale: Float[Tensor, "N G"]) -> Weights:
    """The weights that the nibbles stand for, in the dtype of the scales."""
    q = unpacked(w_q).unflatten(1, (scale.shape[1], -1))  # [N, K/group, group]
    return (scale[:, :, None] * q).flatten(1)


def w4_reference(x: Tokens, w_q: UInt8[Tensor, "N K/2"], scale: Float[Tensor, "N G"]) -> Tensor:
    """The product with the weights that the nibbles stand for, ROWS of them at a time."""
    parts = zip(w_q.split(ROWS), scale.split(ROWS), strict=True)
    return torch.cat([x @ dequantised(q, s).T for q, s in parts], dim=1)


def w4_library(x: Tokens, w_q: UInt8[Tensor, "N K/2"], scale: Float[Tensor, "N G"]) -> Tensor:
    """Dequantise, then F.linear: the weights go to memory and back in the dtype of x."""
    return torch.nn.functional.linear(x, dequantised(w_q, scale))


@packed_once
def torch_w4_weights(w_q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Nibbles and scales as torch's kernel wants them: the even column in the high nibble."""
    packed = torch._convert_weight_to_int4pack((w_q << 4) | (w_q >> 4), 8)
    return packed, torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()


def torch_w4(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """torch._weight_int4pack_mm: tinygemm."""
    if x.dtype != torch.bfloat16:
        raise NotImplementedError(f"{x.dtype}: torch's int4 kernel takes bfloat16")
    packed, scale_and_zero = torch_w4_weights(w_q, scale)
    return torch._weight_int4pack_mm(x, packed, GROUP, scale_and_zero)


@packed_once
def gemlite_w4_module(w_q: Tensor, scale: Tensor):
    """GemLite's layer, with 8 as the zero point of every group."""
    from gemlite.helper import A16Wn

    zeros = torch.full_like(scale, 8).reshape(-1, 1)
    q = (unpacked(w_q) + 8).to(torch.uint8)
    return A16Wn(device=str(w_q.device)).from_weights(q, scale.reshape(-1, 1), zeros, 4, GROUP)


def gemlite_w4(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """GemLite's int4 weight-only kernel."""
    return gemlite_w4_module(w_q, scale)(x)


def w4_late_groups(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """A suspect: every group begins one lane, 32 columns, late."""
    K = x.shape[1]
    late = (torch.arange(K, device=x.device) - W4_LANE).clamp(min=0) // (K // scale.shape[1])
    return x @ (unpacked(w_q) * scale[:, late]).T


GEMV_W4A16 = lab.Problem(
    name="gemv_w4a16",
    inputs=w4_inputs,
    reference=w4_reference,
    library=w4_library,
    work=lambda dtype, M, N, K: lab.Work(
        bytes=N * K // 2 + (N * K // GROUP + M * K + M * N) * dtype.itemsize, flops=2 * M * N * K
    ),
    terms=lambda M, N, K: K,
    **COMMON,
    test_sizes=tuple(
        {"M": m, "N": n, "K": k}
        for m, n, k in (
            (1, 1, 128),
            (1, 5, 256),
            (8, 2, 1024),
            (1, 3, 4224),
            (2, 7, 1152),
            (1, 67, 128),
            (2, 3, 384),
        )
    ),
    huge_size={"M": 1, "N": 2**19 + 1, "K": 8192},  # bytes of w_q; 2^32 weights
    bench_size={"M": 1, "N": 8192, "K": 81920},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in (*LAYERS, (151936, 1024), (28672, 8192))),
        {"M": 4, "N": 28672, "K": 8192},
    ),
    target=(
        lab.Bar(
            "gemv_w4a16_fused reads at least 2.6 TB/s at M=1, N=8,192, K=81,920, bfloat16",
            lambda results: (
                results.timing("gemv_w4a16_fused", "bfloat16", M=1, N=8192, K=81920).bandwidth
            ),
            at_least=2.6e12,
        ),
    ),
    peers={"torch int4": torch_w4, "gemlite": gemlite_w4},
    suspects={
        "nibbles swapped": lambda x, w_q, scale: w4_reference(x, (w_q << 4) | (w_q >> 4), scale),
        "highest nibble first": lambda x, w_q, scale: w4_reference(
            x, ((w_q << 4) | (w_q >> 4)).unflatten(1, (-1, 4)).flip(2).flatten(1), scale
        ),
        "same columns of x for every word": lambda x, w_q, scale: w4_reference(
            x.unflatten(1, (-1, 4, 8))[:, :, :1].expand(-1, -1, 4, -1).flatten(1), w_q, scale
        ),
        "one scale for several groups": lambda x, w_q, scale: w4_reference(
            x, w_q, scale[:, :1].expand_as(scale)
        ),
        "wrong group boundary": w4_late_groups,
        "scale applied before the sum, in few bits": lambda x, w_q, scale: (
            x @ dequantised(w_q, scale).half().to(x.dtype).T
        ),
        "forgets the zero point": lambda x, w_q, scale: (
            w4_reference(x, w_q, scale)
            + 8 * (x.unflatten(1, (scale.shape[1], -1)).sum(2) @ scale.T)
        ),
        "forgets the scale": lambda x, w_q, scale: w4_reference(x, w_q, torch.ones_like(scale)),
        "last partial split dropped": lambda x, w_q, scale: w4_reference(
            *without_last_piece(W4_WARPS * WARP * W4_LANE)(x, w_q, scale)
        ),
        "same token for every row": lambda x, w_q, scale: w4_reference(
            x[:1].expand_as(x), w_q, scale
        ),
    },
    properties=(
        lab.Property(
            "a token's result does not depend on the other tokens",
            "same token for every row",
            tokens_are_independent(w4_inputs),
        ),
    ),
)


def check_tokens(x: Tensor) -> tuple[int, int]:
    """Refuse an x that is not [M, K] with 1 to MAX_M rows; returns M and K."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [M, K]")
    M, K = x.shape
    if not 1 <= M <= MAX_M:
        raise ValueError(f"x has shape {tuple(x.shape)}: {M=} must be 1 to {MAX_M}; use a matmul")
    if K == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: {K=} must be positive")
    return M, K


def check_args(x: Tensor, w: Tensor) -> tuple[int, int, int]:
    """What rungs 1 to 5 need; returns M, N and K."""
    lab.check_tensors(x=x, w=w)
    M, K = check_tokens(x)
    if w.ndim != 2 or w.shape[1] != K:
        raise ValueError(f"w has shape {tuple(w.shape)}, must be [N, {K}] to go with x")
    return M, w.shape[0], K


def check_aligned(**tensors: Tensor) -> None:
    """ValueError, naming the argument, for one that does not start at a multiple of 16 bytes."""
    for name, t in tensors.items():
        late = t.data_ptr() % VECTOR_BYTES
        if late:
            raise ValueError(f"{name} starts {late} bytes after a multiple of 16: clone it")


def output(x: Tensor, N: int, out: Tensor | None, **read: Tensor) -> Tensor:
    """The given `out` if it fits and lies apart from x and what else is read, else a new [M, N]."""
    shape = (x.shape[0], N)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    lab.check_tensors(x=x, out=out)
    lab.check_contiguous(out=out)
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {shape}")
    lab.check_apart(out=out, x=x, **read)
    return out


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def gemv_naive_kernel(x, w, y):
    """Thread `row` of block row m computes y[m, row], column after column."""
    N, K = w.shape
    m = cuda.blockIdx.y
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < N:
        total = float32(0)
        for col in range(K):
            total += float32(x[m, col]) * float32(w[row, col])
        y[m, row] = rounded(total, y)


def gemv_naive(x: Tensor, w: Tensor) -> Tensor:
    """One thread per row of w: neighbouring threads read K elements apart."""
    M, N, _ = check_args(x, w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N > 0:
        blocks = (N + THREADS - 1) // THREADS
        gemv_naive_kernel[(blocks, M), THREADS, lab.stream()](x, w, y)
    return y


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def gemv_coalesced_kernel(x, w, y):
    """The warp of threads ty computes y[m, row]; thread tx takes columns tx, tx + 32, ..."""
    N, K = w.shape
    m = cuda.blockIdx.y
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.x * BLOCK_ROWS + ty
    sum_s = cuda.shared.array((BLOCK_ROWS, WARP), float32)
    total = float32(0)
    if row < N:  # no early return: threads without a row must reach the barriers too
        for col in range(tx, K, WARP):
            total += float32(x[m, col]) * float32(w[row, col])
    sum_s[ty, tx] = total
    cuda.syncthreads()
    # A tree: the upper half is added to the lower until sum_s[ty, 0] holds everything.
    half = WARP // 2
    while half > 0:
        if tx < half:
            sum_s[ty, tx] += sum_s[ty, tx + half]
        cuda.syncthreads()  # outside the branch: every thread of the block must arrive
        half //= 2
    if tx == 0 and row < N:
        y[m, row] = rounded(sum_s[ty, 0], y)


def gemv_coalesced(x: Tensor, w: Tensor) -> Tensor:
    """One warp per row: neighbours read neighbours, and sums meet in shared memory."""
    M, N, _ = check_args(x, w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N > 0:
        blocks = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
        gemv_coalesced_kernel[(blocks, M), (WARP, BLOCK_ROWS), lab.stream()](x, w, y)
    return y


# Rung 3 --------------------------------------------------------------------------------------


@cuda.jit
def gemv_warp_kernel(x, w, y):
    """The warp of threads ty computes y[m, row], and adds up its 32 sums by shuffles."""
    N, K = w.shape
    m = cuda.blockIdx.y
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.x * BLOCK_ROWS + ty
    if row < N:  # the same for a whole warp, and nobody waits for other warps
        total = float32(0)
        for col in range(tx, K, WARP):
            total += float32(x[m, col]) * float32(w[row, col])
        # Lane i takes the sum of lane i ^ offset: after 16, 8, 4, 2, 1 every lane has the row's.
        offset = WARP // 2
        while offset > 0:
            total += cuda.shfl_xor_sync(FULL_WARP, total, offset)
            offset //= 2
        if tx == 0:
            y[m, row] = rounded(total, y)


def gemv_warp(x: Tensor, w: Tensor) -> Tensor:
    """Warp shuffles instead of the shared-memory tree: no barrier is left."""
    M, N, _ = check_args(x, w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N > 0:
        blocks = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
        gemv_warp_kernel[(blocks, M), (WARP, BLOCK_ROWS), lab.stream()](x, w, y)
    return y


# Rung 4 --------------------------------------------------------------------------------------


@triton.jit
def halves(tile):
    """The even and the odd elements of the last axis."""
    # Triton has no starred expressions.
    return tl.split(tl.reshape(tile, tile.shape[:-1] + (tile.shape[-1] // 2, 2)))  # noqa: RUF005


@triton.jit
def deal(tile, HALVINGS: tl.constexpr):
    """Deal the last axis out to C = 2^HALVINGS tiles: tile j gets elements j, j + C, j + 2C, ...

    Where C neighbours lie in one thread, as after a 16-byte load, this moves nothing.
    """
    parts = (tile,)
    for _ in tl.static_range(HALVINGS):
        even = ()
        odd = ()
        for i in tl.static_range(len(parts)):
            first, second = halves(parts[i])
            even += (first,)
            odd += (second,)
        parts = even + odd
    return parts


@triton.jit
def gemv_vectorized_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Program `pid`, one warp, computes ROWS columns of y, BLOCK_K columns of w at a time.

    A lane has VECTOR neighbouring columns of each vector, a 16-byte load. It keeps its sums for
    each row and token in float32; the lanes' sums meet at the end, in a fixed order.
    """
    VECTOR: tl.constexpr = 2**HALVINGS
    pid = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    offs_n = pid * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    acc = ()
    for _ in tl.static_range(M):
        acc += (tl.zeros((ROWS, BLOCK_K // VECTOR), tl.float32),)
    for start in range(0, K, BLOCK_K):
        mask_k = start + offs_k < K
        mask = (offs_n < N)[:, None] & mask_k[None, :]
        offs_w = offs_n[:, None] * K + (start + offs_k)[None, :]
        w = deal(tl.load(w_ptr + offs_w, mask=mask, other=0.0), HALVINGS)
        new = ()
        for m in tl.static_range(M):
            x = deal(tl.load(x_ptr + m * K + start + offs_k, mask=mask_k, other=0.0), HALVINGS)
            total = acc[m]
            for j in tl.static_range(VECTOR):
                total += w[j].to(tl.float32) * x[j].to(tl.float32)[None, :]
            new += (total,)
        acc = new
    for m in tl.static_range(M):
        tl.store(y_ptr + m * N + offs_n, tl.sum(acc[m], axis=1), mask=offs_n < N)


def gemv_vectorized(
    x: Tokens, w: Weights, *, out: Float[Tensor, "M N"] | None = None
) -> Float[Tensor, "M N"]:
    """16 bytes per load, several loads under way in a lane, and w read once for all tokens.

    With `out`, the result goes there and nothing is allocated. TypeError or ValueError for
    arguments other than contiguous x [M, K], w [N, K] and out [M, N] of one dtype, M from 1 to 8.
    """
    M, N, K = check_args(x, w)
    lab.check_contiguous(x=x, w=w)
    y = output(x, N, out, w=w)
    if N > 0:
        vector = VECTOR_BYTES // x.itemsize
        # Many tokens keep many sums in registers. Simulated matrices are small, yet try both.
        ROWS = 2 if M <= 2 and (N >= TWO_ROWS_N or config.ENABLE_CUDASIM) else 1
        gemv_vectorized_kernel[(triton.cdiv(N, ROWS),)](
            x,
            w,
            y,
            N,
            M=M,
            K=K,
            ROWS=ROWS,
            BLOCK_K=min(PIECE_K, max(WARP * vector, triton.next_power_of_2(K))),
            HALVINGS=vector.bit_length() - 1,
            num_warps=1,
        )
    return y


# Rung 5 --------------------------------------------------------------------------------------

DOT = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// A vector of w. It is used once, so it takes no room in L1, where x should stay. Written like
// this, the loads stay in the order of the source, and before all loads of x.
__device__ uint4 stream(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

// sum + a · b of the numbers in two 32-bit words.
template <typename T> __device__ float dot(unsigned a, unsigned b, float sum);
template <> __device__ float dot<float>(unsigned a, unsigned b, float sum) {
    return fmaf(__uint_as_float(a), __uint_as_float(b), sum);
}
template <> __device__ float dot<__half>(unsigned a, unsigned b, float sum) {
    const float2 p = __half22float2(reinterpret_cast<__half2&>(a));
    const float2 q = __half22float2(reinterpret_cast<__half2&>(b));
    return fmaf(p.y, q.y, fmaf(p.x, q.x, sum));
}
template <> __device__ float dot<__nv_bfloat16>(unsigned a, unsigned b, float sum) {
    // A bfloat16 is the upper half of the same float32: a shift or a mask converts it.
    sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
    return fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
}
template <typename T> __device__ float dot(uint4 a, uint4 b, float sum) {
    return dot<T>(a.w, b.w, dot<T>(a.z, b.z, dot<T>(a.y, b.y, dot<T>(a.x, b.x, sum))));
}
"""
SPLIT = (
    DOT
    + r"""
// SPLIT warps share ROWS rows of w: of each row, a lane takes LOADS vectors at a time. RAGGED: the
// row is no whole number of such rounds, or more than one. Past the last row, a warp reads that
// row again and stores nothing.
template <typename T, int M, int ROWS, int SPLIT, int LOADS, bool RAGGED, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) gemv_split_k_kernel(
    const uint4* x, const uint4* w, T* y, int N, int vectors) {
    constexpr int STEP = 32 * SPLIT;
    __shared__ float part_s[WARPS][ROWS * M];  // what each warp has of each output
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = threadIdx.x % STEP;
    const int row = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    if (!RAGGED) vectors = LOADS * STEP;  // the same, as a constant
    float sum[ROWS][M] = {};
    for (int first = column; first < vectors; first += LOADS * STEP) {
        uint4 a[ROWS][LOADS], b[LOADS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint4* w_row = w + (long long)min(row + r, N - 1) * vectors + first;
            #pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < vectors) a[r][i] = stream(w_row + i * STEP);
        }
        if (!RAGGED) __syncwarp();  // past this, the compiler puts no load off
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            const uint4* x_row = x + m * vectors + first;
            #pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < vectors) b[i] = x_row[i * STEP];
            #pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < vectors)
                    #pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum[r][m] = dot<T>(a[r][i], b[i], sum[r][m]);
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            #pragma unroll
            for (int offset = 16; offset > 0; offset /= 2)
                sum[r][m] += __shfl_xor_sync(~0u, sum[r][m], offset);
            if (lane == 0) part_s[warp][r * M + m] = sum[r][m];
        }
    if (SPLIT > 1) __syncthreads(); else __syncwarp();
    if (column < ROWS * M && row + column / M < N) {
        float total = 0;
        #pragma unroll
        for (int i = 0; i < SPLIT; ++i) total += part_s[warp + i][column];
        y[(long long)(column % M) * N + row + column / M] = T(total);
    }
}
"""
)
CPP_TYPES = ((torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))
# All that could be wanted; what is launched is compiled.
SPLIT_K_KERNELS = {
    (dtype, m, *cut): lab.cuda_kernel(
        SPLIT, f"gemv_split_k_kernel<{name}, {m}, {', '.join(map(str, cut))}, {BLOCK_WARPS}>"
    )
    for dtype, name in CPP_TYPES
    for m in range(1, MAX_M + 1)
    for cut in product((1, 2), (1, 2, 4, 8), range(1, LANE_LOADS + 1), (0, 1))
}


def cut(N: int, K: int, itemsize: int) -> tuple[int, int, int, int]:
    """How rung 5 cuts w: rows of a group of warps, warps of a group, loads of a lane, ragged."""
    # A small matrix is under way as a whole, so it is best spread over many warps. A large one
    # comes in many waves of blocks, and a lane that has more of it has less to do beside loading.
    rows, loads = (1, 2) if N * K * itemsize <= SMALL else (2, LANE_LOADS)
    vectors, warps = K * itemsize // VECTOR_BYTES, 1
    while warps < BLOCK_WARPS and 2 * warps * WARP * loads <= vectors:
        warps *= 2
    loads = min(triton.cdiv(vectors, warps * WARP), LANE_LOADS)
    return rows, warps, loads, int(vectors != warps * WARP * loads)


def gemv_split_k(
    x: Tokens, w: Weights, *, out: Float[Tensor, "M N"] | None = None
) -> Float[Tensor, "M N"]:
    """K is split over warps of a block, as many as the shape needs; all loads of w come first.

    Rung 4's kernel does the work where 16-byte vectors do not fit, as K is no multiple of them or
    x or w starts between two, and under the simulators. With `out`, the result goes there and
    nothing is allocated. TypeError or ValueError for arguments other than contiguous x [M, K],
    w [N, K] and out [M, N] of one dtype, M from 1 to 8.
    """
    M, N, K = check_args(x, w)
    late = K * x.itemsize % VECTOR_BYTES + x.data_ptr() % VECTOR_BYTES + w.data_ptr() % VECTOR_BYTES
    if config.ENABLE_CUDASIM or late:
        return gemv_vectorized(x, w, out=out)
    lab.check_contiguous(x=x, w=w)
    y = output(x, N, out, w=w)
    if N > 0:
        rows, warps, loads, ragged = cut(N, K, x.itemsize)
        kernel = SPLIT_K_KERNELS[x.dtype, M, rows, warps, loads, ragged]
        blocks = triton.cdiv(N, BLOCK_WARPS // warps * rows)
        vectors = np.int32(K * x.itemsize // VECTOR_BYTES)
        kernel[blocks, WARP * BLOCK_WARPS](x, w, y, np.int32(N), vectors)
    return y


# Rung 6 --------------------------------------------------------------------------------------


@triton.jit
def lane_columns(x_ptr, first, K: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr):
    """Eight tiles: tile j holds x[first + LANE·lane + j] for each lane, in float32; 0 past K."""
    offs = tl.arange(0, 8 * LANES)
    cols = first + offs // 8 * LANE + offs % 8
    return deal(tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32), 3)


@triton.jit
def field(word, two_23_bits, J: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Field J of a 32-bit word, its BITS bits as an unsigned number minus ZERO, in float32.

    It is put into the low bits of 2²³ where it is; only fields above bit 20 are moved down first.
    """
    DOWN: tl.constexpr = 12 * (J // 5) if BITS == 4 else 16 * (J // 2)
    PLACE: tl.constexpr = J * BITS - DOWN
    MASK: tl.constexpr = (2**BITS - 1) << PLACE
    big = (((word >> DOWN) & MASK) ^ two_23_bits).to(tl.float32, bitcast=True)
    return big * 2.0**-PLACE - (2.0 ** (23 - PLACE) + ZERO)


@triton.jit
def gemv_w8a16_fused_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    bits_0,
    bits_8,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
):
    """Program `pid` computes ROWS columns of y. w_ptr holds 32-bit words of four weights.

    A lane has LANE = 16 neighbouring columns at a time: four words, a 16-byte load.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_n = pid * ROWS + tl.arange(0, ROWS)
    offs_w = tl.arange(0, 4 * LANES)
    scale = tl.load(scale_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    bits = (bits_0, bits_8)  # 2²³ with the sign bit of the byte at bit 0 or 8: i becomes i + 128
    acc = ()
    for _ in tl.static_range(M):
        acc += (tl.zeros((ROWS, LANES), tl.float32),)
    for start in range(0, K, LANES * LANE):
        word = start // 4 + offs_w
        mask = (offs_n < N)[:, None] & (word < K // 4)[None, :]
        words = deal(tl.load(w_ptr + offs_n[:, None] * (K // 4) + word[None, :], mask=mask), 2)
        for half in tl.static_range(2):  # of the lane's columns
            w = ()
            for j in tl.static_range(8):
                w += (field(words[2 * half + j // 4], bits[j % 2], j % 4, BITS=8, ZERO=128),)
            new = ()
            for m in tl.static_range(M):
                x = lane_columns(x_ptr + m * K, start + 8 * half, K, LANES, LANE)
                total = acc[m]
                for j in tl.static_range(8):
                    total += w[j] * x[j][None, :]
                new += (total,)
            acc = new
    for m in tl.static_range(M):
        tl.store(y_ptr + m * N + offs_n, scale * tl.sum(acc[m], axis=1), mask=offs_n < N)


def gemv_w8a16_fused(
    x: Tokens,
    w_q: Int8[Tensor, "N K"],
    scale: Float[Tensor, " N"],
    *,
    out: Float[Tensor, "M N"] | None = None,
) -> Float[Tensor, "M N"]:
    """Int8 weights become floats in registers: half the bytes; the scale multiplies the sum.

    With `out`, the result goes there and nothing is allocated. TypeError or ValueError for
    arguments other than contiguous x [M, K], w_q [N, K] int8, scale [N] and out [M, N] of the
    dtype of x, M from 1 to 8, K a multiple of 16, w_q at a multiple of 16 bytes.
    """
    lab.check_tensors(x=x, scale=scale)
    lab.check_tensors(dtypes=(torch.int8,), like=x, w_q=w_q)
    M, K = check_tokens(x)
    if w_q.ndim != 2 or w_q.shape[1] != K:
        raise ValueError(f"w_q has shape {tuple(w_q.shape)}, must be [N, {K}] to go with x")
    N = w_q.shape[0]
    if scale.shape != (N,):
        raise ValueError(f"scale has shape {tuple(scale.shape)}, must be ({N},): one for each row")
    if K % W8_LANE:
        raise ValueError(f"{K=} must be a multiple of {W8_LANE}: rows are read in 16-byte vectors")
    lab.check_contiguous(x=x, w_q=w_q, scale=scale)
    check_aligned(w_q=w_q)
    y = output(x, N, out, w_q=w_q, scale=scale)
    if N > 0:
        num_warps = min(W8_WARPS, triton.next_power_of_2(triton.cdiv(K, WARP * W8_LANE)))
        gemv_w8a16_fused_kernel[(triton.cdiv(N, W8_ROWS),)](
            x,
            w_q.view(torch.int32),
            scale,
            y,
            *W8_BITS,
            N,
            M=M,
            K=K,
            ROWS=W8_ROWS,
            LANES=WARP * num_warps,
            LANE=W8_LANE,
            num_warps=num_warps,
        )
    return y


# Rung 7 --------------------------------------------------------------------------------------


@triton.jit
def gemv_w4a16_fused_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    two_23_bits,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
):
    """Program `pid` computes ROWS columns of y. w_ptr holds 32-bit words of eight weights.

    A lane has LANE = 32 neighbouring columns at a time: four words, a 16-byte load. They belong
    to one group, so the lane's sum of them takes one scale.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_n = pid * ROWS + tl.arange(0, ROWS)
    offs_w = tl.arange(0, 4 * LANES)
    acc = ()
    for _ in tl.static_range(M):
        acc += (tl.zeros((ROWS, LANES), tl.float32),)
    for start in range(0, K, LANES * LANE):
        word = start // 8 + offs_w
        mask = (offs_n < N)[:, None] & (word < K // 8)[None, :]
        words = deal(tl.load(w_ptr + offs_n[:, None] * (K // 8) + word[None, :], mask=mask), 2)
        first = start + LANE * tl.arange(0, LANES)  # column of each lane
        mask = (offs_n < N)[:, None] & (first < K)[None, :]
        offs_s = offs_n[:, None] * (K // GROUP) + (first // GROUP)[None, :]
        scale = tl.load(scale_ptr + offs_s, mask=mask, other=0.0).to(tl.float32)
        sums = ()
        for _ in tl.static_range(M):
            sums += (tl.zeros((ROWS, LANES), tl.float32),)
        for i in tl.static_range(4):  # words of the lane
            w = ()
            for j in tl.static_range(8):  # nibbles of the word, lowest first
                w += (field(words[i], two_23_bits, j, BITS=4, ZERO=8),)
            new = ()
            for m in tl.static_range(M):
                x = lane_columns(x_ptr + m * K, start + 8 * i, K, LANES, LANE)
                total = sums[m]
                for j in tl.static_range(8):
                    total += w[j] * x[j][None, :]
                new += (total,)
            sums = new
        new = ()
        for m in tl.static_range(M):
            new += (acc[m] + scale * sums[m],)
        acc = new
    for m in tl.static_range(M):
        tl.store(y_ptr + m * N + offs_n, tl.sum(acc[m], axis=1), mask=offs_n < N)


def gemv_w4a16_fused(
    x: Tokens,
    w_q: UInt8[Tensor, "N K/2"],
    scale: Float[Tensor, "N G"],
    *,
    group: int = GROUP,
    out: Float[Tensor, "M N"] | None = None,
) -> Float[Tensor, "M N"]:
    """Nibbles become floats in registers: a quarter of the bytes, a scale for each group's sum.

    With `out`, the result goes there and nothing is allocated. TypeError or ValueError for
    arguments other than contiguous x [M, K], w_q [N, K/2] uint8, scale [N, K/group] and out [M, N]
    of the dtype of x, M from 1 to 8, group a multiple of 32 that divides K, w_q at a multiple of
    16 bytes.
    """
    lab.check_tensors(x=x, scale=scale)
    lab.check_tensors(dtypes=(torch.uint8,), like=x, w_q=w_q)
    lab.check_count(group=group)
    M, K = check_tokens(x)
    if w_q.ndim != 2 or 2 * w_q.shape[1] != K:
        shape = f"w_q has shape {tuple(w_q.shape)}, and x {tuple(x.shape)}"
        raise ValueError(f"{shape}: w_q must be [N, K/2], two weights to a byte")
    N = w_q.shape[0]
    if group < 1 or group % W4_LANE or K % group:
        raise ValueError(f"{group=} must be a multiple of {W4_LANE} and divide {K=}")
    if scale.shape != (N, K // group):
        shape = f"scale has shape {tuple(scale.shape)}, must be {(N, K // group)}"
        raise ValueError(f"{shape}: a scale for each row and each {group} columns")
    lab.check_contiguous(x=x, w_q=w_q, scale=scale)
    check_aligned(w_q=w_q)
    y = output(x, N, out, w_q=w_q, scale=scale)
    if N > 0:
        num_warps = min(W4_WARPS, triton.next_power_of_2(triton.cdiv(K, WARP * W4_LANE)))
        # Many tokens keep many sums in registers.
        rows = 2 * W4_ROWS if K >= LONG_K and M <= 2 else W4_ROWS
        gemv_w4a16_fused_kernel[(triton.cdiv(N, rows),)](
            x,
            w_q.view(torch.int32),
            scale,
            y,
            TWO_23_BITS,
            N,
            M=M,
            K=K,
            GROUP=group,
            ROWS=rows,
            LANES=WARP * num_warps,
            LANE=W4_LANE,
            num_warps=num_warps,
        )
    return y


# Mutants -------------------------------------------------------------------------------------

COALESCED = lab.Exercise(
    "gemv_coalesced",
    "gemv_coalesced_kernel",
    hints=(
        "A block has `BLOCK_ROWS` warps, and each warp has one row of w: threads with the same "
        "`ty` work on row `cuda.blockIdx.x * BLOCK_ROWS + ty`. Thread `tx` adds the columns `tx`, "
        "`tx + 32`, ... in float32; `range(tx, K, WARP)` ends where it should for every K.",
        "Put each thread's sum into `cuda.shared.array((BLOCK_ROWS, WARP), float32)`. Then halve: "
        "16 threads of each warp add the upper half to the lower, then 8, 4, 2, 1.",
        "The last block may have warps without a row. They add nothing and store nothing, but "
        "they must reach every `cuda.syncthreads()`: do not return early.",
        "One thread of each warp stores `y[m, row] = rounded(sum_s[ty, 0], y)`.",
    ),
    mutants=(
        lab.Mutant(
            "no_barrier",
            "missing barrier",
            {"sum_s[ty, tx] = total\n    cuda.syncthreads()\n": "sum_s[ty, tx] = total\n"},
        ),
        lab.Mutant(
            "divergent",
            "barrier in a divergent branch",
            {"    cuda.syncthreads()  # outside": "        cuda.syncthreads()  # outside"},
        ),
        lab.Mutant("no_guard", "missing tail guard", {"tx == 0 and row < N": "tx == 0"}),
        lab.Mutant("off_by_one", "off by one", {"tx == 0 and row < N": "tx == 0 and row < N - 1"}),
        lab.Mutant(
            "last_column", "last column left out", {"range(tx, K, WARP)": "range(tx, K - 1, WARP)"}
        ),
        lab.Mutant("short_tree", "tree stops too early", {"while half > 0:": "while half > 1:"}),
        lab.Mutant(
            "no_tree", "one lane's sum only", {"rounded(sum_s[ty, 0], y)": "rounded(total, y)"}
        ),
        lab.Mutant(
            "local",
            "local index used for global",
            {"row = cuda.blockIdx.x * BLOCK_ROWS + ty": "row = ty"},
        ),
    ),
)

LOAD_W = "w = deal(tl.load(w_ptr + offs_w, mask=mask, other=0.0), HALVINGS)\n"
VECTORIZED = lab.Exercise(
    "gemv_vectorized",
    "gemv_vectorized_kernel",
    hints=(
        "The program has the rows `pid * ROWS` to `pid * ROWS + ROWS - 1` of w, `BLOCK_K` columns "
        "at a time: a tile `[ROWS, BLOCK_K]`. Take `pid = tl.program_id(0).to(tl.int64)`: in 32 "
        "bits, offsets would wrap at 2³¹. Both K and N need a mask; what is masked must be zero.",
        "`deal(tile, HALVINGS)` turns a tile into `VECTOR` smaller ones, `[ROWS, BLOCK_K // "
        "VECTOR]`: element (r, i) of part j is column `i * VECTOR + j`. Deal x out the same way.",
        "Keep a tuple of M accumulators `[ROWS, BLOCK_K // VECTOR]` in float32, made as `deal` "
        "makes its tuples. A tuple cannot be changed, so each piece builds a new one. Each part of "
        "w times the part of x with the same j goes to the accumulator of that token.",
        "Only at the end does `tl.sum(acc[m], axis=1)` bring the lanes of a row together.",
    ),
    mutants=(
        lab.Mutant(
            "no_mask",
            "missing tail guard",
            {"mask_k = start + offs_k < K": "mask_k = start + offs_k < K + BLOCK_K"},
        ),
        lab.Mutant(
            "whole_pieces",
            "last partial split dropped",
            {"range(0, K, BLOCK_K)": "range(0, K - BLOCK_K + 1, BLOCK_K)"},
        ),
        lab.Mutant(
            "half",
            "low-precision accumulator",
            {"new += (total,)": "new += (total.to(tl.float16).to(tl.float32),)"},
        ),
        lab.Mutant("off_by_one", "off by one", {"mask=offs_n < N)": "mask=offs_n < N - 1)"}),
        lab.Mutant(
            "restart", "sum begins again at each piece", {"total = acc[m]": "total = 0 * acc[m]"}
        ),
        lab.Mutant(
            "one_program",
            "local index used for global",
            {"pid = tl.program_id(0)": "pid = (0 * tl.program_id(0))"},
        ),
        lab.Mutant(
            "first_token",
            "same token for every row",
            {"x_ptr + m * K + start": "x_ptr + start"},
        ),
        lab.Mutant(
            "reload",
            "too much traffic",
            {"        " + LOAD_W: "", "total = acc[m]\n": LOAD_W + "            total = acc[m]\n"},
        ),
    ),
    # Of the ledger: w once for all tokens. At the size that is counted, two programs read x.
    gates={"bytes": 1.5},
)

W4 = lab.Exercise(
    "gemv_w4a16_fused",
    "gemv_w4a16_fused_kernel",
    hints=(
        "A row of packed weights has `K // 8` words. Load a tile of `[ROWS, 4 * LANES]` of them; "
        "`deal(..., 2)` gives each lane its four words. Word i of a lane holds columns 8i to "
        "8i + 7 of its 32.",
        "`field(word, two_23_bits, j, BITS=4, ZERO=8)` is nibble j of a word, minus 8, in float32. "
        "`lane_columns(x_ptr + m * K, start + 8 * i, K, LANES, LANE)` gives the eight tiles of x "
        "that go with word i.",
        "All 32 columns of a lane lie in group `(start + LANE * lane) // GROUP`. Sum them first; "
        "then add scale times the sum to the accumulator.",
    ),
    mutants=(
        lab.Mutant(
            "swapped", "nibbles swapped", {"two_23_bits, j,": "two_23_bits, j + 1 - 2 * (j % 2),"}
        ),
        lab.Mutant(
            "one_scale", "one scale for several groups", {"(first // GROUP)": "(0 * first)"}
        ),
        lab.Mutant(
            "late_groups",
            "wrong group boundary",
            {"(first // GROUP)": "(tl.maximum(first - LANE, 0) // GROUP)"},
        ),
        lab.Mutant(
            "scaled_weights",
            "scale applied before the sum, in few bits",
            {
                "total += w[j] * x": "total += (scale * w[j]).to(tl.float16).to(tl.float32) * x",
                "acc[m] + scale * sums[m]": "acc[m] + sums[m]",
            },
        ),
        lab.Mutant("no_zero", "forgets the zero point", {"ZERO=8": "ZERO=0"}),
        lab.Mutant("no_scale", "forgets the scale", {"acc[m] + scale *": "acc[m] +"}),
        lab.Mutant(
            "whole_pieces",
            "last partial split dropped",
            {"range(0, K, LANES * LANE)": "range(0, K - LANES * LANE + 1, LANES * LANE)"},
        ),
        lab.Mutant("no_mask", "missing tail guard", {"axis=1), mask=offs_n < N)": "axis=1))"}),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------

PERSISTENT = (
    DOT
    + r"""
typedef __nv_bfloat16 T;

// One token. A block has ROWS rows at a time, K split over all its warps. The next rows are on
// their way while it adds up the present ones.
template <int ROWS, int LOADS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 2) gemv_persistent_kernel(
    const uint4* x, const uint4* w, T* y, int N, int vectors) {
    __shared__ float part_s[2][WARPS][ROWS];  // taken in turns: one barrier for each round
    const int step = blockDim.x, lane = threadIdx.x % 32;
    uint4 now[ROWS][LOADS] = {}, next[ROWS][LOADS] = {}, b[LOADS] = {};
    auto load = [&](long long row, uint4(&to)[ROWS][LOADS]) {
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            #pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int p = threadIdx.x + i * step;
                if (p < vectors) to[r][i] = stream(w + min(row + r, N - 1LL) * vectors + p);
            }
    };
    load((long long)blockIdx.x * ROWS, now);
    #pragma unroll
    for (int i = 0; i < LOADS; ++i)
        if (threadIdx.x + i * step < vectors) b[i] = x[threadIdx.x + i * step];
    int turn = 0;
    for (long long row = (long long)blockIdx.x * ROWS; row < N; row += gridDim.x * ROWS) {
        if (row + gridDim.x * ROWS < N) load(row + gridDim.x * ROWS, next);
        __syncwarp();  // the compiler moves no load past this
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = 0;
            #pragma unroll
            for (int i = 0; i < LOADS; ++i) sum = dot<T>(now[r][i], b[i], sum);
            #pragma unroll
            for (int offset = 16; offset > 0; offset /= 2)
                sum += __shfl_xor_sync(~0u, sum, offset);
            if (lane == 0) part_s[turn][threadIdx.x / 32][r] = sum;
        }
        __syncthreads();
        if (threadIdx.x < ROWS && row + threadIdx.x < N) {
            float total = 0;
            for (int i = 0; i < WARPS; ++i) total += part_s[turn][i][threadIdx.x];
            y[row + threadIdx.x] = T(total);
        }
        turn ^= 1;
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            #pragma unroll
            for (int i = 0; i < LOADS; ++i) now[r][i] = next[r][i];
    }
}
"""
)
PERSISTENT_KERNEL = lab.cuda_kernel(
    PERSISTENT, f"gemv_persistent_kernel<2, {LANE_LOADS}, {BLOCK_WARPS}>"
)


def gemv_persistent(x: Tokens, w: Weights) -> Tensor:
    """A block goes through many rows and loads ahead; bf16, one token, K a multiple of 8."""
    M, N, K = check_args(x, w)
    most = BLOCK_WARPS * WARP * LANE_LOADS * 8
    if x.dtype != torch.bfloat16 or M != 1 or N == 0 or K % 8 or most < K:
        raise ValueError(
            f"{x.dtype}, {M=}, {N=}, {K=}: must be bfloat16, 1, 1 or more, 8 to {most}"
        )
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    blocks = min(triton.cdiv(N, 2), 2 * max(1, lab.DEVICE.sms))
    PERSISTENT_KERNEL[blocks, WARP * BLOCK_WARPS](x, w, y, np.int32(N), np.int32(K // 8))
    return y


@triton.jit
def gemv_w4a16_converted_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program `pid` computes ROWS columns of y for one token, BLOCK_K columns of w at a time."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K // 2)
    offs_g = tl.arange(0, GROUPS)
    acc = tl.zeros((ROWS, GROUPS), tl.float32)
    mask_n = (offs_n < N)[:, None]
    for start in range(0, K, BLOCK_K):
        mask_b = (start // 2 + offs_b < K // 2)[None, :]
        w_offs = offs_n[:, None] * (K // 2) + (start // 2 + offs_b)[None, :]
        byte = tl.load(w_ptr + w_offs, mask=mask_n & mask_b, other=0)
        x = tl.load(x_ptr + start + offs_k, mask=start + offs_k < K, other=0.0).to(tl.float32)
        even, odd = halves(x)
        low, high = (byte & 15).to(tl.float32) - 8, (byte >> 4).to(tl.float32) - 8
        products = low * even[None, :] + high * odd[None, :]
        mask_g = (start // GROUP + offs_g < K // GROUP)[None, :]
        s_offs = offs_n[:, None] * (K // GROUP) + (start // GROUP + offs_g)[None, :]
        scale = tl.load(scale_ptr + s_offs, mask=mask_n & mask_g, other=0.0).to(tl.float32)
        acc += scale * tl.sum(tl.reshape(products, (ROWS, GROUPS, GROUP // 2)), axis=2)
    tl.store(y_ptr + offs_n, tl.sum(acc, axis=1), mask=offs_n < N)


def gemv_w4a16_converted(x: Tokens, w_q: Tensor, scale: Tensor) -> Tensor:
    """One conversion a weight; one token, groups of 128."""
    M, K = check_tokens(x)
    N = w_q.shape[0]
    if M != 1 or N == 0 or scale.shape != (N, K // GROUP):
        raise ValueError(f"{M=}, {N=}, {scale.shape=}: must be one token and groups of {GROUP}")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    gemv_w4a16_converted_kernel[(triton.cdiv(N, W4_ROWS),)](
        x, w_q, scale, y, N, K=K, GROUP=GROUP, ROWS=W4_ROWS, BLOCK_K=4096, num_warps=W4_WARPS
    )
    return y


LADDER = lab.Ladder(
    GEMV,
    (
        lab.Rung(gemv_naive, "numba"),
        lab.Rung(gemv_coalesced, "numba"),
        lab.Rung(gemv_warp, "numba", simulates=False),  # the simulator has no shuffles
        lab.Rung(gemv_vectorized, "triton"),
        lab.Rung(gemv_split_k, "cuda", simulates=False),  # under the simulators it is rung 4
        lab.Rung(gemv_w8a16_fused, "triton", problem=GEMV_W8A16),
        lab.Rung(gemv_w4a16_fused, "triton", problem=GEMV_W4A16),
    ),
    exercises=(COALESCED, VECTORIZED, W4),
    rejected=(
        lab.Rejected(
            gemv_persistent,
            against="gemv_split_k",
            attempt="persistent: two blocks an SM, each asks for its next rows before it adds up "
            "the ones it has",
            expected="no block starts with an empty pipeline but the first, and the barrier's wait "
            "is hidden: 1 to 2 % less time",
            cause="There was next to nothing to win: the rung is nearly at the read ceiling. By "
            "the compile card an SM holds four of its blocks, so while one of them "
            "starts, three have loads under way. The attempt needs twice the registers "
            "for what it asks for ahead.",
        ),
        lab.Rejected(
            gemv_w4a16_converted,
            against="gemv_w4a16_fused",
            attempt="plain Triton: bytes, a mask or a shift, and a conversion from integer to "
            "float for each weight",
            expected="the same bytes, but more instructions for a weight than its product takes: "
            "30 to 60 % more time",
            cause="More than was expected, and the machine code shows more than a conversion: "
            "its loop has six instructions for a weight, and 18 barriers, because the two "
            "halves of x change threads through shared memory. The rung's loop has fewer "
            "than four instructions for a weight, and no barrier.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

gemv = gemv_split_k
gemv_w8a16 = gemv_w8a16_fused
gemv_w4a16 = gemv_w4a16_fused

_OPS = {
    "gemv": (gemv, "(Tensor x, Tensor w) -> Tensor"),
    "gemv_w8a16": (gemv_w8a16, "(Tensor x, Tensor w_q, Tensor scale) -> Tensor"),
    "gemv_w4a16": (gemv_w4a16, "(Tensor x, Tensor w_q, Tensor scale, *, int group=128) -> Tensor"),
}
for _name, (_op, _schema) in _OPS.items():
    torch.library.custom_op(
        f"kernel_ladder::{_name}", _op, mutates_args=(), schema=_schema
    ).register_fake(lambda x, w, *others, **options: x.new_empty((x.shape[0], w.shape[0])))
