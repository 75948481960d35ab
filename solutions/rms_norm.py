"""RMSNorm with Qwen's cast order, then the residual addition in the same pass.

    y[m, n] = w[n] · x[m, n] / sqrt(mean_n(x[m, :]²) + eps)

Qwen computes the root in float32, rounds the normalised row to the dtype of x, multiplies by w and
rounds again. With a residual, x + residual is rounded first; it is the second output.

Shapes   x [M, N], residual [M, N], w [N] -> y [M, N], new_residual [M, N]; M tokens, N hidden size
Cost     read x and w, write y: (2·M·N + N)·itemsize bytes for 4·M·N FLOPs: bandwidth bound
Source   Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4; the cast order is that of Qwen3RMSNorm in
         Hugging Face Transformers
"""

import labkit as lab
from labkit import bars

import math

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from numba import config, cuda, float32
from torch import Tensor

EPS = 1e-6  # Qwen3-0.6B, config.json: rms_norm_eps
THREADS = 128  # threads that share a row in rungs 2 and 3; an SM holds 16 such blocks
WARP = 32
WARPS = THREADS // WARP
FULL_WARP = 0xFFFFFFFF  # every lane takes part in a shuffle
MAX_N = 65536  # rungs 4 and 5: 32 warps of 64 elements a thread; past 32,768 registers spill
THIN, THICK = 8, 64  # elements of a row in a thread of rungs 4 and 5; in bf16, 1 or 8 loads
ONE_WAVE = 2**20  # elements; half of what 132 SMs with 2,048 threads hold at 8 a thread
SHORT = 512  # rungs 4 and 5: up to this N, one row is too little work for a program
PROGRAM_N = SHORT + 88  # of properties: rungs 4 and 5 give such a row a program of its own
MANY = 2 * SHORT  # rung 4: up to this N too, if there is more than one wave of rows
SIMULATED = bool(config.ENABLE_CUDASIM)
Rows, Gain = Float[Tensor, "M N"], Float[Tensor, " N"]

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """Standard normal x; w = 1 + normal/10, as trained gains scatter around one."""
    x, w = lab.randn((M, N), (N,), dtype=dtype, seed=seed)
    return x, 1 + 0.1 * w


def reference(x: Rows, w: Gain, eps: float = EPS) -> Rows:
    """The formula, in the dtype it is given: the truth is this in float64."""
    return w * x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps)


def library(x: Rows, w: Gain, eps: float = EPS) -> Rows:
    """Transformers' Qwen3RMSNorm: its operations, one kernel each."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def torch_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """F.rms_norm: one kernel, and it rounds once."""
    return torch.nn.functional.rms_norm(x, (x.shape[1],), w, EPS)


def liger_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Liger's kernel in the mode that rounds where Llama and Qwen do."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama")


def flashinfer_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """FlashInfer's kernel; it rounds once."""
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, w, EPS)


def casts_like(library, inputs):
    """A property: in bf16, all but a few values are the library's to the last bit."""

    def holds(kernel) -> str | None:
        args = inputs(torch.bfloat16, seed=1, M=8, N=PROGRAM_N)
        for got, want in zip(lab.outputs(kernel(*args)), lab.outputs(library(*args)), strict=True):
            same = (got == want).double().mean().item()
            if same < 0.99:
                return f"{same:.0%} of the values have the library's bits, wanted 99 %"
        return None

    return holds


def scales(dtype: torch.dtype, sizes: tuple[float, ...], allowed: float):
    """A property: rows of very different size come out right, each relative to its own values."""

    def holds(kernel) -> str | None:
        x, w = inputs(dtype, seed=1, M=len(sizes), N=PROGRAM_N)
        x *= torch.tensor(sizes, dtype=dtype, device=x.device)[:, None]
        y, truth = kernel(x, w).double(), reference(x.double(), w.double())
        errors = (y - truth).abs().amax(1) / truth.abs().amax(1)
        for size, error in zip(sizes, errors.tolist(), strict=True):
            if not error <= allowed:  # also true for NaN
                return f"values of size {size:g} come out wrong by {error:.2g} of the largest"
        return None

    return holds


SIZES = {
    # One element; primes; below, at and above a block of threads, which is also a power of two;
    # short rows, fewer than a Triton program takes and more; rows that fill a program, and almost.
    "test_sizes": tuple(
        {"M": m, "N": n}
        for m, n in (
            *((1, 1), (2, 31), (1, 127), (9, 128), (2, 129), (2, 1024), (1, 4099)),
            *(
                (130, 3),
                (2, 2049),
                (2, 521),
            ),  # more than a careless grid covers
        )
    ),
    "empty_size": {"M": 0, "N": 8},
    "huge_size": {"M": 2**19 + 1, "N": 4096},
    "bench_size": {"M": 16384, "N": 4096},
    "sweep": (
        *({"M": m, "N": n} for n in (1024, 4096) for m in (1, 16, 256, 4096, 16384)),
        *({"M": 4096, "N": n} for n in (128, 512, 16384)),
    ),
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
}


def target(rung: str, problem: str) -> tuple[lab.Bar, ...]:
    """The same bars hold with and without the residual."""
    return (
        bars.fraction(rung, 0.98, dtype="bfloat16", M=16384, N=4096),
        bars.fraction(rung, 0.85, dtype="bfloat16", M=16384, N=1024),
        bars.seconds(rung, 4e-6, dtype="bfloat16", M=1, N=1024),
        bars.best_peer(rung, problem, dtype="bfloat16"),
    )


RMS_NORM = lab.Problem(
    name="rms_norm",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, M, N: lab.Work(bytes=(2 * M * N + N) * dtype.itemsize, flops=4 * M * N),
    terms=lambda M, N: N,
    **SIZES,
    target=target("rms_norm_fused", "rms_norm"),
    peers={
        "F.rms_norm": torch_rms_norm,
        "liger": liger_rms_norm,
        "flashinfer": flashinfer_rms_norm,
    },
    suspects={
        "forgets eps": lambda x, w: reference(x, w, 0.0),
        "forgets the gain": lambda x, w: reference(x, torch.ones_like(w)),
        "adds the gain": lambda x, w: reference(x, torch.ones_like(w)) + w,
        "sum instead of mean": lambda x, w: reference(x, w, EPS / len(w)) / len(w) ** 0.5,
        "forgets the root": lambda x, w: w * x / ((x * x).mean(dim=1, keepdim=True) + EPS),
        "mean over the whole matrix": lambda x, w: w * x / torch.sqrt((x * x).mean() + EPS),
        "divides by N - 1": lambda x, w: (
            w * x / torch.sqrt((x * x).sum(dim=1, keepdim=True) / max(len(w) - 1, 1) + EPS)
        ),
        "subtracts the mean": lambda x, w: reference(x - x.mean(dim=1, keepdim=True), w),
        "mean over the padded width": lambda x, w: (
            reference(x, w) * (triton.next_power_of_2(len(w)) / len(w)) ** 0.5
        ),
        # Without the last step, half = 1, the sums of columns 1, 3, 5, ... are lost.
        "tree stops too early": lambda x, w: (
            w * x / torch.sqrt((x[:, ::2] ** 2).sum(dim=1, keepdim=True) / len(w) + EPS)
        ),
        "local index used for global": lambda x, w: reference(
            x, w[torch.arange(len(w), device=w.device) % THREADS]
        ),
        # Masked lanes that hold 1 enter the sum of squares, but are not counted.
        "wrong mask fill": lambda x, w: reference(
            x, w, EPS + (triton.next_power_of_2(len(w)) - len(w)) / len(w)
        ),
    },
    properties=(
        lab.Property(
            "values of size 1e-4 … 1e4 come out right",
            "forgets eps",
            scales(torch.float32, (1e-4, 1e-2, 1e4), 1e-4),
        ),
        lab.Property(
            "fp16 values of size 1e4 come out right, though their squares overflow",
            "low-precision accumulator",
            scales(torch.float16, (1e3, 1e4), 1e-2),
            dtypes=(torch.float16,),
        ),
        lab.Property(
            "bf16 is rounded where Qwen rounds it",
            "wrong cast order",
            casts_like(library, inputs),
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def residual_inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """Standard normal x and residual; w = 1 + normal/10."""
    x, residual, w = lab.randn((M, N), (M, N), (N,), dtype=dtype, seed=seed)
    return x, residual, 1 + 0.1 * w


def residual_reference(x: Rows, residual: Rows, w: Gain) -> tuple[Rows, Rows]:
    """The norm of the sum, and the sum."""
    return reference(x + residual, w), x + residual


def residual_library(x: Rows, residual: Rows, w: Gain) -> tuple[Rows, Rows]:
    """Transformers' addition and Qwen3RMSNorm: their operations, one kernel each."""
    new_residual = x + residual
    return library(new_residual, w), new_residual


def liger_residual(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Liger's fused addition and norm, in the mode that rounds where Llama and Qwen do."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, w, EPS, 0.0, "llama")


def flashinfer_residual(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """FlashInfer's fused kernel. In place: x becomes y and residual the new one."""
    from flashinfer.norm import fused_add_rmsnorm

    fused_add_rmsnorm(x, residual, w, EPS)
    return x, residual


RMS_NORM_RESIDUAL = lab.Problem(
    name="rms_norm_residual",
    inputs=residual_inputs,
    reference=residual_reference,
    library=residual_library,
    work=lambda dtype, M, N: lab.Work(bytes=(4 * M * N + N) * dtype.itemsize, flops=5 * M * N),
    terms=lambda M, N: N,
    **SIZES,
    target=target("rms_norm_residual_fused", "rms_norm_residual"),
    peers={"liger": liger_residual, "flashinfer": flashinfer_residual},
    suspects={
        "forgets the residual": lambda x, r, w: (reference(x, w), x),
        "returns the old residual": lambda x, r, w: (reference(x + r, w), r),
        "norm of x alone": lambda x, r, w: (reference(x, w), x + r),
        "norm of the residual alone": lambda x, r, w: (reference(r, w), x + r),
        "adds the residual after the norm": lambda x, r, w: (reference(x, w) + r, x + r),
        "swaps its outputs": lambda x, r, w: (x + r, reference(x + r, w)),
        "forgets the gain": lambda x, r, w: (reference(x + r, torch.ones_like(w)), x + r),
    },
    properties=(
        lab.Property(
            "bf16 is rounded where Qwen rounds it",
            "wrong cast order",
            casts_like(residual_library, residual_inputs),
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def check_args(x: Tensor, w: Tensor, eps: float, **others: Tensor) -> tuple[int, int]:
    """What every rung needs; returns M and N. `others` must have the shape of x."""
    lab.check_tensors(x=x, w=w, **others)
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [M, N]")
    M, N = x.shape
    if w.shape != (N,):
        raise ValueError(f"w has shape {tuple(w.shape)}, must be ({N},): a gain for each column")
    for name, t in others.items():
        if t.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, must be {tuple(x.shape)} like x")
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps is a {type(eps).__name__}, must be a number")
    if not 0 < eps < math.inf:
        raise ValueError(f"{eps=} must be positive: a row of zeros would be divided by zero")
    return M, N


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def rms_norm_naive_kernel(x, w, eps, y):
    """Thread `row` computes y[row, :], column after column."""
    M, N = x.shape
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < M:
        total = float32(0)
        for col in range(N):
            h = float32(x[row, col])
            total += h * h
        rstd = float32(1) / math.sqrt(total / float32(N) + float32(eps))
        for col in range(N):
            y[row, col] = w[col] * rounded(float32(x[row, col]) * rstd, y)


def rms_norm_naive(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """One thread per row: neighbouring threads read N elements apart, and x is read twice."""
    M, N = check_args(x, w, eps)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        blocks = (M + THREADS - 1) // THREADS
        rms_norm_naive_kernel[blocks, THREADS, lab.stream()](x, w, eps, y)
    return y


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def rms_norm_tiled_kernel(x, w, eps, y):
    """Block `row` computes y[row, :]; thread tx takes the columns tx, tx + THREADS, ..."""
    N = x.shape[1]
    row = cuda.blockIdx.x
    tx = cuda.threadIdx.x
    sum_s = cuda.shared.array(THREADS, float32)
    total = float32(0)
    for col in range(tx, N, THREADS):
        h = float32(x[row, col])
        total += h * h
    sum_s[tx] = total
    cuda.syncthreads()
    # A tree: the upper half is added to the lower until sum_s[0] holds everything.
    half = THREADS // 2
    while half > 0:
        if tx < half:
            sum_s[tx] += sum_s[tx + half]
        cuda.syncthreads()  # outside the branch: every thread of the block must arrive
        half //= 2
    rstd = float32(1) / math.sqrt(sum_s[0] / float32(N) + float32(eps))
    for col in range(tx, N, THREADS):
        y[row, col] = w[col] * rounded(float32(x[row, col]) * rstd, y)


def rms_norm_tiled(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """One block per row: neighbours read neighbours, and sums meet in shared memory."""
    M, N = check_args(x, w, eps)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        rms_norm_tiled_kernel[M, THREADS, lab.stream()](x, w, eps, y)
    return y


# Rung 3 --------------------------------------------------------------------------------------


@cuda.jit
def rms_norm_warp_kernel(x, w, eps, y):
    """Block `row` computes y[row, :]; a warp adds up its 32 sums without shared memory."""
    N = x.shape[1]
    row = cuda.blockIdx.x
    tx = cuda.threadIdx.x
    sum_s = cuda.shared.array(WARPS, float32)
    total = float32(0)
    for col in range(tx, N, THREADS):
        h = float32(x[row, col])
        total += h * h
    # Lane i takes the sum of lane i ^ offset: after 16, 8, 4, 2, 1 every lane has the warp's.
    offset = WARP // 2
    while offset > 0:
        total += cuda.shfl_xor_sync(FULL_WARP, total, offset)
        offset //= 2
    if tx % WARP == 0:
        sum_s[tx // WARP] = total
    cuda.syncthreads()  # the only barrier left
    total = float32(0)
    for warp in range(WARPS):
        total += sum_s[warp]
    rstd = float32(1) / math.sqrt(total / float32(N) + float32(eps))
    for col in range(tx, N, THREADS):
        y[row, col] = w[col] * rounded(float32(x[row, col]) * rstd, y)


def rms_norm_warp(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """Warp shuffles instead of the shared-memory tree: one barrier for a row, not eight."""
    M, N = check_args(x, w, eps)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        rms_norm_warp_kernel[M, THREADS, lab.stream()](x, w, eps, y)
    return y


# Rung 4 --------------------------------------------------------------------------------------


def warps(M: int, N: int) -> int:
    """Warps of a program that holds one row. ValueError for rows longer than MAX_N."""
    if N > MAX_N:
        raise ValueError(f"{N=} must be at most {MAX_N}: registers hold a whole row")
    # Work that fits on the chip at once is spread thin: a short chain of instructions per thread.
    # Above that, more loads in flight per thread, and fewer warps that must meet for a row.
    per_thread = THIN if M * N <= ONE_WAVE else THICK
    return min(max(1, triton.next_power_of_2(N) // (WARP * per_thread)), 32)


@triton.jit
def rms_norm_fused_kernel(x_ptr, w_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Program `row` computes y[row, :], held in registers from its load to its store."""
    row = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    w = tl.load(w_ptr + offs, mask=mask)  # issued before x is waited for
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h) / N + eps)  # the zeros of masked lanes add nothing
    y = w * (h * rstd).to(x.dtype)  # rounds here, and again in the product
    tl.store(y_ptr + row * N + offs, y, mask=mask)


@triton.jit
def rms_norm_short_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    new_ptr,
    M,
    N,
    eps,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program `pid` computes ROWS short rows of y, and of x + residual if RESIDUAL."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    mask = (offs_m < M)[:, None] & mask_n[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]  # [ROWS, BLOCK_N]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    w = tl.load(w_ptr + offs_n, mask=mask_n)
    if RESIDUAL:
        residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(new_ptr + offs, x, mask=mask)
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)
    y = w[None, :] * (h * rstd[:, None]).to(x.dtype)
    tl.store(y_ptr + offs, y, mask=mask)


def rms_norm_short(x, residual, w, y, new, eps: float) -> None:
    """Launch rms_norm_short_kernel; residual and new are None without a residual."""
    M, N = x.shape
    BLOCK_N = triton.next_power_of_2(N)
    num_warps = max(1, BLOCK_N // 256)
    ROWS = num_warps * 1024 // BLOCK_N  # 32 elements a thread
    rms_norm_short_kernel[(triton.cdiv(M, ROWS),)](
        x,
        residual,
        w,
        y,
        new,
        M,
        N,
        eps,
        RESIDUAL=residual is not None,
        ROWS=ROWS,
        BLOCK_N=BLOCK_N,
        num_warps=num_warps,
    )


def rms_norm_fused(x: Rows, w: Gain, eps: float = EPS) -> Rows:
    """The row stays in registers: x is read once.

    TypeError or ValueError for arguments other than contiguous x [M, N] and w [N] of one dtype, N
    at most MAX_N, and eps above zero.
    """
    M, N = check_args(x, w, eps)
    lab.check_contiguous(x=x, w=w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if N <= SHORT or (N <= MANY and M * N > ONE_WAVE):
        rms_norm_short(x, None, w, y, None, eps)
    else:
        rms_norm_fused_kernel[(M,)](
            x, w, y, N, eps, BLOCK_N=triton.next_power_of_2(N), num_warps=warps(M, N)
        )
    return y


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def rms_norm_residual_fused_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, new_ptr, N, eps, BLOCK_N: tl.constexpr
):
    """Program `row` computes row `row` of x + residual and of its norm."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    # All three loads are issued before the first of them is waited for.
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * N + offs, mask=mask, other=0.0)
    w = tl.load(w_ptr + offs, mask=mask)
    new = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(new_ptr + row * N + offs, new, mask=mask)
    h = new.to(tl.float32)  # the norm is that of the rounded sum
    rstd = tl.rsqrt(tl.sum(h * h) / N + eps)
    y = w * (h * rstd).to(x.dtype)
    tl.store(y_ptr + row * N + offs, y, mask=mask)


def check_pair(y: Tensor, new: Tensor, x: Tensor, residual: Tensor, w: Tensor) -> None:
    """Refuse outputs that share memory; each may be exactly x or residual, whose rows are read."""
    lab.check_apart(out_y=y, out_residual=new, w=w)
    lab.check_apart(out_residual=new, w=w)
    lab.check_apart(out_y=y, x=x, residual=residual, in_place=True)
    lab.check_apart(out_residual=new, x=x, residual=residual, in_place=True)


def rms_norm_residual_fused(
    x: Rows, residual: Rows, w: Gain, eps: float = EPS, *, out: tuple[Rows, Rows] | None = None
) -> tuple[Rows, Rows]:
    """The residual is added while the row is in registers: the sum is not read back.

    Returns (y, new_residual), which are `out` if that is given. Errors as in rms_norm_fused;
    residual and both of `out` have the shape of x.
    """
    M, N = check_args(x, w, eps, residual=residual)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out is a {type(out).__name__}, must be a pair (y, new_residual)")
    y, new = (torch.empty_like(residual) for _ in range(2)) if out is None else out
    check_args(x, w, eps, out_y=y, out_residual=new)
    lab.check_contiguous(x=x, residual=residual, w=w, out_y=y, out_residual=new)
    if out is not None:
        check_pair(y, new, x, residual, w)
    if y.numel() == 0:
        return y, new
    if N <= SHORT:
        rms_norm_short(x, residual, w, y, new, eps)
    else:
        rms_norm_residual_fused_kernel[(M,)](
            x,
            residual,
            w,
            y,
            new,
            N,
            eps,
            BLOCK_N=triton.next_power_of_2(N),
            num_warps=warps(M, N),
        )
    return y, new


# Mutants -------------------------------------------------------------------------------------

TILED = lab.Exercise(
    "rms_norm_tiled",
    "rms_norm_tiled_kernel",
    hints=(
        "One block has one row: `row = cuda.blockIdx.x`. Each thread squares and adds the columns "
        "`tx`, `tx + THREADS`, `tx + 2 * THREADS`, ... in float32; `range(tx, N, THREADS)` ends "
        "where it should for every N.",
        "Put the sum of each thread into `cuda.shared.array(THREADS, float32)`. Then halve: 64 "
        "threads add the upper half to the lower, then 32, then 16, ...",
        "A thread may read what another wrote only after `cuda.syncthreads()`, and every thread of "
        "the block must reach each of them. Where do they belong?",
        "`y[row, col] = w[col] * rounded(float32(x[row, col]) * rstd, y)`, where `rstd` is one "
        "over the root of the mean of the squares plus `eps`.",
    ),
    mutants=(
        lab.Mutant(
            "no_barrier",
            "missing barrier",
            {"sum_s[tx] = total\n    cuda.syncthreads()\n": "sum_s[tx] = total\n"},
        ),
        lab.Mutant(
            "divergent",
            "barrier in a divergent branch",
            {"    cuda.syncthreads()  # outside": "        cuda.syncthreads()  # outside"},
        ),
        lab.Mutant(
            "no_guard",
            "missing tail guard",
            {
                "for col in range(tx, N, THREADS):\n        y[": (
                    "for start in range(0, N, THREADS):\n        col = start + tx\n        y["
                )
            },
        ),
        lab.Mutant("local", "local index used for global", {"= w[col] *": "= w[tx] *"}),
        lab.Mutant("short_tree", "tree stops too early", {"while half > 0:": "while half > 1:"}),
        lab.Mutant("no_mean", "sum instead of mean", {"sum_s[0] / float32(N)": "sum_s[0]"}),
        lab.Mutant("no_eps", "forgets eps", {" + float32(eps))": ")"}),
    ),
    gates={"bytes": 1.7, "sectors": 1.5},  # x twice; neighbours together
)

FUSED = lab.Exercise(
    "rms_norm_fused",
    "rms_norm_fused_kernel",
    hints=(
        "A program has one row. `tl.arange(0, BLOCK_N)` numbers its columns; the row begins `N` "
        "elements after the one before. `tl.program_id(0).to(tl.int64)` says which row it is: in "
        "32 bits, offsets would wrap at 2³¹.",
        "`BLOCK_N` is a power of two, N need not be. A masked lane of x must add nothing to the "
        "sum of squares: load it with `other=0.0`. The mean divides by N.",
        "Compute in float32. Round `h * rstd` to the dtype of x before it meets w.",
    ),
    mutants=(
        lab.Mutant(
            "padded_mean", "mean over the padded width", {"(h * h) / N": "(h * h) / BLOCK_N"}
        ),
        lab.Mutant("ones", "wrong mask fill", {"other=0.0": "other=1.0"}),
        lab.Mutant("no_gain", "forgets the gain", {"y = w * (h": "y = (h"}),
        lab.Mutant("no_root", "forgets the root", {"tl.rsqrt(": "1 / ("}),
        lab.Mutant("no_eps", "forgets eps", {" / N + eps)": " / N)"}),
        lab.Mutant(
            "one_row",
            "local index used for global",
            {"row = tl.program_id(0)": "row = (0 * tl.program_id(0))"},
        ),
        lab.Mutant("no_mask", "missing tail guard", {"offs, y, mask=mask": "offs, y"}),
        lab.Mutant(
            "half",
            "low-precision accumulator",
            {"h = x.to(tl.float32)": "h = x.to(tl.float16)"},
        ),
        lab.Mutant(
            "loads_twice",
            "too much traffic",
            {"y = w * (h": "h = tl.load(x_ptr + row * N + offs, mask=mask)\n    y = w * (h"},
        ),
    ),
    gates={"bytes": 1.3},  # each element of x once
)

# Attempts not kept ---------------------------------------------------------------------------

STAGED = r"""
#include <cuda_bf16.h>
struct alignas(16) Pack { __nv_bfloat16 v[8]; };

// Block `row` computes one row; between its two uses the sum waits in shared memory.
extern "C" __global__ void rms_norm_residual_staged_kernel(
    const Pack* x, const Pack* residual, const Pack* w, Pack* y, Pack* out, int packs, float eps) {
    extern __shared__ Pack row_s[];
    __shared__ float sum_s[32];
    const long long row = (long long)blockIdx.x * packs;
    float total = 0;
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack h = x[row + p];
        const Pack r = residual[row + p];
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
            h.v[j] = __nv_bfloat16((float)h.v[j] + (float)r.v[j]);
            total += (float)h.v[j] * (float)h.v[j];
        }
        out[row + p] = row_s[p] = h;
    }
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    if (threadIdx.x % 32 == 0) sum_s[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sum_s[warp];
    const float rstd = rsqrtf(total / (8 * packs) + eps);
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack h = row_s[p];
        const Pack g = w[p];
        #pragma unroll
        for (int j = 0; j < 8; ++j)
            h.v[j] = __nv_bfloat16((float)g.v[j] * (float)__nv_bfloat16((float)h.v[j] * rstd));
        y[row + p] = h;
    }
}
"""
STAGED_KERNEL = lab.cuda_kernel(STAGED, "rms_norm_residual_staged_kernel")


def rms_norm_residual_staged(
    x: Rows, residual: Rows, w: Gain, eps: float = EPS
) -> tuple[Rows, Rows]:
    """The row in shared memory between its two uses; bf16, N a multiple of 8."""
    M, N = check_args(x, w, eps, residual=residual)
    lab.check_tensors(dtypes=(torch.bfloat16,), x=x)
    if N % 8 or M == 0:
        raise ValueError(f"{M=}, {N=}: M must be positive and N a multiple of 8")
    y, new = torch.empty_like(x), torch.empty_like(x)
    STAGED_KERNEL[M, 256, 2 * N](x, residual, w, y, new, np.int32(N // 8), np.float32(eps))
    return y, new


@triton.jit
def rms_norm_residual_persistent_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, new_ptr, M, N, eps, BLOCK_N: tl.constexpr
):
    """Program `pid` computes the rows pid, pid + programs, ..., and loads w once."""
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    w = tl.load(w_ptr + offs_n, mask=mask)
    first = tl.program_id(0).to(tl.int64)  # the loop variable takes its width from the bounds
    for row in range(first, M, tl.num_programs(0)):
        offs = row * N + offs_n
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        r = tl.load(r_ptr + offs, mask=mask, other=0.0)
        new = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
        tl.store(new_ptr + offs, new, mask=mask)
        h = new.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(h * h) / N + eps)
        tl.store(y_ptr + offs, w * (h * rstd).to(x.dtype), mask=mask)


def rms_norm_residual_persistent(
    x: Rows, residual: Rows, w: Gain, eps: float = EPS
) -> tuple[Rows, Rows]:
    """As many programs as the chip holds, each looping over rows: w is loaded once a program."""
    M, N = check_args(x, w, eps, residual=residual)
    y, new = torch.empty_like(x), torch.empty_like(x)
    warps = max(1, min(32, triton.next_power_of_2(N) // 1024))
    grid = (min(M, max(1, lab.DEVICE.sms) * (32 // warps)),)
    rms_norm_residual_persistent_kernel[grid](
        x, residual, w, y, new, M, N, eps, BLOCK_N=triton.next_power_of_2(N), num_warps=warps
    )
    return y, new


LADDER = lab.Ladder(
    RMS_NORM,
    (
        lab.Rung(rms_norm_naive, "numba"),
        lab.Rung(rms_norm_tiled, "numba"),
        lab.Rung(rms_norm_warp, "numba", simulates=False),  # the simulator has no shuffles
        lab.Rung(rms_norm_fused, "triton"),
        lab.Rung(rms_norm_residual_fused, "triton", problem=RMS_NORM_RESIDUAL),
    ),
    exercises=(TILED, FUSED),
    rejected=(
        lab.Rejected(
            rms_norm_residual_staged,
            against="rms_norm_residual_fused",
            attempt="raw CUDA that stages the row in shared memory between its two uses",
            expected="the same traffic, and registers free for more loads: within 2 % either way",
            cause="Nsight Compute shows the same DRAM traffic and nearly twice the active warps. "
            "Enough bytes were under way before, so more warps buy nothing.",
        ),
        lab.Rejected(
            rms_norm_residual_persistent,
            against="rms_norm_residual_fused",
            attempt="a persistent grid: as many programs as fit, each looping over rows",
            expected="one load of w a program instead of one a row: 1 to 3 % less time",
            cause="w comes from L2 either way. The loads of a program's next row wait until the "
            "row before is stored; Nsight Compute shows warps waiting longer for memory.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

rms_norm = rms_norm_fused
rms_norm_residual = rms_norm_residual_fused

torch.library.custom_op(
    "kernel_ladder::rms_norm",
    rms_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor w, float eps=1e-6) -> Tensor",
).register_fake(lambda x, w, eps=EPS: x.new_empty(x.shape))
torch.library.custom_op(
    "kernel_ladder::rms_norm_residual",
    rms_norm_residual,
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor w, float eps=1e-6) -> (Tensor, Tensor)",
).register_fake(lambda x, residual, w, eps=EPS: (x.new_empty(x.shape), x.new_empty(x.shape)))
