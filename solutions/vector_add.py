"""Vector addition, then SiLU in the same pass: how fast can a GPU move data?

    y[i] = x1[i] + x2[i]
    y[i] = silu(x1[i] + x2[i]),   silu(s) = s / (1 + exp(-s))

Shapes   x1 [N], x2 [N] -> y [N], all of one dtype
Cost     read x1 and x2, write y: 3·N·itemsize bytes for N additions: bandwidth bound
Source   SiLU: Hendrycks & Gimpel 2016, arXiv:1606.08415; Elfwing et al. 2017, arXiv:1702.03118
"""

import labkit as lab
from labkit import bars

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from numba import cuda
from torch import Tensor

THREADS = 256  # threads of a block: 8 warps, and 8 blocks fill the 2,048 thread slots of an SM
STRIDE = 32  # elements between neighbours in rung 1: 64 bytes or more, so never one sector
VECTOR_BYTES = 16  # the widest load a thread can issue
BLOCKS_PER_SM = 32  # rung 3: four times what an SM holds at once; the loop takes what is left over
BLOCK = 1024  # elements of a Triton program: 4 or 8 a thread, so 16-byte loads in every dtype
NUM_WARPS = 4
Vector = Float[Tensor, " N"]

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, N: int) -> tuple[Tensor, ...]:
    """Two standard normal vectors."""
    return tuple(lab.randn((N,), (N,), dtype=dtype, seed=seed))


def reference(x1: Vector, x2: Vector) -> Vector:
    """The sum, element by element."""
    return x1 + x2


def library(x1: Vector, x2: Vector) -> Vector:
    """torch.add."""
    return torch.add(x1, x2)


def cupy_add(x1: Tensor, x2: Tensor) -> Tensor:
    """cupy.add on torch's memory and stream."""
    import cupy

    if x1.dtype == torch.bfloat16:
        raise NotImplementedError("CuPy has no bfloat16")
    y = torch.empty_like(x1)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        cupy.add(cupy.asarray(x1), cupy.asarray(x2), out=cupy.asarray(y))
    return y


def sum_commutes(kernel) -> str | None:
    """Swapping the inputs changes no bit."""
    x1, x2 = inputs(torch.float32, seed=1, N=77)
    if torch.equal(kernel(x1, x2), kernel(x2, x1)):
        return None
    return "f(x1, x2) and f(x2, x1) differ: the two inputs are not treated alike"


def zero_is_neutral(kernel) -> str | None:
    """Adding zeros gives the other input back, bit for bit."""
    x1, x2 = inputs(torch.float32, seed=1, N=77)
    if torch.equal(kernel(x1, 0 * x2), x1) and torch.equal(kernel(0 * x1, x2), x2):
        return None
    return "x plus zeros is not x"


SIZES = {
    # One element; a prime; below, at and above a Triton tile, which is also four Numba blocks; more
    # than any fixed grid that looks large enough.
    "test_sizes": tuple({"N": n} for n in (1, 31, 9001, BLOCK - 1, BLOCK, BLOCK + 1)),
    "empty_size": {"N": 0},
    "huge_size": {"N": 2**31 + 5},
    "bench_size": {"N": 2**28},
    "sweep": tuple({"N": 2**k} for k in range(10, 29, 2)),
    "dtypes": lab.FLOATS,
}

VECTOR_ADD = lab.Problem(
    name="vector_add",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, N: lab.Work(bytes=3 * N * dtype.itemsize, flops=N),
    terms=lambda N: 2,
    **SIZES,
    target=(
        bars.ratio("vector_add_tiled", "torch.add", 1.0, dtype="float32", N=2**28),
        bars.ratio("vector_add_silu_fused", "vector_add_tiled", 1.02, dtype="float32", N=2**28),
    ),
    peers={"cupy": cupy_add},
    suspects={
        "adds the same input twice": lambda x1, x2: 2 * x1,
        "subtracts": lambda x1, x2: x1 - x2,
    },
    properties=(
        lab.Property("x1 + x2 = x2 + x1", "adds the same input twice", sum_commutes),
        lab.Property("x + 0 = x", "wrong formula", zero_is_neutral),
    ),
)


def silu_reference(x1: Vector, x2: Vector) -> Vector:
    """s·sigmoid(s) of the sum s."""
    s = x1 + x2
    return s * torch.sigmoid(s)


def silu_library(x1: Vector, x2: Vector) -> Vector:
    """torch.add, then F.silu: two kernels, and the sum goes to memory and back."""
    return torch.nn.functional.silu(torch.add(x1, x2))


def silu_far_out(kernel) -> str | None:
    """silu(s) is s far to the right and 0 far to the left, also where exp(-s) overflows."""
    s = torch.tensor([20.0, 89.0, 100.0, -100.0, -89.0, -20.0], device=lab.DEVICE.torch)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy, which would warn
        y = kernel(s, torch.zeros_like(s)).double()
    wanted = silu_reference(s.double(), torch.zeros_like(s).double())
    for at, got, want in zip(s.tolist(), y.tolist(), wanted.tolist(), strict=True):
        if not abs(got - want) <= 1e-5 * max(1.0, abs(want)):  # also true for NaN
            return f"silu({at:g}) is {want:.3g}, got {got:.3g}"
    return None


VECTOR_ADD_SILU = lab.Problem(
    name="vector_add_silu",
    inputs=inputs,
    reference=silu_reference,
    library=silu_library,
    work=lambda dtype, N: lab.Work(bytes=3 * N * dtype.itemsize, flops=5 * N),
    terms=lambda N: 2,
    **SIZES,
    target=(),  # the ladder's own problem holds both bars
    suspects={
        "forgets the activation": lambda x1, x2: x1 + x2,
        "forgets an input": lambda x1, x2: silu_reference(x1, 0 * x2),
        "sigmoid without the product": lambda x1, x2: torch.sigmoid(x1 + x2),
        "activation on one input only": lambda x1, x2: silu_reference(x1, 0 * x2) + x2,
        "wrong sign in the exponent": lambda x1, x2: (x1 + x2) * torch.sigmoid(-(x1 + x2)),
    },
    properties=(lab.Property("silu(±100) is 100 and 0", "exp overflows", silu_far_out),),
)


def check_args(x1: Tensor, x2: Tensor) -> None:
    """What every rung needs: two vectors of one length, dtype and device."""
    lab.check_tensors(x1=x1, x2=x2)
    if x1.ndim != 1 or x2.shape != x1.shape:
        shapes = f"x1 has shape {tuple(x1.shape)} and x2 {tuple(x2.shape)}"
        raise ValueError(f"{shapes}, must be vectors of one length")


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit
def vector_add_naive_kernel(x1, x2, y):
    """Thread t takes row t % rows of column t // rows: element row·STRIDE + col."""
    N = y.shape[0]
    t = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    rows = (N + STRIDE - 1) // STRIDE
    row, col = t % rows, t // rows
    # The next thread has the next row: its element is STRIDE further on, in another sector.
    i = row * STRIDE + col
    if col < STRIDE and i < N:
        y[i] = x1[i] + x2[i]


def vector_add_naive(x1: Tensor, x2: Tensor) -> Tensor:
    """One thread per element, neighbouring threads 32 elements apart: a sector each."""
    check_args(x1, x2)
    N = x1.shape[0]
    y = torch.empty(N, dtype=x1.dtype, device=x1.device)
    if N > 0:
        threads = (N + STRIDE - 1) // STRIDE * STRIDE  # whole rows of STRIDE elements
        blocks = (threads + THREADS - 1) // THREADS
        vector_add_naive_kernel[blocks, THREADS, lab.stream()](x1, x2, y)
    return y


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def vector_add_coalesced_kernel(x1, x2, y):
    """Thread i computes y[i]."""
    N = y.shape[0]
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < N:  # the last block may reach past the end
        y[i] = x1[i] + x2[i]


def vector_add_coalesced(x1: Tensor, x2: Tensor) -> Tensor:
    """Neighbouring threads take neighbouring elements: a warp uses whole sectors."""
    check_args(x1, x2)
    N = x1.shape[0]
    y = torch.empty(N, dtype=x1.dtype, device=x1.device)
    if N > 0:
        blocks = (N + THREADS - 1) // THREADS
        vector_add_coalesced_kernel[blocks, THREADS, lab.stream()](x1, x2, y)
    return y


# Rung 3 --------------------------------------------------------------------------------------

VECTORIZED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// 16 bytes: the compiler loads and stores a Pack with one instruction.
template <typename T> struct alignas(16) Pack { T v[16 / sizeof(T)]; };

// Thread t adds packs t, t + threads, t + 2·threads, ... and the first threads take the tail.
template <typename T>
__global__ void vector_add_vectorized_kernel(const T* x1, const T* x2, T* y, long long N) {
    constexpr int W = 16 / sizeof(T);
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long t = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const Pack<T>* x1_pack = reinterpret_cast<const Pack<T>*>(x1);
    const Pack<T>* x2_pack = reinterpret_cast<const Pack<T>*>(x2);
    Pack<T>* y_pack = reinterpret_cast<Pack<T>*>(y);
    #pragma unroll 1  // two loads a thread, and 2,048 threads: 64 KiB in flight on an SM
    for (long long p = t; p < N / W; p += threads) {
        Pack<T> a = x1_pack[p];
        const Pack<T> b = x2_pack[p];
        #pragma unroll
        for (int j = 0; j < W; ++j) a.v[j] = T((float)a.v[j] + (float)b.v[j]);
        y_pack[p] = a;
    }
    const long long i = N / W * W + t;  // fewer than W elements are left
    if (i < N) y[i] = T((float)x1[i] + (float)x2[i]);
}
"""
CPP_TYPES = ((torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))
VECTORIZED_KERNELS = {
    dtype: lab.cuda_kernel(VECTORIZED, f"vector_add_vectorized_kernel<{name}>")
    for dtype, name in CPP_TYPES
}


def vector_add_vectorized(x1: Tensor, x2: Tensor) -> Tensor:
    """16 bytes per load in a grid-stride loop: few instructions, many bytes in flight."""
    check_args(x1, x2)
    lab.check_contiguous(x1=x1, x2=x2)
    for name, x in (("x1", x1), ("x2", x2)):
        late = x.data_ptr() % VECTOR_BYTES
        if late:  # x[1:] is contiguous, and starts between two vectors
            raise ValueError(f"{name} starts {late} bytes after a multiple of 16: clone it")
    N = x1.shape[0]
    y = torch.empty(N, dtype=x1.dtype, device=x1.device)
    if N > 0:
        per_block = THREADS * VECTOR_BYTES // x1.itemsize
        blocks = min((N + per_block - 1) // per_block, BLOCKS_PER_SM * max(1, lab.DEVICE.sms))
        VECTORIZED_KERNELS[x1.dtype][blocks, THREADS](x1, x2, y, np.int64(N))
    return y


# Rung 4 --------------------------------------------------------------------------------------


@triton.jit
def vector_add_tiled_kernel(x1_ptr, x2_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Program `pid` computes y[pid·BLOCK : (pid + 1)·BLOCK]."""
    pid = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x1 = tl.load(x1_ptr + offs, mask=mask)
    x2 = tl.load(x2_ptr + offs, mask=mask)
    tl.store(y_ptr + offs, x1 + x2, mask=mask)


def vector_add_tiled(x1: Vector, x2: Vector) -> Vector:
    """One program per tile: Triton chooses threads and vectors, a mask guards the tail.

    TypeError or ValueError for arguments that are not contiguous vectors of one length and dtype.
    """
    check_args(x1, x2)
    lab.check_contiguous(x1=x1, x2=x2)
    N = x1.shape[0]
    y = torch.empty(N, dtype=x1.dtype, device=x1.device)
    if N > 0:
        grid = (triton.cdiv(N, BLOCK),)
        vector_add_tiled_kernel[grid](x1, x2, y, N, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def vector_add_silu_fused_kernel(x1_ptr, x2_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Program `pid` computes y[pid·BLOCK : (pid + 1)·BLOCK], the sum never leaving registers."""
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x1 = tl.load(x1_ptr + offs, mask=mask).to(tl.float32)
    x2 = tl.load(x2_ptr + offs, mask=mask).to(tl.float32)
    s = x1 + x2
    y = s / (1 + tl.exp(-s))  # where exp overflows to infinity, the quotient is the right -0
    tl.store(y_ptr + offs, y, mask=mask)


def vector_add_silu_fused(x1: Vector, x2: Vector) -> Vector:
    """SiLU while the sum is in a register: the activation costs no traffic.

    TypeError or ValueError for arguments that are not contiguous vectors of one length and dtype.
    """
    check_args(x1, x2)
    lab.check_contiguous(x1=x1, x2=x2)
    N = x1.shape[0]
    y = torch.empty(N, dtype=x1.dtype, device=x1.device)
    if N > 0:
        grid = (triton.cdiv(N, BLOCK),)
        vector_add_silu_fused_kernel[grid](x1, x2, y, N, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y


# Mutants -------------------------------------------------------------------------------------

INDEX = "i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x"
COALESCED = lab.Exercise(
    "vector_add_coalesced",
    "vector_add_coalesced_kernel",
    hints=(
        "A thread knows its block (`cuda.blockIdx.x`), the size of a block (`cuda.blockDim.x`) and "
        "its place in the block (`cuda.threadIdx.x`). Which of the N elements should be its own?",
        "All threads of the blocks before yours come first: `blockIdx.x * blockDim.x` of them. "
        "With that, the next thread gets the next element.",
        "The grid is rounded up to whole blocks, so some threads have no element. They must "
        "neither read nor write.",
    ),
    mutants=(
        lab.Mutant("no_guard", "missing tail guard", {"if i < N:": "if i >= 0:"}),
        lab.Mutant("off_by_one", "off by one", {"if i < N:": "if i < N - 1:"}),
        lab.Mutant(
            "whole_blocks",
            "tail not written",
            {"if i < N:": "if (cuda.blockIdx.x + 1) * cuda.blockDim.x <= N:"},
        ),
        lab.Mutant("local", "local index used for global", {INDEX: "i = cuda.threadIdx.x"}),
        lab.Mutant("twice", "adds the same input twice", {"x1[i] + x2[i]": "x1[i] + x1[i]"}),
        lab.Mutant(
            "in_place",
            "modifies its input",
            {"y[i] = x1[i] + x2[i]": "x1[i] += x2[i]\n        y[i] = x1[i]"},
        ),
        lab.Mutant(
            "through_memory",
            "too much traffic",
            {"y[i] = x1[i] + x2[i]": "y[i] = x1[i]\n        y[i] += x2[i]"},
        ),
        lab.Mutant(
            "swapped",
            "uncoalesced access",
            {INDEX: "i = cuda.threadIdx.x * cuda.gridDim.x + cuda.blockIdx.x"},
        ),
    ),
    gates={"bytes": 1.1, "sectors": 1.5},  # each element moves once, with its neighbours
)

SILU = "s / (1 + tl.exp(-s))"
FUSED = lab.Exercise(
    "vector_add_silu_fused",
    "vector_add_silu_fused_kernel",
    hints=(
        "One program handles a whole tile. `tl.arange(0, BLOCK)` numbers its elements; where does "
        "tile number `pid` begin?",
        "The last tile reaches past N. Give the same mask to both loads and to the store.",
        "s / (1 + exp(-s)): for s = -100 the exponential is infinite, and -100 over infinity is 0, "
        "as it should be. Rearrange it to s · exp(s) / (1 + exp(s)), and s = +100 becomes infinity "
        "over infinity.",
    ),
    mutants=(
        lab.Mutant("no_silu", "forgets the activation", {SILU: "s"}),
        lab.Mutant("sigmoid", "sigmoid without the product", {SILU: "1 / (1 + tl.exp(-s))"}),
        lab.Mutant("sign", "wrong sign in the exponent", {SILU: "s / (1 + tl.exp(s))"}),
        lab.Mutant("overflow", "exp overflows", {SILU: "s * tl.exp(s) / (1 + tl.exp(s))"}),
        lab.Mutant("first_tile", "local index used for global", {"pid * BLOCK + tl": "tl"}),
        lab.Mutant("no_mask", "missing tail guard", {"offs, y, mask=mask": "offs, y"}),
    ),
    gates={"bytes": 1.1},
)

# Attempts not kept ---------------------------------------------------------------------------


@triton.jit
def vector_add_evict_first_kernel(x1_ptr, x2_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """As vector_add_tiled_kernel, telling L2 that nothing will be used again."""
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x1 = tl.load(x1_ptr + offs, mask=mask, eviction_policy="evict_first")
    x2 = tl.load(x2_ptr + offs, mask=mask, eviction_policy="evict_first")
    tl.store(y_ptr + offs, x1 + x2, mask=mask, eviction_policy="evict_first")


def vector_add_evict_first(x1: Tensor, x2: Tensor) -> Tensor:
    """Rung 4 with eviction hints on both loads and the store."""
    check_args(x1, x2)
    N = x1.shape[0]
    y = torch.empty_like(x1)
    grid = (triton.cdiv(N, BLOCK),)
    vector_add_evict_first_kernel[grid](x1, x2, y, N, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y


def vector_add_large_tiles(x1: Tensor, x2: Tensor) -> Tensor:
    """Rung 4 with eight times the tile and twice the warps."""
    check_args(x1, x2)
    N = x1.shape[0]
    y = torch.empty_like(x1)
    tile = 8 * BLOCK
    grid = (triton.cdiv(N, tile),)
    vector_add_tiled_kernel[grid](x1, x2, y, N, BLOCK=tile, num_warps=2 * NUM_WARPS)
    return y


LADDER = lab.Ladder(
    VECTOR_ADD,
    (
        lab.Rung(vector_add_naive, "numba"),
        lab.Rung(vector_add_coalesced, "numba"),
        lab.Rung(vector_add_vectorized, "cuda", simulates=False),
        lab.Rung(vector_add_tiled, "triton"),
        lab.Rung(vector_add_silu_fused, "triton", problem=VECTOR_ADD_SILU),
    ),
    exercises=(COALESCED, FUSED),
    rejected=(
        lab.Rejected(
            vector_add_evict_first,
            against="vector_add_tiled",
            attempt="eviction hints: evict_first on both loads and on the store",
            expected="nothing is used twice, so nothing need stay in L2: up to 2 % less time",
            cause="Nsight Compute counts the same DRAM traffic with and without the hints, so "
            "there was nothing to save. Why they cost time is not known.",
        ),
        lab.Rejected(
            vector_add_large_tiles,
            against="vector_add_tiled",
            attempt="tiles of 8,192 elements and 8 warps instead of 1,024 and 4",
            expected="an eighth of the programs to start, four times the loads in flight a "
            "thread: 1 to 2 % less time",
            cause="The ceiling was reached before. Nsight Compute shows less than half as many "
            "active warps, since a program is larger; fewer programs overlap.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

vector_add = vector_add_tiled
vector_add_silu = vector_add_silu_fused

_SCHEMA = "(Tensor x1, Tensor x2) -> Tensor"
for _name, _op in {"vector_add": vector_add, "vector_add_silu": vector_add_silu}.items():
    torch.library.custom_op(
        f"kernel_ladder::{_name}", _op, mutates_args=(), schema=_SCHEMA
    ).register_fake(lambda x1, x2: x1.new_empty(x1.shape))
