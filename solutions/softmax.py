"""Row softmax, plain and under a mask, for rows from one column to a quarter of a million.

    y[m, n] = exp(x[m, n] - max_j x[m, j]) / sum_j exp(x[m, j] - max_j x[m, j])

Subtracting the maximum changes nothing in exact arithmetic and keeps exp from overflowing. Sums are
float32 whatever the dtype. As in torch, a row of -inf alone gives NaN. Under a mask, columns where
it is False count as -inf and come out as 0, and a row with nothing left is all zeros.

Shapes   x [M, N], mask [M, N] bool -> y [M, N]
Cost     read x, write y: 2·M·N·itemsize bytes, and M·N more for a mask, for 5·M·N FLOPs:
         bandwidth bound
Source   Milakov & Gimelshein 2018, arXiv:1805.02867: maximum and sum in one pass ("online")
"""

import labkit as lab

import math
import warnings
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from numba import config, cuda, float32
from torch import Tensor

THREADS = 128  # threads that share a row in rungs 2 and 3; an SM holds 16 such blocks
WARP = 32
WARPS = THREADS // WARP
FULL_WARP = 0xFFFFFFFF  # every lane takes part in a shuffle
NEG_INF = -math.inf
MAX_N = 2**18  # rung 4: correct up to here, but past 32,768 columns registers spill
THIN, THICK = 8, 16  # elements of a row in a thread of rungs 4 and 6; in bf16, 1 or 2 loads
ONE_WAVE = 2**20  # elements; half of what 132 SMs with 2,048 threads hold at 8 a thread
SHORT = 512  # rungs 4 and 6: up to this N, one row is too little work for a program
TILE = 4096  # rung 5: columns that a program looks at together; 32 a thread
TILE_WARPS = 4
ONE_PROGRAM = 16384  # the ops: up to this N a row is best held in one program's registers
VECTOR_BYTES = 16  # the widest load a thread can issue
PACK_ELEMENTS = 64  # rung 7: elements of a row in a thread, all asked for before one is used
BLOCK_THREADS = 256  # rung 7: in bf16 a block holds 32 KiB of its row, an SM six such blocks
MOST_THREADS = 1024  # the largest block, for the longest rows
MOST_SHARED = (lab.DEVICE.shared_bytes or 227 * 1024) - 3 * 1024  # bytes of a row in a block
MOST_BLOCKS = 8  # the largest cluster that every GPU with clusters can start
SIMULATED = bool(config.ENABLE_CUDASIM)
# Compile cards are made without a device, for many; they show the kernel that clusters run.
CLUSTERS = not SIMULATED and int(lab.DEVICE.sm.partition(".")[0] or 9) >= 9
Rows, Mask = Float[Tensor, "M N"], Bool[Tensor, "M N"]

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """Standard normal logits."""
    return tuple(lab.randn((M, N), dtype=dtype, seed=seed))


def reference(x: Rows) -> Rows:
    """The formula, in the dtype it is given."""
    e = torch.exp(x - x.amax(dim=1, keepdim=True))
    return e / e.sum(dim=1, keepdim=True)


def library(x: Rows) -> Rows:
    """F.softmax."""
    return torch.nn.functional.softmax(x, dim=1)


def liger_softmax(x: Tensor) -> Tensor:
    """Liger's kernel; it refuses rows longer than 65,536."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def quietly(kernel, *args: Tensor) -> Tensor:
    """y in float64. The simulators compute with numpy, which warns of what a GPU does silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return kernel(*args).double()


def comes_out_right(change, M: int):
    """A property: `change(x)` of a small float32 input comes out as the reference says."""

    def holds(kernel) -> str | None:
        for N in (600, 31):  # with 31 columns, most threads of a block have none
            x = change(inputs(torch.float32, seed=1, M=M, N=N)[0])
            try:
                y = quietly(kernel, x)
            except OverflowError:
                return "exp overflows"
            truth = reference(x.double())
            if not torch.equal(y.isnan(), truth.isnan()):
                count, wanted = int(y.isnan().sum()), int(truth.isnan().sum())
                return f"{N=}: {count} values are NaN, wanted {wanted}"
            worst = (y - truth).abs().nan_to_num().max().item()
            if worst > 1e-5:
                return f"{N=}: values are wrong by {worst:.2g}"
        return None

    return holds


def some_columns_out(x: Tensor) -> Tensor:
    """-inf in every third column, in the first 200 of row 0, and in all of the last row."""
    x[:, ::3] = x[0, :200] = x[-1] = NEG_INF
    return x


def shift_changes_nothing(kernel) -> str | None:
    """Adding a constant to a row does not change its softmax."""
    (x,) = inputs(torch.float32, seed=1, M=1, N=600)
    x = (x * 1024).round() / 1024  # so that x + 64 is exact, and only the kernel can differ
    worst = (kernel(x + 64) - kernel(x)).abs().max().item()
    return None if worst <= 1e-6 else f"softmax(x + 64) differs from softmax(x) by {worst:.2g}"


def rows_sum_to_one(kernel) -> str | None:
    """Every row of y sums to 1."""
    (x,) = inputs(torch.float32, seed=1, M=1, N=600)
    worst = (kernel(x).double().sum(dim=1) - 1).abs().max().item()
    return None if worst <= 1e-5 else f"a row's sum is off by {worst:.2g}"


def columns_are_alike(kernel) -> str | None:
    """Permuting the columns of x permutes those of y."""
    (x,) = inputs(torch.float32, seed=1, M=1, N=600)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)).to(x.device)
    worst = (kernel(x[:, order].contiguous()) - kernel(x)[:, order]).abs().max().item()
    return None if worst <= 1e-6 else f"permuted columns give values that differ by {worst:.2g}"


def long_rows_are_right(kernel) -> str | None:
    """Rows too long for one program, odd lengths, and -inf in one half or everywhere."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for N in (16385, 32768, 50257, 65544, 131072, 151936, 262144):
            (x,) = inputs(dtype, seed=1, M=4, N=N)
            x[1, : N // 2] = x[2, N // 2 :] = x[3] = NEG_INF
            try:
                y = kernel(x).double()
            except ValueError:
                continue  # a clear refusal
            truth = reference(x[:3].double())
            most = truth.amax(dim=1, keepdim=True)
            worst = ((y[:3] - truth).abs() / most).max().item()
            if not worst <= max(torch.finfo(dtype).eps, 1e-5):  # also true for NaN
                return f"{N=:,}, {dtype}: a value is wrong by {worst:.2g} of the row's largest"
            if not y[3].isnan().all():
                return f"{N=:,}, {dtype}: a row of -inf is not NaN"
    return None


LONG = {4096: 32768, 8192: 16384, 16384: 8192, 32768: 4096, 65536: 2048, 131072: 1024}  # N: M
SIZES = {
    # One element; primes; below, at and above a block of threads, which is also a power of two;
    # short rows, fewer than a Triton program takes and more; rows that fill a program, and almost.
    "test_sizes": tuple(
        {"M": m, "N": n}
        for m, n in ((1, 1), (2, 31), (1, 127), (9, 128), (2, 1024), (2, 129), (2, 521))
    ),
    "empty_size": {"M": 0, "N": 8},
    "huge_size": {"M": 2**14 + 1, "N": 2**17},
    "bench_size": {"M": 4096, "N": 32768},
    "sweep": (
        *({"M": m, "N": n} for n, m in LONG.items()),
        *({"M": 4096, "N": n} for n in (128, 512, 1024)),
        # Scores over 32k keys; 1,024 rows are 16 heads for each of 64 sequences.
        *({"M": m, "N": 32768} for m in (1, 64, 1024)),
        # Logits of Qwen3 and of Llama 3, for one sequence and for 64.
        *({"M": m, "N": n} for n in (151936, 128256) for m in (1, 64)),
    ),
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
}


def from_4k_to_128k(rung: str, dtype: str, at_least: float = 0.92) -> lab.Bar:
    """The least fraction of the ceiling over the row lengths in LONG, all of 2²⁷ elements."""
    return lab.Bar(
        f"{rung} reaches {at_least:.0%} of the ceiling from N=4,096 to N=131,072, {dtype}",
        lambda results: min(
            results.fraction(rung, dtype=dtype, problem="softmax", M=m, N=n)
            for n, m in LONG.items()
        ),
        at_least=at_least,
    )


def every_other_sum(x: Rows) -> Rows:
    """What a tree that stops one step early gives: the sum of columns 1, 3, 5, ... is lost."""
    e = torch.exp(x - x.amax(dim=1, keepdim=True))
    return e / e[:, ::2].sum(dim=1, keepdim=True)


def wrong_axis(x: Rows) -> Rows:
    """Columns that sum to 1. ValueError for one row: ones alone could be anything."""
    if len(x) == 1:
        raise ValueError("x has one row only")
    return torch.softmax(x, dim=0)


def of_own_columns(x: Rows, reduce) -> Rows:
    """`reduce` over the columns of one thread, every THREADS-th, for each column of x."""
    M, N = x.shape
    columns = torch.nn.functional.pad(x, (0, -N % THREADS), value=NEG_INF).view(M, -1, THREADS)
    return reduce(columns).expand_as(columns).reshape(M, -1)[:, :N]


def own_maximum(x: Rows) -> Rows:
    """What comes out when each thread subtracts the maximum of its own columns."""
    e = torch.exp(x - of_own_columns(x, lambda h: h.amax(dim=1, keepdim=True)))
    return e / e.sum(dim=1, keepdim=True)


def own_sum(x: Rows) -> Rows:
    """What comes out when each thread divides by the sum over its own columns."""
    return torch.exp(x - of_own_columns(x, lambda h: h.logsumexp(dim=1, keepdim=True)))


def padded_with_zeros(x: Rows) -> Rows:
    """Masked lanes that hold 0 instead of -inf take part of each row's sum."""
    pad = triton.next_power_of_2(x.shape[1]) - x.shape[1]
    return reference(torch.nn.functional.pad(x, (0, pad)))[:, : x.shape[1]]


SOFTMAX = lab.Problem(
    name="softmax",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, M, N: lab.Work(bytes=2 * M * N * dtype.itemsize, flops=5 * M * N),
    terms=lambda M, N: N,
    **SIZES,
    sweep_dtypes=(torch.bfloat16, torch.float32),  # those of the bars
    target=(
        from_4k_to_128k("softmax_cluster", "bfloat16"),
        from_4k_to_128k("softmax_cluster", "float32"),
    ),
    peers={"liger": liger_softmax},
    suspects={
        "forgets to normalise": lambda x: torch.exp(x - x.amax(dim=1, keepdim=True)),
        "softmax over the wrong axis": wrong_axis,
        "tree stops too early": every_other_sum,
        "maximum of one thread": own_maximum,
        "sum of one thread": own_sum,
        "wrong mask fill": padded_with_zeros,
        "wrong sign in the exponent": lambda x: reference(-x),
    },
    properties=(
        lab.Property(
            "logits of size +1e4 give no NaN",
            "no max-subtraction",
            comes_out_right(lambda x: x + 1e4, M=1),
        ),
        lab.Property(
            "logits of size -1e4 give no NaN",
            "maximum starts too high",
            comes_out_right(lambda x: x - 1e4, M=1),
        ),
        lab.Property(
            "-inf gives 0, and NaN only where a row has nothing else",
            "-inf not handled",
            comes_out_right(some_columns_out, M=2),
        ),
        lab.Property("rows sum to 1", "forgets to normalise", rows_sum_to_one),
        lab.Property("softmax(x + c) = softmax(x)", "depends on a shift", shift_changes_nothing),
        lab.Property("columns can be permuted", "treats columns unlike", columns_are_alike),
        lab.Property(
            "rows of 16,385 … 262,144 columns come out right",
            "long rows come out wrong",
            long_rows_are_right,
            dtypes=(torch.bfloat16,),  # so on GPUs only: too much work for the simulators
        ),
    ),
)


def masked_inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """Normal logits that rise by 4 over a row; a mask that keeps 0 and three quarters of the rest.

    They rise so that a running maximum is not found early.
    """
    x, coin = lab.randn((M, N), (M, N), dtype=dtype, seed=seed)
    x += torch.linspace(0, 4, N, device=x.device).to(dtype)
    mask = coin > -0.6745  # the lower quartile of a standard normal
    mask[:, :1] = True
    return x, mask


def masked_reference(x: Rows, mask: Mask) -> Rows:
    """The softmax of what the mask leaves; zeros for a row where it leaves nothing."""
    x = x.masked_fill(~mask, NEG_INF)
    return reference(x).masked_fill((x == NEG_INF).all(dim=1, keepdim=True), 0.0)


def masked_library(x: Rows, mask: Mask) -> Rows:
    """masked_fill + F.softmax: and zeros for masked columns, one kernel each."""
    y = torch.nn.functional.softmax(x.masked_fill(~mask, NEG_INF), dim=1)
    return y.masked_fill(~mask, 0.0)


def without_rescale(x: Rows, mask: Mask) -> Rows:
    """What an online sum gives whose earlier tiles keep the maximum that they were added with."""
    x = x.masked_fill(~mask, NEG_INF)
    tops = torch.stack([tile.amax(dim=1) for tile in x.split(TILE, dim=1)]).cummax(dim=0).values
    sums = [
        torch.exp(tile - top[:, None]).sum(dim=1)
        for tile, top in zip(x.split(TILE, dim=1), tops, strict=True)
    ]
    return torch.exp(x - tops[-1][:, None]) / sum(sums)[:, None]


def whole_tiles_only(x: Rows, mask: Mask) -> Rows:
    """What a sum over whole tiles gives; the last tile is left out of it and of the maximum."""
    x = x.masked_fill(~mask, NEG_INF)
    tile = min(TILE, triton.next_power_of_2(x.shape[1]))
    whole = x[:, : x.shape[1] // tile * tile]
    if whole.shape[1] == 0:
        return torch.exp(x)
    top = whole.amax(dim=1, keepdim=True)
    return torch.exp(x - top) / torch.exp(whole - top).sum(dim=1, keepdim=True)


def zeros_for_masked(x: Rows, mask: Mask) -> Rows:
    """What comes out when 0 instead of -inf fills masked columns, and the last tile past N."""
    N = x.shape[1]
    tile = min(TILE, triton.next_power_of_2(N))
    return reference(torch.nn.functional.pad(x * mask, (0, -N % tile)))[:, :N]


def unmasked_exponent(x: Rows, mask: Mask) -> Rows:
    """What comes out when the mask reaches the sum, but not the output."""
    kept = x.masked_fill(~mask, NEG_INF)
    top = kept.amax(dim=1, keepdim=True)
    return torch.exp(x - top) / torch.exp(kept - top).sum(dim=1, keepdim=True)


def empty_rows_are_zeros(kernel) -> str | None:
    """A row that is masked throughout, or holds -inf wherever it is not, is all zeros."""
    for N in (77, 600, TILE + 9):
        x, mask = masked_inputs(torch.float32, seed=1, M=3, N=N)
        mask[0] = False
        x[1, mask[1]] = NEG_INF
        y = quietly(kernel, x, mask)
        if y[:2].any():  # also true for NaN
            return f"{N=}: a row with nothing left holds {y[:2].abs().max().item():.3g}, wanted 0"
        if not (y[2] - masked_reference(x.double(), mask)[2]).abs().max().item() <= 1e-5:
            return f"{N=}: the row beside the empty ones is wrong"
    return None


def masked_logits_do_not_matter(kernel) -> str | None:
    """Logits of any size under the mask, +inf and NaN too, leave the other columns alone."""
    x, mask = masked_inputs(torch.float32, seed=1, M=2, N=TILE + 9)
    wild = torch.tensor((1e4, math.inf, math.nan), device=x.device).repeat(x.shape[1])
    wild = torch.where(mask, x, wild[: x.shape[1]])
    same = torch.equal(quietly(kernel, wild, mask), quietly(kernel, x, mask))
    return None if same else "what stands in a masked column changes the result"


def masked_comes_out_right(change):
    """A property: rows of three tiles come out right after `change(x, mask)`, which is in place."""

    def holds(kernel) -> str | None:
        x, mask = masked_inputs(torch.float32, seed=1, M=2, N=2 * TILE + 9)
        change(x, mask)
        error = (quietly(kernel, x, mask) - masked_reference(x.double(), mask)).abs().max().item()
        wrong = "values are NaN" if math.isnan(error) else f"values are wrong by {error:.2g}"
        return None if error <= 1e-5 else wrong

    return holds


def far_above_zero(x: Tensor, mask: Tensor) -> None:
    """All logits near 1e4."""
    x += 1e4


def far_below_zero(x: Tensor, mask: Tensor) -> None:
    """All logits near -1e4, the largest in the last tile."""
    x -= 1e4
    x[:, -1], mask[:, -1] = -9.99e3, True


def largest_comes_first(x: Tensor, mask: Tensor) -> None:
    """A first tile far above the others, and in row 1 nothing after it."""
    x[:, :TILE] += 200
    mask[1, TILE:] = False


def below_any_stand_in(x: Tensor, mask: Tensor) -> None:
    """All logits are the same, and lower than a number that might stand for -inf."""
    x.fill_(-1e30)


def long_masked_rows_are_right(kernel) -> str | None:
    """Rows too long for one program, odd lengths, NaN under the mask, one column left, and none."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for N in (32776, 50257, 131072, 151936, 262145, 600000):
            x, mask = masked_inputs(dtype, seed=1, M=4, N=N)
            mask[1, : N // 2] = mask[2, :-1] = mask[3] = False
            mask[2, -1] = True
            x.masked_fill_(~mask, math.nan)
            y, truth = kernel(x, mask).double(), masked_reference(x.double(), mask)
            most = truth[:3].amax(dim=1, keepdim=True)
            worst = ((y - truth)[:3].abs() / most).max().item()
            if not worst <= max(torch.finfo(dtype).eps, 1e-5):  # also true for NaN
                return f"{N=:,}, {dtype}: a value is wrong by {worst:.2g} of the row's largest"
            if y[3].any():  # also true for NaN
                return f"{N=:,}, {dtype}: a row with nothing left is not all zeros"
    return None


SOFTMAX_MASKED = lab.Problem(
    name="softmax_masked",
    inputs=masked_inputs,
    reference=masked_reference,
    library=masked_library,
    work=lambda dtype, M, N: lab.Work(bytes=M * N * (2 * dtype.itemsize + 1), flops=5 * M * N),
    terms=lambda M, N: N,
    # As above, and rows longer than a tile.
    test_sizes=(
        *SIZES["test_sizes"][:-1],
        {"M": 2, "N": TILE},
        {"M": 1, "N": 2 * TILE + 5},
        {"M": 2, "N": TILE + 1},
        {"M": 2, "N": 521},
    ),
    empty_size={"M": 0, "N": 8},
    huge_size={"M": 2**14 + 1, "N": 2**17},
    bench_size={"M": 16384, "N": 4096},
    sweep=(
        *({"M": m, "N": n} for m, n in ((4096, 128), (4096, 512), (16384, 1024), (16384, 4096))),
        *({"M": m, "N": n} for m, n in ((4096, 16384), (1024, 32768), (512, 131072))),
        *({"M": m, "N": 151936} for m in (1, 64)),  # a grammar's mask over the logits of Qwen3
    ),
    dtypes=SIZES["dtypes"],
    target=(),  # the ladder's own problem holds the bars
    suspects={
        "forgets the mask": lambda x, mask: reference(x),
        "inverts the mask": lambda x, mask: masked_reference(x, ~mask),
        "wrong mask fill": zeros_for_masked,
        "masked columns are not zero": unmasked_exponent,
        "missing rescale": without_rescale,
        "last tile dropped": whole_tiles_only,
        "forgets to normalise": lambda x, mask: torch.exp(
            x.masked_fill(~mask, NEG_INF) - x.masked_fill(~mask, NEG_INF).amax(1, keepdim=True)
        ),
    },
    properties=(
        lab.Property(
            "logits of size +1e4 give no NaN",
            "no max-subtraction",
            masked_comes_out_right(far_above_zero),
        ),
        lab.Property(
            "logits of size -1e4 give no NaN",
            "maximum starts too high",
            masked_comes_out_right(far_below_zero),
        ),
        lab.Property(
            "a maximum in the first tile counts to the end",
            "forgets earlier maxima",
            masked_comes_out_right(largest_comes_first),
        ),
        lab.Property(
            "logits of size -1e30 still outweigh the mask",
            "wrong mask fill",
            masked_comes_out_right(below_any_stand_in),
        ),
        lab.Property("rows with nothing left are zeros", "empty row", empty_rows_are_zeros),
        lab.Property(
            "masked logits do not matter", "masked logits leak", masked_logits_do_not_matter
        ),
        lab.Property(
            "rows of 32,776 … 600,000 columns come out right",
            "long rows come out wrong",
            long_masked_rows_are_right,
            dtypes=(torch.bfloat16,),  # so on GPUs only, as above
        ),
    ),
)


def check_args(x: Tensor) -> tuple[int, int]:
    """What every rung needs: a matrix. Returns M and N."""
    lab.check_tensors(x=x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [M, N]")
    return x.shape


def check_mask(x: Tensor, mask: Tensor) -> None:
    """A mask of the shape of x, on the device of x."""
    lab.check_tensors(dtypes=(torch.bool,), mask=mask)
    if mask.shape != x.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, must be {tuple(x.shape)} like x")
    if mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, must be on {x.device} like x")


def output(x: Tensor, out: Tensor | None) -> Tensor:
    """Where y goes: `out` if it can take it, or new memory."""
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lab.check_tensors(x=x, out=out)
    lab.check_contiguous(out=out)
    if out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {tuple(x.shape)} like x")
    lab.check_apart(out=out, x=x, in_place=True)
    return out


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def softmax_naive_kernel(x, y):
    """Thread `row` computes y[row, :], column after column."""
    M, N = x.shape
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < M:
        m = float32(NEG_INF)
        for col in range(N):
            m = max(m, float32(x[row, col]))
        total = float32(0)
        for col in range(N):
            total += math.exp(float32(x[row, col]) - m)
        scale = float32(1) / total
        for col in range(N):
            y[row, col] = rounded(math.exp(float32(x[row, col]) - m) * scale, y)


def softmax_naive(x: Tensor) -> Tensor:
    """One thread per row: neighbouring threads read N elements apart, and x is read three times."""
    M, N = check_args(x)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        blocks = (M + THREADS - 1) // THREADS
        softmax_naive_kernel[blocks, THREADS, lab.stream()](x, y)
    return y


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def softmax_tiled_kernel(x, y):
    """Block `row` computes y[row, :]; thread tx takes the columns tx, tx + THREADS, ..."""
    N = x.shape[1]
    row = cuda.blockIdx.x
    tx = cuda.threadIdx.x
    part_s = cuda.shared.array(THREADS, float32)
    m = float32(NEG_INF)
    for col in range(tx, N, THREADS):
        m = max(m, float32(x[row, col]))
    part_s[tx] = m
    cuda.syncthreads()
    # A tree: the upper half joins the lower until part_s[0] is the maximum of the row.
    half = THREADS // 2
    while half > 0:
        if tx < half:
            part_s[tx] = max(part_s[tx], part_s[tx + half])
        cuda.syncthreads()  # outside the branch: every thread of the block must arrive
        half //= 2
    m = part_s[0]
    cuda.syncthreads()  # all have read the maximum before sums come
    total = float32(0)
    for col in range(tx, N, THREADS):
        total += math.exp(float32(x[row, col]) - m)
    part_s[tx] = total
    cuda.syncthreads()
    step = THREADS // 2
    while step > 0:
        if tx < step:
            part_s[tx] += part_s[tx + step]
        cuda.syncthreads()
        step //= 2
    scale = float32(1) / part_s[0]
    for col in range(tx, N, THREADS):
        y[row, col] = rounded(math.exp(float32(x[row, col]) - m) * scale, y)


def softmax_tiled(x: Tensor) -> Tensor:
    """One block per row: neighbours read neighbours; maximum and sum meet in shared memory."""
    M, N = check_args(x)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        softmax_tiled_kernel[M, THREADS, lab.stream()](x, y)
    return y


# Rung 3 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rescaled(total, m, top):
    """A sum of exponentials taken relative to m, relative to top instead; top is at least m."""
    if m == float32(NEG_INF):  # nothing was added yet, and -inf - -inf would be NaN
        return total
    return total * math.exp(m - top)


@cuda.jit
def softmax_warp_kernel(x, y):
    """Block `row` computes y[row, :]; maximum and sum come from one pass over the row."""
    N = x.shape[1]
    row = cuda.blockIdx.x
    tx = cuda.threadIdx.x
    m_s = cuda.shared.array(WARPS, float32)
    total_s = cuda.shared.array(WARPS, float32)
    m, total = float32(NEG_INF), float32(0)
    for col in range(tx, N, THREADS):
        h = float32(x[row, col])
        if h > m:  # a new maximum: what was added so far shrinks
            total = rescaled(total, m, h) + float32(1)
            m = h
        elif h != float32(NEG_INF):
            total += math.exp(h - m)
    # Lane i takes the pair of lane i ^ offset: after 16, 8, 4, 2, 1 every lane has the warp's.
    offset = WARP // 2
    while offset > 0:
        other_m = cuda.shfl_xor_sync(FULL_WARP, m, offset)
        other_total = cuda.shfl_xor_sync(FULL_WARP, total, offset)
        top = max(m, other_m)
        total = rescaled(total, m, top) + rescaled(other_total, other_m, top)
        m = top
        offset //= 2
    if tx % WARP == 0:
        m_s[tx // WARP] = m
        total_s[tx // WARP] = total
    cuda.syncthreads()  # the only barrier left
    m, total = float32(NEG_INF), float32(0)
    for warp in range(WARPS):
        top = max(m, m_s[warp])
        total = rescaled(total, m, top) + rescaled(total_s[warp], m_s[warp], top)
        m = top
    scale = float32(1) / total
    for col in range(tx, N, THREADS):
        y[row, col] = rounded(math.exp(float32(x[row, col]) - m) * scale, y)


def softmax_warp(x: Tensor) -> Tensor:
    """Maximum and sum in one pass, merged by warp shuffles: two reads of x, and one barrier."""
    M, N = check_args(x)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        softmax_warp_kernel[M, THREADS, lab.stream()](x, y)
    return y


# Rung 4 --------------------------------------------------------------------------------------


def warps(M: int, N: int) -> int:
    """Warps of a program that holds one row. ValueError for rows longer than MAX_N."""
    if N > MAX_N:
        raise ValueError(f"{N=} must be at most {MAX_N}: registers hold a whole row")
    # Work that fits on the chip at once is spread thin: a short chain of instructions per thread.
    # Above that, more loads in flight per thread, and fewer warps that must meet for a row.
    per_thread = THIN if M * N <= ONE_WAVE else THICK
    most = 16 if N <= ONE_PROGRAM else 32  # two rows on an SM, until registers would spill
    return min(max(1, triton.next_power_of_2(N) // (WARP * per_thread)), most)


@triton.jit
def softmax_fused_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program `row` computes y[row, :], held in registers from its load to its store."""
    row = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=-float("inf"))
    h = x.to(tl.float32)
    p = tl.exp(h - tl.max(h, axis=0))  # 0 in the masked lanes
    y = p * (1 / tl.sum(p, axis=0))
    tl.store(y_ptr + row * N + offs, y, mask=mask)


@triton.jit
def softmax_short_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    M,
    N,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program `pid` computes ROWS short rows of y, under a mask if MASKED."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]  # [ROWS, BLOCK_N]
    h = tl.load(x_ptr + offs, mask=inside, other=-float("inf")).to(tl.float32)
    if MASKED:
        kept = tl.load(mask_ptr + offs, mask=inside, other=0)
        h = tl.where(kept, h, -float("inf"))
    m = tl.max(h, axis=1)
    m = tl.where(m == -float("inf"), 0.0, m)  # nothing in the row: every exponential is 0
    p = tl.exp(h - m[:, None])
    total = tl.sum(p, axis=1)
    empty = total == 0 if MASKED else offs_m >= M
    total = tl.where(empty, 1.0, total)  # zeros, not 0 / 0
    y = p * (1 / total)[:, None]
    tl.store(y_ptr + offs, y, mask=inside)


def softmax_short(x: Tensor, mask: Tensor | None, y: Tensor) -> None:
    """Launch softmax_short_kernel; mask is None without a mask."""
    M, N = x.shape
    BLOCK_N = triton.next_power_of_2(N)
    num_warps = max(1, BLOCK_N // 256)
    ROWS = num_warps * 1024 // BLOCK_N  # 32 elements a thread
    softmax_short_kernel[(triton.cdiv(M, ROWS),)](
        x,
        mask,
        y,
        M,
        N,
        MASKED=mask is not None,
        ROWS=ROWS,
        BLOCK_N=BLOCK_N,
        num_warps=num_warps,
    )


def softmax_fused(x: Rows, *, out: Rows | None = None) -> Rows:
    """The row stays in registers: x is read once.

    Writes to `out` if given, which may be x itself. TypeError or ValueError for arguments other
    than contiguous matrices of one shape and dtype, with N at most MAX_N.
    """
    M, N = check_args(x)
    lab.check_contiguous(x=x)
    y = output(x, out)
    if y.numel() == 0:
        return y
    if N <= SHORT:
        softmax_short(x, None, y)
    else:
        softmax_fused_kernel[(M,)](
            x, y, N, BLOCK_N=triton.next_power_of_2(N), num_warps=warps(M, N)
        )
    return y


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def softmax_masked_online_kernel(x_ptr, mask_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program `row` computes y[row, :] in tiles of BLOCK_N columns, in two passes over them."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    m_i = -float("inf")  # the largest logit so far
    l_i = 0.0  # the sum of exp(x - m_i) so far
    for start in range(0, N, BLOCK_N):
        inside = start + offs_n < N
        offs = row * N + start + offs_n
        x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(mask_ptr + offs, mask=inside, other=0)
        x = tl.where(kept, x, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(x, axis=0))
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing left so far: -inf - 0
        alpha = tl.exp(m_i - safe)
        l_i = l_i * alpha + tl.sum(tl.exp(x - safe), axis=0)
        m_i = m_new
    safe = tl.where(m_i == -float("inf"), 0.0, m_i)
    scale = 1 / tl.where(l_i == 0, 1.0, l_i)  # a row with nothing left is zeros, not 0 / 0
    for start in range(0, N, BLOCK_N):
        inside = start + offs_n < N
        offs = row * N + start + offs_n
        x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(mask_ptr + offs, mask=inside, other=0)
        y = tl.where(kept, tl.exp(x - safe) * scale, 0.0)
        tl.store(y_ptr + offs, y, mask=inside)


def softmax_masked_online(x: Rows, mask: Mask, *, out: Rows | None = None) -> Rows:
    """Tile after tile, with a running maximum and sum: any row length, for a second read of x.

    Errors as in softmax_masked_fused.
    """
    M, N = check_args(x)
    check_mask(x, mask)
    lab.check_contiguous(x=x, mask=mask)
    y = output(x, out)
    if y.numel() > 0:
        BLOCK_N = min(TILE, triton.next_power_of_2(N))
        softmax_masked_online_kernel[(M,)](x, mask, y, N, BLOCK_N=BLOCK_N, num_warps=TILE_WARPS)
    return y


# Rung 6 --------------------------------------------------------------------------------------


@triton.jit
def softmax_masked_fused_kernel(x_ptr, mask_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program `row` computes y[row, :], held in registers from its load to its store."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_n < N
    offs = row * N + offs_n
    # Loading x under the mask would make each element a load of its own, after the mask's.
    x = tl.load(x_ptr + offs, mask=inside, other=0.0)
    kept = tl.load(mask_ptr + offs, mask=inside, other=0)
    h = tl.where(kept, x.to(tl.float32), -float("inf"))
    m = tl.max(h, axis=0)
    p = tl.exp(h - tl.where(m == -float("inf"), 0.0, m))
    total = tl.sum(p, axis=0)
    y = p * (1 / tl.where(total == 0, 1.0, total))  # a row with nothing left is zeros
    tl.store(y_ptr + offs, y, mask=inside)


def softmax_masked_fused(x: Rows, mask: Mask, *, out: Rows | None = None) -> Rows:
    """Row and mask are read once, side by side; a cluster shares a row past 32,768 columns.

    Writes to `out` if given, which may be x itself. TypeError or ValueError for arguments other
    than contiguous matrices of one shape, x and out of one dtype and mask of bool.
    """
    M, N = check_args(x)
    check_mask(x, mask)
    lab.check_contiguous(x=x, mask=mask)
    y = output(x, out)
    if y.numel() == 0:
        return y
    if N <= SHORT:
        softmax_short(x, mask, y)
    elif N <= 2 * ONE_PROGRAM:
        softmax_masked_fused_kernel[(M,)](
            x, mask, y, N, BLOCK_N=triton.next_power_of_2(N), num_warps=warps(M, N)
        )
    else:  # registers would spill
        softmax_long(x, mask, y)
    return y


# Rung 7 --------------------------------------------------------------------------------------

CLUSTER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <math_constants.h>
#define NEG_INF (-CUDART_INF_F)

// Aligned so, a Pack of up to 16 bytes is loaded and stored with one instruction.
template <typename T, int W> struct alignas(W * sizeof(T)) Pack { T v[W]; };

// The largest logit of some columns, and the sum of exp(x - m) over them.
struct Part { float m, total; };

__device__ Part merged(Part a, Part b) {
    const float m = fmaxf(a.m, b.m);
    const float safe = m == NEG_INF ? 0 : m;  // -inf - -inf would be NaN
    return {m, a.total * __expf(a.m - safe) + b.total * __expf(b.m - safe)};
}

__device__ Part merged_in_warp(Part part) {
    for (int offset = 16; offset > 0; offset /= 2)
        part = merged(part, {__shfl_xor_sync(~0u, part.m, offset),
                             __shfl_xor_sync(~0u, part.total, offset)});
    return part;
}

// A cluster of blocks computes one row; each thread keeps PACKS packs of it in shared memory, where
// no other thread looks. RAGGED: rows do not all begin and end between two packs. With 40 registers
// an SM holds 1,536 threads: six blocks of 256, and in bf16 192 KiB of rows. MASKED: columns where
// mask is false count as -inf, and a row with nothing left is zeros; otherwise mask is not read.
template <typename T, int PACKS, bool RAGGED, bool MASKED>
__global__ void __maxnreg__(40)
softmax_cluster_kernel(const T* x, T* y, int N, const bool* mask) {
#if __CUDA_ARCH__ >= 900
    constexpr int W = 16 / sizeof(T);
    extern __shared__ __align__(16) unsigned char row_bytes[];
    Pack<T, W>* row_s = reinterpret_cast<Pack<T, W>*>(row_bytes) + threadIdx.x;
    __shared__ Part part_s[8 * 32];  // one of each warp in the cluster

    // The functions behind cooperative_groups.h, which would ask for more headers.
    __cluster_barrier_arrive_relaxed();  // waited for before the first write to another block
    const int rank = __clusterRelativeBlockRank(), blocks = __clusterSizeInBlocks();
    const long long begin = (long long)(blockIdx.x / blocks) * N;
    const int shift = RAGGED ? begin % W : 0;  // pack 0 starts so many elements before the row
    const Pack<T, W>* x_pack = reinterpret_cast<const Pack<T, W>*>(x) + begin / W;
    Pack<T, W>* y_pack = reinterpret_cast<Pack<T, W>*>(y) + begin / W;
    const int first = rank * PACKS * blockDim.x + threadIdx.x;
    auto whole = [&](int p) { return p * W >= shift && (p + 1) * W <= shift + N; };

    using Bytes = Pack<unsigned, W / 4>;  // the mask of a pack
    const Bytes* mask_pack = reinterpret_cast<const Bytes*>(mask) + begin / W;
    Bytes bytes[PACKS] = {};  // on the way while x is asked for
    #pragma unroll
    for (int i = 0; MASKED && i < PACKS; ++i) {
        const int p = first + i * blockDim.x;
        if (whole(p)) bytes[i] = mask_pack[p];
    }

    constexpr int UNROLL = MASKED ? 2 : 64;  // rounds written out: all; masked, they would spill
    #pragma unroll UNROLL
    for (int i = 0; i < PACKS; ++i) {
        const int p = first + i * blockDim.x;
        Pack<T, W>* pack_s = row_s + i * blockDim.x;
        if (whole(p)) {
            __pipeline_memcpy_async(pack_s, x_pack + p, 16);
        } else {
            for (int j = 0; j < W; ++j) {
                const int col = p * W + j - shift;
                const bool inside = RAGGED && col >= 0 && col < N;
                pack_s->v[j] = inside ? x[begin + col] : T(NEG_INF);
            }
        }
    }
    __pipeline_commit();

    // Bit i * W + j: element j of pack i lies in the row, and the mask keeps it.
    unsigned long long kept = 0;
    if (MASKED) {
        static_assert(PACKS * W <= 64);
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            #pragma unroll
            for (int j = 0; j < W; j += 4) {  // four bytes of 0 or 1, times 1, 2, 4 and 8
                const unsigned four = __dp4a(bytes[i].v[j / 4], 0x08040201u, 0u);
                kept |= (unsigned long long)four << (i * W + j);
            }
        }
        #pragma unroll 1
        for (int i = 0; RAGGED && i < PACKS; ++i) {  // the ends of the row
            const int p = first + i * blockDim.x;
            for (int j = 0; j < W && !whole(p); ++j) {
                const int col = p * W + j - shift;
                const bool inside = col >= 0 && col < N;
                if (inside && mask[begin + col]) kept |= 1ull << (i * W + j);
            }
        }
    }
    __pipeline_wait_prior(0);

    Part part = {NEG_INF, 0};
    #pragma unroll UNROLL
    for (int i = 0; i < PACKS; ++i) {
        Pack<T, W> h = row_s[i * blockDim.x];
        if (MASKED) {
            const unsigned bits = kept >> (i * W);
            #pragma unroll
            for (int j = 0; j < W; ++j)
                if (!(bits >> j & 1)) h.v[j] = T(NEG_INF);  // even NaN
            row_s[i * blockDim.x] = h;
        }
        float m = part.m;
        #pragma unroll
        for (int j = 0; j < W; ++j) m = fmaxf(m, (float)h.v[j]);
        const float safe = m == NEG_INF ? 0 : m;
        float total = part.total * __expf(part.m - safe);
        #pragma unroll
        for (int j = 0; j < W; ++j) total += __expf((float)h.v[j] - safe);
        part = {m, total};
    }

    // Every warp tells every block of the cluster its part, through distributed shared memory.
    part = merged_in_warp(part);
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __cluster_barrier_wait();  // every block has started
    if (lane < blocks) {
        Part* there_s = static_cast<Part*>(__cluster_map_shared_rank(part_s, lane));
        there_s[rank * warps + threadIdx.x / 32] = part;
    }
    __cluster_barrier_arrive();
    __cluster_barrier_wait();  // every part has arrived, and no block reads another's memory
    part = {NEG_INF, 0};
    #pragma unroll 1
    for (int i = lane; i < blocks * warps; i += 32) part = merged(part, part_s[i]);
    part = merged_in_warp(part);
    if (MASKED && part.total == 0) part = {0, 1};  // nothing left: every exponential is 0

    const float scale = 1 / part.total;
    #pragma unroll UNROLL
    for (int i = 0; i < PACKS; ++i) {
        const int p = first + i * blockDim.x;
        Pack<T, W> h = row_s[i * blockDim.x];
        #pragma unroll
        for (int j = 0; j < W; ++j) h.v[j] = T(__expf((float)h.v[j] - part.m) * scale);
        if (whole(p)) {
            y_pack[p] = h;
        } else if (RAGGED) {
            for (int j = 0; j < W; ++j) {
                const int col = p * W + j - shift;
                if (col >= 0 && col < N) y[begin + col] = h.v[j];
            }
        }
    }
#else
    __trap();  // clusters exist from compute capability 9.0 on, and the launcher knows
#endif
}
"""
CPP_TYPES = ((torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))


def packs_of(dtype: torch.dtype) -> int:
    """Packs of a row in a thread of rung 7."""
    return PACK_ELEMENTS * dtype.itemsize // VECTOR_BYTES


@cache  # rung 6 asks when it launches: what holds CUDA C++ at sight is not simulated
def cluster_kernels(masked: bool) -> dict:
    """Instances by dtype, and by whether rows begin inside packs; compiled when first launched."""
    return {
        (dtype, ragged): lab.cuda_kernel(
            CLUSTER,
            f"softmax_cluster_kernel<{name}, {packs_of(dtype)}, "
            f"{str(ragged).lower()}, {str(masked).lower()}>",
            options={"use_fast_math": True},  # exp in two instructions; below 2⁻¹²⁶, y becomes 0
        )
        for dtype, name in CPP_TYPES
        for ragged in (False, True)
    }


CLUSTER_KERNELS = cluster_kernels(masked=False)


def cluster_shape(M: int, packs: int, per_thread: int) -> tuple[int, int]:
    """Blocks of a cluster and threads of a block for a row of so many packs."""
    blocks = 1
    # More blocks until a row fits; or, where there are few rows, until all SMs have work.
    while blocks < MOST_BLOCKS and (
        packs > blocks * BLOCK_THREADS * per_thread or 2 * M * blocks <= lab.DEVICE.sms
    ):
        blocks *= 2
    return blocks, triton.cdiv(packs, blocks * per_thread * WARP) * WARP


def cluster_refusal(x: Tensor, y: Tensor, mask: Tensor | None = None) -> str:
    """Why softmax_cluster_kernel cannot take these tensors; empty if it can."""
    N, per_pack = x.shape[1], VECTOR_BYTES // x.itemsize
    tensors = {"x": x, "out": y} | ({} if mask is None else {"mask": mask})
    for name, t in tensors.items():
        pack = per_pack * t.itemsize  # bytes
        if late := t.data_ptr() % pack:  # x[1:] is contiguous, and starts between vectors
            return f"{name} starts {late} bytes after a multiple of {pack}: clone it"
    threads = min(MOST_THREADS, MOST_SHARED // (packs_of(x.dtype) * VECTOR_BYTES))
    most = threads * MOST_BLOCKS * PACK_ELEMENTS - (N % per_pack != 0) * per_pack
    if most < N:
        return f"{N=} must be at most {most} in {x.dtype}: a cluster holds a whole row"
    return ""


def launch_clusters(kernels: dict, x: Tensor, y: Tensor, mask: Tensor | None = None) -> None:
    """Launch an instance of softmax_cluster_kernel: a cluster for each row of x."""
    (M, N), per_pack, per_thread = x.shape, VECTOR_BYTES // x.itemsize, packs_of(x.dtype)
    ragged = N % per_pack != 0
    packs = (N + per_pack - 1) // per_pack + ragged  # one more where rows begin inside a pack
    blocks, threads = cluster_shape(M, packs, per_thread)
    kernels[x.dtype, ragged].launch(
        M * blocks,
        threads,
        x,
        y,
        np.int32(N),
        np.uint64(0) if mask is None else mask,  # a null pointer, which is not read
        shared=threads * per_thread * VECTOR_BYTES,
        cluster=blocks,
    )


def softmax_long(x: Tensor, mask: Tensor, y: Tensor) -> None:
    """Rung 6's long rows: each to a cluster, or to rung 5 where no cluster can take it."""
    if not CLUSTERS or cluster_refusal(x, y, mask):
        softmax_masked_online(x, mask, out=y)
    else:
        launch_clusters(cluster_kernels(masked=True), x, y, mask)


def softmax_cluster(x: Rows, *, out: Rows | None = None) -> Rows:
    """Several blocks share a long row, in their shared memory: x is still read once.

    Rows of up to 16,384 columns take rung 4's kernels, and all rows where there are no clusters:
    before compute capability 9.0, and under the simulators. Writes to `out` if given, which may be
    x itself. TypeError or ValueError for arguments other than contiguous matrices of one shape and
    dtype. Where rows are long, x and out must also begin at multiples of 16 bytes, and a row may
    have up to 524,288 columns, or 458,752 in float32: less where a block has less shared memory
    than on sm_90.
    """
    M, N = check_args(x)
    if N <= ONE_PROGRAM or not CLUSTERS:
        return softmax_fused(x, out=out)
    lab.check_contiguous(x=x)
    y = output(x, out)
    if M == 0:
        return y
    if refusal := cluster_refusal(x, y):
        raise ValueError(refusal)
    launch_clusters(CLUSTER_KERNELS, x, y)
    return y


# Mutants -------------------------------------------------------------------------------------

TILED = lab.Exercise(
    "softmax_tiled",
    "softmax_tiled_kernel",
    hints=(
        "One block has one row: row = cuda.blockIdx.x. Each thread takes the maximum of the "
        "columns tx, tx + THREADS, tx + 2·THREADS, ... A thread may have no column at all: what "
        "must its maximum be, so that it does not count?",
        "Put the maxima into cuda.shared.array(THREADS, float32) and halve: 64 threads compare "
        "their entry with one of the upper half, then 32, then 16, ... Every thread then reads "
        "entry 0.",
        "The sum of math.exp(x - m) takes the same way through the same array. Between the last "
        "read of a maximum and the first write of a sum there must be a barrier too.",
        "Every thread of the block must reach each cuda.syncthreads(): keep it out of `if tx < "
        "half`. y[row, col] = rounded(math.exp(float32(x[row, col]) - m) * scale, y).",
    ),
    mutants=(
        lab.Mutant(
            "no_barrier",
            "missing barrier",
            {"part_s[tx] = total\n    cuda.syncthreads()\n": "part_s[tx] = total\n"},
        ),
        lab.Mutant(
            "divergent",
            "barrier in a divergent branch",
            {"    cuda.syncthreads()  # outside": "        cuda.syncthreads()  # outside"},
        ),
        lab.Mutant("short_tree", "tree stops too early", {"while step > 0:": "while step > 1:"}),
        lab.Mutant(
            "no_max",
            "no max-subtraction",
            {"    m = part_s[0]\n": "    m = float32(0)\n"},
        ),
        lab.Mutant(
            "from_zero", "maximum starts too high", {"m = float32(NEG_INF)": "m = float32(0)"}
        ),
        lab.Mutant(
            "no_scale",
            "forgets to normalise",
            {"scale = float32(1) / part_s[0]": "scale = float32(1)"},
        ),
        lab.Mutant(
            "own_max",
            "maximum of one thread",
            {"    m = part_s[0]\n": ""},
        ),
        lab.Mutant(
            "own_sum",
            "sum of one thread",
            {"scale = float32(1) / part_s[0]": "scale = float32(1) / total"},
        ),
    ),
)

FUSED = lab.Exercise(
    "softmax_fused",
    "softmax_fused_kernel",
    hints=(
        "A program has one row. tl.arange(0, BLOCK_N) numbers its columns; the row begins N "
        "elements after the one before. tl.program_id(0) says which row it is.",
        "BLOCK_N is a power of two, N need not be. Which value may the masked lanes of x hold so "
        "that they change neither the maximum nor the sum?",
        "Compute in float32: p = exp(h - maximum), and y is p over its sum. One division for the "
        "row is cheaper than one for each element.",
    ),
    mutants=(
        lab.Mutant("zeros", "wrong mask fill", {'other=-float("inf")': "other=0.0"}),
        lab.Mutant("no_max", "no max-subtraction", {"h - tl.max(h, axis=0)": "h"}),
        lab.Mutant("no_scale", "forgets to normalise", {"p * (1 / tl.sum(p, axis=0))": "p"}),
        lab.Mutant(
            "sign", "wrong sign in the exponent", {"h = x.to(tl.float32)": "h = -x.to(tl.float32)"}
        ),
        lab.Mutant(
            "one_row",
            "local index used for global",
            {"row = tl.program_id(0)": "row = (0 * tl.program_id(0))"},
        ),
        lab.Mutant("no_mask", "missing tail guard", {"offs, y, mask=mask": "offs, y"}),
        lab.Mutant(
            "half",
            "low-precision accumulator",
            {"axis=0))  # 0 in": "axis=0)).to(tl.float16)  # 0 in"},
        ),
    ),
)

ONLINE = lab.Exercise(
    "softmax_masked_online",
    "softmax_masked_online_kernel",
    hints=(
        "Go over the row in tiles of BLOCK_N columns. Keep two numbers: m_i, the largest logit "
        "so far, and l_i, the sum of exp(x - m_i) so far. What are they before the first tile?",
        "A tile may raise the maximum from m_i to m_new. Every term in l_i was exp(x - m_i) and "
        "should be exp(x - m_new): which factor turns one into the other?",
        "tl.where(kept, x, -inf) takes a masked column out of maximum and sum. If everything so "
        "far was masked, m_new is -inf, and x - m_new is NaN; subtract 0 instead.",
        "A second loop reads x again and writes exp(x - m_i) / l_i, and 0 where the mask is False. "
        "A row with nothing left has l_i = 0; it should come out as zeros.",
    ),
    mutants=(
        lab.Mutant("no_rescale", "missing rescale", {"l_i * alpha": "l_i"}),
        lab.Mutant(
            "no_max",
            "no max-subtraction",
            {
                "l_i * alpha + tl.sum(tl.exp(x - safe)": "l_i + tl.sum(tl.exp(x)",
                "tl.exp(x - safe) * scale": "tl.exp(x) * scale",
            },
        ),
        lab.Mutant(
            "tile_max",
            "forgets earlier maxima",
            {"tl.maximum(m_i, tl.max(x, axis=0))": "tl.max(x, axis=0)"},
        ),
        lab.Mutant(
            "zeros",
            "wrong mask fill",
            {
                'x = tl.where(kept, x, -float("inf"))': "x = tl.where(kept, x, 0.0)",
                "y = tl.where(kept, tl.exp(x - safe) * scale, 0.0)": (
                    "y = tl.exp(tl.where(kept, x, 0.0) - safe) * scale"
                ),
            },
        ),
        lab.Mutant(
            "sum_only",
            "masked columns are not zero",
            {"tl.where(kept, tl.exp(x - safe) * scale, 0.0)": "tl.exp(x - safe) * scale"},
        ),
        lab.Mutant(
            "no_kept",
            "forgets the mask",
            {
                'x = tl.where(kept, x, -float("inf"))': 'x = tl.where(inside, x, -float("inf"))',
                "y = tl.where(kept, ": "y = tl.where(inside, ",
            },
        ),
        lab.Mutant(
            "whole_tiles",
            "last tile dropped",
            {
                "(x - m_i) so far\n    for start in range(0, N, ": (
                    "(x - m_i) so far\n    for start in range(0, N - BLOCK_N + 1, "
                )
            },
        ),
        lab.Mutant(
            "from_zero", "maximum starts too high", {'m_i = -float("inf")  #': "m_i = 0.0  #"}
        ),
        lab.Mutant("nothing_left", "empty row", {"tl.where(l_i == 0, 1.0, l_i)": "l_i"}),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------

CHUNK = 8192  # columns that one program of the attempts looks at together; 32 a thread
CHUNK_WARPS = 8


@triton.jit
def softmax_backwards_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program `row` computes y[row, :] in two passes over tiles, the second from the end."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, N, BLOCK_N):
        inside = start + offs_n < N
        x = tl.load(x_ptr + row * N + start + offs_n, mask=inside, other=-float("inf"))
        h = x.to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(h, axis=0))
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        l_i = l_i * tl.exp(m_i - safe) + tl.sum(tl.exp(h - safe), axis=0)
        m_i = m_new
    scale = 1 / l_i
    tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(0, tiles):
        start = (tiles - 1 - tile) * BLOCK_N
        inside = start + offs_n < N
        x = tl.load(x_ptr + row * N + start + offs_n, mask=inside, other=0.0)
        y = tl.exp(x.to(tl.float32) - m_i) * scale
        tl.store(y_ptr + row * N + start + offs_n, y, mask=inside)


def softmax_backwards(x: Rows) -> Rows:
    """Two passes over tiles; the second begins with the tile that the first read last."""
    M, N = check_args(x)
    lab.check_contiguous(x=x)
    y = torch.empty_like(x)
    if y.numel() > 0:
        softmax_backwards_kernel[(M,)](x, y, N, BLOCK_N=CHUNK, num_warps=CHUNK_WARPS)
    return y


@triton.jit
def softmax_parts_kernel(x_ptr, m_ptr, total_ptr, N, BLOCK_N: tl.constexpr):
    """Program (row, part) finds the maximum and the sum of one chunk of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=-float("inf"))
    h = x.to(tl.float32)
    m = tl.max(h, axis=0)
    total = tl.sum(tl.exp(h - tl.where(m == -float("inf"), 0.0, m)), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(m_ptr + at, m)
    tl.store(total_ptr + at, total)


@triton.jit
def softmax_joined_kernel(
    x_ptr, m_ptr, total_ptr, y_ptr, N, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Program (row, part) merges the parts of its row and writes one chunk of y."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    each = tl.arange(0, PARTS)
    m = tl.load(m_ptr + row * parts + each, mask=each < parts, other=-float("inf"))
    total = tl.load(total_ptr + row * parts + each, mask=each < parts, other=0.0)
    top = tl.max(m, axis=0)
    scale = 1 / tl.sum(total * tl.exp(m - top), axis=0)
    offs = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + row * N + offs, tl.exp(x.to(tl.float32) - top) * scale, mask=offs < N)


def softmax_split(x: Rows) -> Rows:
    """Many programs share a row without a cluster: one launch to sum, another to write."""
    M, N = check_args(x)
    lab.check_contiguous(x=x)
    y = torch.empty_like(x)
    if y.numel() == 0:
        return y
    parts = triton.cdiv(N, CHUNK)
    m, total = torch.empty((2, M, parts), dtype=torch.float32, device=x.device)
    how = {"BLOCK_N": CHUNK, "num_warps": CHUNK_WARPS}
    softmax_parts_kernel[(M, parts)](x, m, total, N, **how)
    softmax_joined_kernel[(M, parts)](x, m, total, y, N, PARTS=triton.next_power_of_2(parts), **how)
    return y


LADDER = lab.Ladder(
    SOFTMAX,
    (
        lab.Rung(softmax_naive, "numba"),
        lab.Rung(softmax_tiled, "numba"),
        lab.Rung(softmax_warp, "numba", simulates=False),  # the simulator has no shuffles
        lab.Rung(softmax_fused, "triton"),
        lab.Rung(softmax_masked_online, "triton", problem=SOFTMAX_MASKED),
        lab.Rung(softmax_masked_fused, "triton", problem=SOFTMAX_MASKED),
        lab.Rung(softmax_cluster, "cuda", simulates=False),
    ),
    exercises=(TILED, FUSED, ONLINE),
    rejected=(
        lab.Rejected(
            softmax_backwards,
            against="softmax_cluster",
            attempt="no cluster: two passes over tiles in Triton, the second from the row's end",
            expected="the rows under way, some 35 MB, fit in L2, so the second read need not go "
            "to memory: at most 10 % more time",
            cause="The second read does come from L2: it adds less time than memory would need "
            "for it. But L2 takes its time too, and until a row is read twice none of it "
            "is written.",
        ),
        lab.Rejected(
            softmax_split,
            against="softmax_cluster",
            attempt="no cluster: one launch finds the maxima and sums of chunks, a second merges "
            "them and writes",
            expected="all of x passes through L2 before the second read, so it goes to memory: "
            "three passes for two, 1.5 times as long",
            cause="As expected: the second launch reads all of x again, and from memory.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

softmax = softmax_cluster
softmax_masked = softmax_masked_fused

torch.library.custom_op(
    "kernel_ladder::softmax", softmax, mutates_args=(), schema="(Tensor x) -> Tensor"
).register_fake(lambda x: x.new_empty(x.shape))
torch.library.custom_op(
    "kernel_ladder::softmax_masked",
    softmax_masked,
    mutates_args=(),
    schema="(Tensor x, Tensor mask) -> Tensor",
).register_fake(lambda x, mask: x.new_empty(x.shape))
