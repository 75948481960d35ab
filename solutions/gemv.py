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
from labkit.problem import CPU_DRAW

import math
from functools import wraps

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
VECTOR_ROWS, VECTOR_THREADS = 2, 256  # rung 3 in CUDA C++: rows of a warp, threads of a block
MAX_WARPS = 4  # of a Triton program: its sums meet in shared memory, and fewer meet sooner
WHOLE_K = 4096  # rung 5: up to this K a program takes rows in one piece, without a loop
PIECE_K = 1024  # and beyond it in pieces of this many columns
LOADS, MANY_LOADS = 4, 8  # 16-byte loads of w a thread issues before it uses the first
WIDE_N = 16384  # from here there are programs enough for MANY_LOADS
QUANTIZED_ROWS = 4  # rungs 6 and 7: rows of a program, so loads of w in a thread
W8_LANE, W4_LANE = 16, 32  # columns of a lane in rungs 6 and 7: a 16-byte load
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


def piece(K: int, itemsize: int) -> int:
    """Columns that a program of rung 5 takes at a time: whole rows, or PIECE_K of them."""
    least = WARP * VECTOR_BYTES // itemsize
    return max(least, triton.next_power_of_2(K)) if K <= WHOLE_K else PIECE_K


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


def of_read(rung: str, at_least: float, **size: int) -> lab.Bar:
    """Useful bandwidth over the read ceiling: a GEMV writes next to nothing."""
    at = ", ".join(f"{k}={v:,}" for k, v in size.items())
    return lab.Bar(
        f"{rung} reaches {at_least:.0%} of the read ceiling at {at}, bfloat16",
        lambda results: (
            results.timing(rung, "bfloat16", **size).bandwidth
            / results.ceilings["read_bytes_per_s"]
        ),
        at_least=at_least,
    )


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
SIZES = {
    "empty_size": {"M": 1, "N": 0, "K": 128},
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
}

GEMV = lab.Problem(
    name="gemv",
    inputs=inputs,
    reference=reference,
    library=library,
    work=work,
    terms=lambda M, N, K: K,
    **SIZES,
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
            (2, 3, 256),
        )
    ),
    huge_size={"M": 1, "N": 2**18 + 1, "K": 8192},
    bench_size={"M": 1, "N": 28672, "K": 8192},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in LAYERS),
        {"M": 1, "N": 151936, "K": 1024},  # Qwen3-0.6B's LM head
        *({"M": m, "N": 151936, "K": 1024} for m in (2, 4, 8)),
        *({"M": 8, "N": n, "K": k} for n, k in LAYERS),
        *({"M": 1, "N": n, "K": k} for n, k in ((6144, 4096), (4096, 12288), (28672, 4096))),
    ),
    target=(
        *(
            lab.Bar(
                f"gemv_split_k takes at most {us} µs at M=1, N={n:,}, K={k:,}, bfloat16",
                lambda results, n=n, k=k: results.time("gemv_split_k", "bfloat16", M=1, N=n, K=k),
                at_most=us * 1e-6,
            )
            for (n, k), us in zip(LAYERS, (4.2, 2.9, 5.3, 3.7), strict=True)
        ),
        of_read("gemv_split_k", 0.92, M=1, N=151936, K=1024),
        of_read("gemv_split_k", 0.92, M=1, N=28672, K=8192),
    ),
    suspects={
        "last partial split dropped": lambda x, w: reference(*without_last_piece(PIECE_K)(x, w)),
        "last column left out": lambda x, w: reference(x[:, :-1], w[:, :-1]),
        # Without the last step, half = 1, the sums of columns 1, 3, 5, ... are lost.
        "tree stops too early": lambda x, w: reference(x[:, ::2], w[:, ::2]),
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
    """The product with the weights that the integers stand for."""
    return x @ (scale[:, None] * w_q).T


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


def torch_w8(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """torch._weight_int8pack_mm."""
    return torch._weight_int8pack_mm(x, w_q, scale)


@packed_once
def torchao_w8_module(w_q: Tensor, scale: Tensor):
    """A compiled nn.Linear that torchao quantised to int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    N, K = w_q.shape
    linear = torch.nn.Linear(K, N, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(scale[:, None] * w_q, requires_grad=False)
    quantize_(linear, Int8WeightOnlyConfig())
    return torch.compile(linear, mode="max-autotune-no-cudagraphs")


def torchao_w8(x: Tensor, w_q: Tensor, scale: Tensor) -> Tensor:
    """Torchao's int8 weight-only linear under torch.compile; it chooses its own scales."""
    with torch.no_grad():
        return torchao_w8_module(w_q, scale)(x)


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
    **SIZES,
    test_sizes=tuple(
        {"M": m, "N": n, "K": k}
        for m, n, k in (
            (1, 1, 16),
            (1, 5, 48),
            (8, 2, 512),
            (2, 7, 528),
            (1, 3, 4624),
            (1, 67, 16),
            (2, 3, 272),
        )
    ),
    bench_size={"M": 1, "N": 28672, "K": 8192},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in (*LAYERS, (151936, 1024))),
        {"M": 8, "N": 28672, "K": 8192},
    ),
    target=(
        lab.Bar(
            "gemv_w8a16_fused is at least 1.6 times as fast as gemv_split_k in bfloat16 at M=1, "
            "N=28,672, K=8,192",
            lambda results: round(
                results.time("gemv_split_k", "bfloat16", M=1, N=28672, K=8192)
                / results.time("gemv_w8a16_fused", "bfloat16", M=1, N=28672, K=8192),
                2,
            ),
            at_least=1.6,
        ),
    ),
    peers={"torch int8": torch_w8, "torchao": torchao_w8, "gemlite": gemlite_w8},
    suspects={
        "forgets the scale": lambda x, w_q, scale: w8_reference(x, w_q, torch.ones_like(scale)),
        "reads int8 as uint8": lambda x, w_q, scale: w8_reference(x, w_q.view(torch.uint8), scale),
        "last partial split dropped": lambda x, w_q, scale: w8_reference(
            *without_last_piece(MAX_WARPS * WARP * W8_LANE)(x, w_q, scale)
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


def unpacked(w_q: UInt8[Tensor, "N K/2"], swapped: bool = False) -> Int8[Tensor, "N K"]:
    """The integers -8 … 7: even columns from the low nibbles, or the high ones if `swapped`."""
    nibbles = (w_q >> 4, w_q & 15) if swapped else (w_q & 15, w_q >> 4)
    return torch.stack(nibbles, -1).flatten(1).to(torch.int8) - 8


def dequantised(w_q: UInt8[Tensor, "N K/2"], scale: Float[Tensor, "N G"]) -> Weights:
    """The weights that the nibbles stand for, in the dtype of the scales."""
    q = unpacked(w_q).unflatten(1, (scale.shape[1], -1))  # [N, K/group, group]
    return (scale[:, :, None] * q).flatten(1)


def w4_reference(x: Tokens, w_q: UInt8[Tensor, "N K/2"], scale: Float[Tensor, "N G"]) -> Tensor:
    """The product with the weights that the nibbles stand for."""
    return x @ dequantised(w_q, scale).T


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
    **SIZES,
    test_sizes=tuple(
        {"M": m, "N": n, "K": k}
        for m, n, k in (
            (1, 1, 128),
            (1, 5, 256),
            (8, 2, 1024),
            (2, 7, 1152),
            (1, 3, 4224),
            (1, 67, 128),
            (2, 3, 384),
        )
    ),
    bench_size={"M": 1, "N": 8192, "K": 81920},
    sweep=(
        *({"M": 1, "N": n, "K": k} for n, k in (*LAYERS, (151936, 1024), (28672, 8192))),
        {"M": 8, "N": 28672, "K": 8192},
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
            *without_last_piece(MAX_WARPS * WARP * W4_LANE)(x, w_q, scale)
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


def output(x: Tensor, N: int, out: Tensor | None) -> Tensor:
    """The given `out` if it fits, else a new [M, N] tensor."""
    shape = (x.shape[0], N)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    lab.check_tensors(x=x, out=out)
    lab.check_contiguous(out=out)
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {shape}")
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

VECTORIZED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// W neighbours, 16 bytes where K allows it: the compiler loads a Pack with one instruction.
template <typename T, int W> struct alignas(W * sizeof(T)) Pack { T v[W]; };

// A warp computes ROWS columns of y for all M tokens; a lane takes every 32nd pack of each row.
template <typename T, int W, int M>
__global__ void gemv_vectorized_kernel(const T* x, const T* w, T* y, int N, int K) {
    constexpr int ROWS = 2;
    const int lane = threadIdx.x % 32, packs = K / W;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32 * ROWS;
    const Pack<T, W>* w_pack = reinterpret_cast<const Pack<T, W>*>(w);
    const Pack<T, W>* x_pack = reinterpret_cast<const Pack<T, W>*>(x);
    float sum[ROWS][M] = {};
    #pragma unroll 4  // the compiler moves the loads of four rounds ahead of their use
    for (int p = lane; p < packs; p += 32) {
        Pack<T, W> a[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)  // a warp past the end reads the last row and stores nothing
            a[r] = w_pack[min(row + r, N - 1LL) * packs + p];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            const Pack<T, W> b = x_pack[(long long)m * packs + p];
            #pragma unroll
            for (int r = 0; r < ROWS; ++r)
                #pragma unroll
                for (int j = 0; j < W; ++j) sum[r][m] += (float)a[r].v[j] * (float)b.v[j];
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            #pragma unroll
            for (int offset = 16; offset > 0; offset /= 2)
                sum[r][m] += __shfl_xor_sync(~0u, sum[r][m], offset);
            if (lane == 0 && row + r < N) y[(long long)m * N + row + r] = T(sum[r][m]);
        }
}
"""
CPP_TYPES = ((torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))
VECTORIZED_KERNELS = {
    (dtype, width, m): lab.cuda_kernel(VECTORIZED, f"gemv_vectorized_kernel<{name}, {width}, {m}>")
    for dtype, name in CPP_TYPES
    for width in (1, 2, 4, 8)
    if width * dtype.itemsize <= VECTOR_BYTES
    for m in range(1, MAX_M + 1)
}


def gemv_vectorized(x: Tensor, w: Tensor) -> Tensor:
    """16 bytes per load, eight loads under way in a thread, and w read once for all tokens."""
    M, N, K = check_args(x, w)
    lab.check_contiguous(x=x, w=w)
    check_aligned(x=x, w=w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N > 0:
        per_block = VECTOR_ROWS * VECTOR_THREADS // WARP
        blocks = (N + per_block - 1) // per_block
        width = math.gcd(K, VECTOR_BYTES // x.itemsize)  # an odd K leaves rows on odd addresses
        kernel = VECTORIZED_KERNELS[x.dtype, width, M]
        kernel[blocks, VECTOR_THREADS](x, w, y, np.int32(N), np.int32(K))
    return y


# Rung 5 --------------------------------------------------------------------------------------


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
def gemv_split_k_kernel(
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
    """Program `pid` computes ROWS columns of y; all its threads share each row of w.

    A lane has VECTOR neighbouring columns at a time, a 16-byte load. It keeps one sum for each
    row and token; the lanes' sums meet at the end, in a fixed order.
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


def gemv_split_k(
    x: Tokens, w: Weights, *, out: Float[Tensor, "M N"] | None = None
) -> Float[Tensor, "M N"]:
    """K is split over the warps of a program: short rows fill the chip, with no second launch.

    With `out`, the result goes there and nothing is allocated. TypeError or ValueError for
    arguments other than contiguous x [M, K], w [N, K] and out [M, N] of one dtype, M from 1 to 8.
    """
    M, N, K = check_args(x, w)
    lab.check_contiguous(x=x, w=w)
    y = output(x, N, out)
    if N > 0:
        vector = VECTOR_BYTES // x.itemsize
        BLOCK_K = piece(K, x.itemsize)
        num_warps = min(MAX_WARPS, BLOCK_K // (WARP * vector))
        # Many tokens keep many sums in registers, and wide outputs have programs to spare.
        loads = MANY_LOADS if N >= WIDE_N and M <= 2 else LOADS
        ROWS = max(1, loads * num_warps * WARP * vector // BLOCK_K)
        gemv_split_k_kernel[(triton.cdiv(N, ROWS),)](
            x,
            w,
            y,
            N,
            M=M,
            K=K,
            ROWS=ROWS,
            BLOCK_K=BLOCK_K,
            HALVINGS=vector.bit_length() - 1,
            num_warps=num_warps,
        )
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

    Not shifted down and converted, but put into the low bits of 2²³ where it is: one bitwise
    operation and one multiply-add, both exact. Only fields above bit 20 are moved down first.
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


def lanes(K: int, lane: int) -> tuple[int, int]:
    """Lanes and warps of a program that reads rows of K columns, `lane` to a lane at a time."""
    num_warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(K, WARP * lane)))
    return WARP * num_warps, num_warps


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
    lab.check_tensors(dtypes=(torch.int8,), w_q=w_q)
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
    y = output(x, N, out)
    if N > 0:
        LANES, num_warps = lanes(K, W8_LANE)
        gemv_w8a16_fused_kernel[(triton.cdiv(N, QUANTIZED_ROWS),)](
            x,
            w_q.view(torch.int32),
            scale,
            y,
            *W8_BITS,
            N,
            M=M,
            K=K,
            ROWS=QUANTIZED_ROWS,
            LANES=LANES,
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
    lab.check_tensors(dtypes=(torch.uint8,), w_q=w_q)
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
    y = output(x, N, out)
    if N > 0:
        LANES, num_warps = lanes(K, W4_LANE)
        gemv_w4a16_fused_kernel[(triton.cdiv(N, QUANTIZED_ROWS),)](
            x,
            w_q.view(torch.int32),
            scale,
            y,
            TWO_23_BITS,
            N,
            M=M,
            K=K,
            GROUP=group,
            ROWS=QUANTIZED_ROWS,
            LANES=LANES,
            LANE=W4_LANE,
            num_warps=num_warps,
        )
    return y


# Mutants -------------------------------------------------------------------------------------

COALESCED = lab.Exercise(
    "gemv_coalesced",
    "gemv_coalesced_kernel",
    hints=(
        "A block has BLOCK_ROWS warps, and each warp has one row of w: threads with the same ty "
        "work on row blockIdx.x · BLOCK_ROWS + ty. Thread tx adds the columns tx, tx + 32, ... in "
        "float32; range(tx, K, WARP) ends where it should for every K.",
        "Put each thread's sum into cuda.shared.array((BLOCK_ROWS, WARP), float32). Then halve: "
        "16 threads of each warp add the upper half to the lower, then 8, 4, 2, 1.",
        "The last block may have warps without a row. They add nothing and store nothing, but "
        "they must reach every cuda.syncthreads(): do not return early.",
        "One thread of each warp stores y[m, row] = rounded(sum_s[ty, 0], y).",
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
            "local",
            "local index used for global",
            {"row = cuda.blockIdx.x * BLOCK_ROWS + ty": "row = ty"},
        ),
    ),
)

SPLIT_K = lab.Exercise(
    "gemv_split_k",
    "gemv_split_k_kernel",
    hints=(
        "The program has rows pid·ROWS to pid·ROWS + ROWS - 1 of w, BLOCK_K columns at a time: a "
        "tile [ROWS, BLOCK_K]. Both K and N need a mask, and masked weights must be zero.",
        "deal(tile, HALVINGS) turns a tile into VECTOR smaller ones, [ROWS, BLOCK_K // VECTOR]: "
        "element (r, i) of part j is column i·VECTOR + j. Deal x out the same way.",
        "Keep a tuple of M accumulators [ROWS, BLOCK_K // VECTOR] in float32. Each part of w times "
        "the part of x with the same j goes to the accumulator of that token.",
        "Only at the end does tl.sum(acc[m], axis=1) bring the lanes of a row together.",
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
            "one_program",
            "local index used for global",
            {"pid = tl.program_id(0)": "pid = (0 * tl.program_id(0))"},
        ),
        lab.Mutant(
            "first_token",
            "same token for every row",
            {"x_ptr + m * K + start": "x_ptr + start"},
        ),
    ),
)

W4 = lab.Exercise(
    "gemv_w4a16_fused",
    "gemv_w4a16_fused_kernel",
    hints=(
        "A row of packed weights has K // 8 words. Load a tile [ROWS, 4·LANES] of them; deal(…, 2) "
        "gives each lane its four words. Word i of a lane holds columns 8i to 8i + 7 of its 32.",
        "field(word, two_23_bits, j, BITS=4, ZERO=8) is nibble j of a word, minus 8, in float32. "
        "lane_columns(x_ptr + m * K, start + 8 * i, K, LANES, LANE) gives the eight tiles of x "
        "that go with word i.",
        "All 32 columns of a lane lie in group (start + LANE·lane) // GROUP. Sum them first; "
        "then add scale times the sum to the accumulator.",
    ),
    mutants=(
        lab.Mutant(
            "swapped", "nibbles swapped", {"two_23_bits, j,": "two_23_bits, j + 1 - 2 * (j % 2),"}
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

LADDER = lab.Ladder(
    GEMV,
    (
        lab.Rung(gemv_naive, "numba"),
        lab.Rung(gemv_coalesced, "numba"),
        lab.Rung(gemv_warp, "numba", simulates=False),  # the simulator has no shuffles
        lab.Rung(gemv_vectorized, "cuda", simulates=False),
        lab.Rung(gemv_split_k, "triton"),
        lab.Rung(gemv_w8a16_fused, "triton", problem=GEMV_W8A16),
        lab.Rung(gemv_w4a16_fused, "triton", problem=GEMV_W4A16),
    ),
    exercises=(COALESCED, SPLIT_K, W4),
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
