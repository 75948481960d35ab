"""RMSNorm with Qwen's cast order, then the residual addition in the same pass.

    y[m, n] = w[n] · x[m, n] / sqrt(mean_n(x[m, :]²) + eps)

The statistics are float32; the normalised row is rounded to the dtype of x, multiplied by w, and
rounded again. With a residual, x + residual is rounded to the dtype first, and is the second output.

Shapes   x [M, N], residual [M, N], w [N] -> y [M, N], new_residual [M, N]; M tokens, N hidden size
Cost     read x and w, write y: (2·M·N + N)·itemsize bytes for 4·M·N FLOPs: bandwidth bound
Source   Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4; the cast order is that of Qwen3RMSNorm in
         Hugging Face Transformers
"""

import labkit as lab

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from numba import cuda, float32
from torch import Tensor

EPS = 1e-6  # Qwen3-0.6B, config.json: rms_norm_eps
THREADS = 128  # threads that share a row in rungs 2 and 3: 4 warps, 16 rows on an SM
WARP = 32
WARPS = THREADS // WARP
FULL_WARP = 0xFFFFFFFF  # every lane takes part in a shuffle
MAX_N = 65536  # a row in registers: 32 warps of 64 elements a thread is all that a block can hold
THIN, THICK = 8, 32  # elements a thread of rungs 4 and 5: one 16-byte load in bf16, or four
ONE_WAVE = 2**21  # elements that 132 SMs of 2,048 threads hold at 8 a thread
SIMULATED = lab.SIMULATED  # a plain global, so that Numba can drop the branch not taken

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """x standard normal; w = 1 + normal/10, as trained gains scatter around one."""
    x, w = lab.randn((M, N), (N,), dtype=dtype, seed=seed)
    return x, 1 + 0.1 * w


def reference(x: Float[Tensor, "M N"], w: Float[Tensor, " N"], eps: float = EPS) -> Tensor:
    """The formula."""
    return w * x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps)


def library(
    x: Float[Tensor, "M N"], w: Float[Tensor, " N"], eps: float = EPS
) -> Float[Tensor, "M N"]:
    """The operations of Transformers' Qwen3RMSNorm, one kernel each."""
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


def one_rounding(kernel_outputs, library_outputs) -> str | None:
    """Whether bits differ where a rounding in another place would make them differ."""
    for got, want in zip(kernel_outputs, library_outputs, strict=True):
        same = (got == want).double().mean().item()
        if same < 0.99:
            return f"{same:.0%} of the values have the library's bits, wanted 99 %"
    return None


def casts_like_qwen(kernel) -> str | None:
    """In bf16, all but a few values are the library's to the last bit."""
    args = inputs(torch.bfloat16, seed=1, M=8, N=256)
    return one_rounding(lab.outputs(kernel(*args)), lab.outputs(library(*args)))


def tiny_rows(kernel) -> str | None:
    """Where the mean square is not far above eps, or far below it, eps counts."""
    x, w = inputs(torch.float32, seed=1, M=3, N=64)
    x = x * torch.tensor([[1e-4], [1e-3], [1e4]], device=x.device)
    return wrong_row(kernel(x, w), reference(x.double(), w.double()), ("1e-4", "1e-3", "1e4"))


def large_rows(kernel) -> str | None:
    """In fp16 the square of 256 is infinite: only a float32 sum carries rows of size 1e4."""
    x, w = inputs(torch.float16, seed=1, M=2, N=64)
    x = x * torch.tensor([[1e3], [1e4]], dtype=x.dtype, device=x.device)
    return wrong_row(kernel(x, w), reference(x.double(), w.double()), ("1e3", "1e4"), 1e-2)


def wrong_row(y, truth, scales, allowed=1e-4) -> str | None:
    """A sentence on the first row with a relative error above `allowed`; NaN counts as one."""
    for row, scale in enumerate(scales):
        error = ((y[row].double() - truth[row]).abs().max() / truth[row].abs().max()).item()
        if not error <= allowed:
            return f"rows of size {scale} are wrong by {error:.2g} of their largest value"
    return None


SIZES = {
    # One element; below, at and above a block of threads and a power of two; primes; more rows
    # than a Triton program takes.
    "test_sizes": (
        {"M": 1, "N": 1},
        {"M": 3, "N": 31},
        {"M": 2, "N": 127},
        {"M": 5, "N": 128},
        {"M": 2, "N": 509},
        {"M": 3, "N": 129},
    ),
    "empty_size": {"M": 0, "N": 8},
    "bench_size": {"M": 16384, "N": 4096},
    "sweep": (
        *({"M": m, "N": n} for n in (1024, 4096) for m in (1, 16, 256, 4096, 16384)),
        *({"M": 4096, "N": n} for n in (128, 512, 16384)),
    ),
    "dtypes": lab.FLOATS,
}


def of_ceiling(rung: str, **size: int):
    """Fraction of the copy ceiling that a rung reaches in bf16."""
    return lambda results: results.fraction(rung, dtype="bfloat16", **size)


def over_best_peer(rung: str, problem: str):
    """Largest time of a rung over the fastest peer's, over the sweep, to two decimals."""

    def value(results) -> float:
        ratios = (
            results.time(rung, dtype="bfloat16", **size)
            / results.best_peer(problem, dtype="bfloat16", **size)
            for size in results.sizes(rung, "bfloat16")
        )
        return round(max(ratios), 2)

    return value


def bars(rung: str, problem: str) -> tuple[lab.Bar, ...]:
    """The same bars hold with and without the residual."""
    return (
        lab.Bar(
            f"{rung}: at least 98 % of copy at 16384×4096",
            of_ceiling(rung, M=16384, N=4096),
            at_least=0.98,
        ),
        lab.Bar(
            f"{rung}: at least 85 % of copy at 16384×1024",
            of_ceiling(rung, M=16384, N=1024),
            at_least=0.85,
        ),
        lab.Bar(
            f"{rung}: at most 4 µs for one row of 1024",
            lambda results: results.time(rung, dtype="bfloat16", M=1, N=1024),
            at_most=4e-6,
        ),
        lab.Bar(
            f"{rung}: no slower than the best peer at any size",
            over_best_peer(rung, problem),
            at_most=1.0,
        ),
    )


RMS_NORM = lab.Problem(
    name="rms_norm",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, M, N: lab.Work(bytes=(2 * M * N + N) * dtype.itemsize, flops=4 * M * N),
    terms=lambda M, N: N,
    **SIZES,
    target=bars("rms_norm_fused", "rms_norm"),
    peers={
        "F.rms_norm": torch_rms_norm,
        "liger": liger_rms_norm,
        "flashinfer": flashinfer_rms_norm,
    },
    suspects={
        "forgets the gain": lambda x, w: reference(x, torch.ones_like(w)),
        "adds the gain": lambda x, w: reference(x, torch.ones_like(w)) + w,
        "sum instead of mean": lambda x, w: reference(x, w, EPS / w.numel()) / w.numel() ** 0.5,
        "forgets the root": lambda x, w: w * x / ((x * x).mean(dim=1, keepdim=True) + EPS),
        "multiplies by the root": lambda x, w: w * x * (x * x).mean(dim=1, keepdim=True).sqrt(),
        "subtracts the mean": lambda x, w: reference(x - x.mean(dim=1, keepdim=True), w),
        "mean over the padded width": lambda x, w: (
            reference(x, w) * (triton.next_power_of_2(w.numel()) / w.numel()) ** 0.5
        ),
        "wrong mask fill": lambda x, w: padded_with_ones(x, w),
        "normalises the columns": lambda x, w: w * x / ((x * x).mean(dim=0) + EPS).sqrt(),
    },
    properties=(
        lab.Property("rows of size 1e-4 … 1e4 come out right", "forgets eps", tiny_rows),
        lab.Property(
            "fp16 rows of size 1e4 do not overflow",
            "low-precision accumulator",
            large_rows,
            dtypes=(torch.float16,),
        ),
        lab.Property(
            "bf16 is rounded where Qwen rounds it",
            "wrong cast order",
            casts_like_qwen,
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def padded_with_ones(x: Tensor, w: Tensor) -> Tensor:
    """What a kernel computes whose masked lanes hold 1: they enter the sum, not the count."""
    pad = triton.next_power_of_2(w.numel()) - w.numel()
    return w * x / torch.sqrt(((x * x).sum(dim=1, keepdim=True) + pad) / w.numel() + EPS)


def residual_inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """x and residual standard normal; w = 1 + normal/10."""
    x, residual, w = lab.randn((M, N), (M, N), (N,), dtype=dtype, seed=seed)
    return x, residual, 1 + 0.1 * w


def residual_reference(
    x: Float[Tensor, "M N"], residual: Float[Tensor, "M N"], w: Float[Tensor, " N"]
) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    return reference(x + residual, w), x + residual


def residual_library(
    x: Float[Tensor, "M N"], residual: Float[Tensor, "M N"], w: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "M N"], Float[Tensor, "M N"]]:
    """The addition of Transformers' decoder layer, then its Qwen3RMSNorm."""
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


def residual_casts_like_qwen(kernel) -> str | None:
    """In bf16, all but a few values of both outputs are the library's to the last bit."""
    args = residual_inputs(torch.bfloat16, seed=1, M=8, N=256)
    return one_rounding(kernel(*args), residual_library(*args))


RMS_NORM_RESIDUAL = lab.Problem(
    name="rms_norm_residual",
    inputs=residual_inputs,
    reference=residual_reference,
    library=residual_library,
    work=lambda dtype, M, N: lab.Work(bytes=(4 * M * N + N) * dtype.itemsize, flops=5 * M * N),
    terms=lambda M, N: N,
    **SIZES,
    target=bars("rms_norm_residual_fused", "rms_norm_residual"),
    peers={"liger": liger_residual, "flashinfer": flashinfer_residual},
    suspects={
        "forgets the residual": lambda x, r, w: (reference(x, w), x),
        "returns the old residual": lambda x, r, w: (reference(x + r, w), r),
        "norm of x alone": lambda x, r, w: (reference(x, w), x + r),
        "norm of the residual alone": lambda x, r, w: (reference(r, w), x + r),
        "adds the residual after the norm": lambda x, r, w: (reference(x, w) + r, x + r),
        "swaps its outputs": lambda x, r, w: (x + r, reference(x + r, w)),
        "forgets the gain": lambda x, r, w: (reference(x + r, torch.ones_like(w)), x + r),
        "subtracts the residual": lambda x, r, w: (reference(x - r, w), x - r),
    },
    properties=(
        lab.Property(
            "bf16 is rounded where Qwen rounds it",
            "wrong cast order",
            residual_casts_like_qwen,
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
    if not eps > 0:
        raise ValueError(f"{eps=} must be positive: a row of zeros would be divided by zero")
    return M, N


def check_rows(**tensors: Tensor) -> None:
    """The Triton rungs read rows from front to back; rows may lie apart."""
    for name, t in tensors.items():
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(f"{name} has strides {t.stride()}; columns must be 1 apart")
        if t.shape[-1] > MAX_N:
            raise ValueError(f"N={t.shape[-1]} must be at most {MAX_N}: registers hold a whole row")


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:
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


def settings(M: int, N: int) -> tuple[int, int, int]:
    """(ROWS, BLOCK_N, num_warps) of a Triton program, from how many elements a thread gets."""
    BLOCK_N = triton.next_power_of_2(N)
    # Work that fits on the chip at once is spread thin: a thread's chain of instructions is then
    # short. Above that, a thread with more loads in flight needs fewer barriers for a row.
    per_thread = THIN if M * N <= ONE_WAVE else THICK
    per_warp = WARP * per_thread
    return max(1, per_warp // BLOCK_N), BLOCK_N, min(max(1, BLOCK_N // per_warp), 32)


@triton.jit
def rms_norm_fused_kernel(
    x_ptr, w_ptr, y_ptr, stride_xm, M, N, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Program `pid` computes ROWS rows of y, each in registers from its load to its store."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0)
    w = tl.load(w_ptr + offs_n, mask=offs_n < N)
    h = x.to(tl.float32)  # [ROWS, BLOCK_N]
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)  # masked zeros add nothing to the sum
    y = w[None, :] * (h * rstd[:, None]).to(x.dtype)  # rounds here, and again in the product
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y, mask=mask)


def rms_norm_fused(
    x: Float[Tensor, "M N"], w: Float[Tensor, " N"], eps: float = EPS
) -> Float[Tensor, "M N"]:
    """The row stays in registers: x is read once.

    Rows of x may lie apart. TypeError or ValueError for other arguments than x [M, N] and w [N] of
    one dtype with columns 1 apart, N at most MAX_N and eps above zero.
    """
    M, N = check_args(x, w, eps)
    check_rows(x=x, w=w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        ROWS, BLOCK_N, num_warps = settings(M, N)
        grid = (triton.cdiv(M, ROWS),)
        rms_norm_fused_kernel[grid](
            x, w, y, x.stride(0), M, N, eps, ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=num_warps
        )
    return y


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def rms_norm_residual_fused_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    new_ptr,
    stride_xm,
    stride_rm,
    M,
    N,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program `pid` computes ROWS rows of x + residual and of its norm."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    # All three loads are issued before the first of them is used.
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0)
    r = tl.load(residual_ptr + offs_m[:, None] * stride_rm + offs_n[None, :], mask=mask, other=0.0)
    w = tl.load(w_ptr + offs_n, mask=offs_n < N)
    new = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
    out = offs_m[:, None] * N + offs_n[None, :]
    tl.store(new_ptr + out, new, mask=mask)
    h = new.to(tl.float32)  # the norm is that of the rounded sum
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)
    y = w[None, :] * (h * rstd[:, None]).to(x.dtype)
    tl.store(y_ptr + out, y, mask=mask)


def rms_norm_residual_fused(
    x: Float[Tensor, "M N"],
    residual: Float[Tensor, "M N"],
    w: Float[Tensor, " N"],
    eps: float = EPS,
) -> tuple[Float[Tensor, "M N"], Float[Tensor, "M N"]]:
    """The addition while both operands are in registers: the sum is not read back.

    Returns (y, new_residual). Errors as in rms_norm_fused; residual has the shape of x.
    """
    M, N = check_args(x, w, eps, residual=residual)
    check_rows(x=x, residual=residual, w=w)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    new_residual = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        ROWS, BLOCK_N, num_warps = settings(M, N)
        grid = (triton.cdiv(M, ROWS),)
        rms_norm_residual_fused_kernel[grid](
            x,
            residual,
            w,
            y,
            new_residual,
            x.stride(0),
            residual.stride(0),
            M,
            N,
            eps,
            ROWS=ROWS,
            BLOCK_N=BLOCK_N,
            num_warps=num_warps,
        )
    return y, new_residual


# Mutants -------------------------------------------------------------------------------------

TILED = lab.Exercise(
    "rms_norm_tiled",
    "rms_norm_tiled_kernel",
    hints=(
        "One block has one row: row = cuda.blockIdx.x. Each thread squares and adds the columns "
        "tx, tx + THREADS, tx + 2·THREADS, ... in float32; range(tx, N, THREADS) ends where it "
        "should for every N.",
        "Put the sum of each thread into cuda.shared.array(THREADS, float32). Then halve: 64 "
        "threads add the upper half to the lower, then 32, then 16, ...",
        "A thread may read what another wrote only after cuda.syncthreads(), and every thread of "
        "the block must reach each of them. Where do they belong?",
        "y[row, col] = w[col] * rounded(float32(x[row, col]) * rstd, y), where rstd is one over "
        "the root of the mean of the squares plus eps.",
    ),
    mutants=(
        lab.Mutant(
            "no_barrier",
            "missing barrier",
            {"    sum_s[tx] = total\n    cuda.syncthreads()\n": "    sum_s[tx] = total\n"},
        ),
        lab.Mutant(
            "divergent",
            "barrier in a divergent branch",
            {"        cuda.syncthreads()  # outside": "            cuda.syncthreads()  # outside"},
        ),
        lab.Mutant(
            "whole_tiles",
            "missing tail guard",
            {
                "    for col in range(tx, N, THREADS):\n        y[row": (
                    "    for start in range(0, N, THREADS):\n"
                    "        col = start + tx\n        y[row"
                )
            },
        ),
        lab.Mutant("local_gain", "local index used for global", {"= w[col] *": "= w[tx] *"}),
        lab.Mutant("short_tree", "off by one", {"while half > 0:": "while half > 1:"}),
        lab.Mutant("no_mean", "sum instead of mean", {"sum_s[0] / float32(N)": "sum_s[0]"}),
        lab.Mutant("no_eps", "forgets eps", {" + float32(eps))": ")"}),
    ),
)

FUSED = lab.Exercise(
    "rms_norm_fused",
    "rms_norm_fused_kernel",
    hints=(
        "A program has ROWS rows: make offs_m [ROWS] and offs_n [BLOCK_N], and combine them into "
        "one [ROWS, BLOCK_N] tile with offs_m[:, None] and offs_n[None, :].",
        "BLOCK_N is a power of two, N need not be. Which value may the masked lanes of x hold so "
        "that the sum of squares stays right? And by what is that sum divided?",
        "Compute in float32. Round h · rstd to the dtype of x before it meets w.",
    ),
    mutants=(
        lab.Mutant(
            "padded_mean",
            "mean over the padded width",
            {"tl.sum(h * h, axis=1) / N": "tl.sum(h * h, axis=1) / BLOCK_N"},
        ),
        lab.Mutant(
            "ones",
            "wrong mask fill",
            {"mask=mask, other=0.0)": "mask=mask, other=1.0)"},
        ),
        lab.Mutant("no_gain", "forgets the gain", {"y = w[None, :] * (h": "y = (h"}),
        lab.Mutant(
            "first_rows",
            "local index used for global",
            {"offs_m = pid * ROWS + tl.arange(0, ROWS)": "offs_m = tl.arange(0, ROWS)"},
        ),
        lab.Mutant(
            "no_mask",
            "missing tail guard",
            {"offs_n[None, :], y, mask=mask)": "offs_n[None, :], y)"},
        ),
        lab.Mutant(
            "half_precision",
            "low-precision accumulator",
            {"h = x.to(tl.float32)": "h = x.to(tl.float16)"},
        ),
        lab.Mutant("no_root", "forgets the root", {"tl.rsqrt(": "1 / ("}),
    ),
)

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
