"""SwiGLU, the gated activation of a Llama or Qwen MLP, then in one kernel with its projections.

    y[m, n] = silu(gate[m, n]) · up[m, n],   silu(g) = g / (1 + exp(-g))
    gate = x·W_gateᵀ, up = x·W_upᵀ           in the fused forms

Transformers rounds four times: gate, up, silu(gate) and the product each become a value of x's
dtype. So do all rungs here.

Shapes   gate [M, N], up [M, N] -> y [M, N]; M tokens, N intermediate size
         x [M, K], w_gate_up [2·N, K] -> y [M, N]; K hidden size, the gate's rows before up's
Cost     alone: read gate and up, write y: 3·M·N·itemsize bytes for 5·M·N FLOPs: bandwidth bound
         fused: 4·M·N·K FLOPs for (M·K + 2·N·K + M·N)·itemsize bytes: one token is bandwidth
         bound, a prompt compute bound
Source   Shazeer 2020, arXiv:2002.05202, eq. 6; the rounding is that of Qwen3MLP in Hugging Face
         Transformers
"""

import labkit as lab
from labkit import bars

import math
import warnings
from functools import lru_cache
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from numba import config, cuda, float32
from torch import Tensor

THREADS = 128  # threads of a block: 16 blocks fill the 2,048 thread slots of an SM
BLOCK = 1024  # elements of a program of rung 3: 4 or 8 a thread, so 16-byte loads in every dtype
NUM_WARPS = 4
ROWS = 4  # rung 5: outputs of a program
ROW_WARPS = 4  # rung 5: with 4 outputs, a thread has 8 loads of 16 bytes, an SM 96 KiB
DEPTH = 1024  # rung 5: columns that a program has under way at once; K of the smallest model
WARP = 32
VECTOR_BYTES = 16  # the widest load a thread can issue: a pack
BLOCK_WARPS = 8  # rung 6: warps of a block; up to all of them share a pair of rows
LANE_PACKS = 4  # rung 6: packs of a row in a lane at once; with up's and x's, 48 registers
SIMULATED = bool(config.ENABLE_CUDASIM)
Rows = Float[Tensor, "M N"]
Hidden, Weights = Float[Tensor, "M K"], Float[Tensor, "N2 K"]

# Problems ------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, seed: int = 0, *, M: int, N: int) -> tuple[Tensor, ...]:
    """Standard normal gate and up."""
    return tuple(lab.randn((M, N), (M, N), dtype=dtype, seed=seed))


def reference(gate: Rows, up: Rows) -> Rows:
    """The formula, in the dtype it is given: the truth is this in float64."""
    return gate * torch.sigmoid(gate) * up


def library(gate: Rows, up: Rows) -> Rows:
    """F.silu(gate) * up: two kernels, and silu(gate) goes to memory and back."""
    return torch.nn.functional.silu(gate) * up


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Liger's kernel; it rounds where Transformers does."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


@lru_cache(maxsize=1)
def side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """[gate, up] as one tensor. In a model one product writes both, so the copy is not timed."""
    return torch.cat((gate, up), dim=1)


def flashinfer_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """FlashInfer's kernel, which wants gate and up in one tensor; it rounds once."""
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(side_by_side(gate, up))


def casts_like(library, inputs, **size: int):
    """A property: in bf16, all but a few values are the library's to the last bit."""

    def holds(kernel) -> str | None:
        args = inputs(torch.bfloat16, seed=1, **size)
        same = (kernel(*args) == library(*args)).double().mean().item()
        if same < 0.95:  # rounding gate, up or silu(gate) elsewhere leaves 70 % or less
            return f"{same:.0%} of the values have the library's bits, wanted 95 %"
        return None

    return holds


def linear_in_up(kernel) -> str | None:
    """Twice the up gives twice the output, bit for bit; that is not so for the gate."""
    gate, up = inputs(torch.float32, seed=1, M=3, N=77)
    if torch.equal(kernel(gate, 2 * up), 2 * kernel(gate, up)):
        return None
    return "f(gate, 2·up) is not 2·f(gate, up)"


def silu_far_out(kernel) -> str | None:
    """silu(g) is g far to the right and 0 far to the left, also where exp(-g) overflows."""
    gate = torch.tensor([[20.0, 89.0, 100.0, -100.0, -89.0, -20.0]], device=lab.DEVICE.torch)
    with warnings.catch_warnings(action="ignore"):  # the simulators use numpy, which would warn
        y = kernel(gate, torch.ones_like(gate)).double()
    wanted = reference(gate.double(), torch.ones_like(gate).double())
    for at, got, want in zip(gate[0].tolist(), y[0].tolist(), wanted[0].tolist(), strict=True):
        if not abs(got - want) <= 1e-5 * max(1.0, abs(want)):  # also true for NaN
            return f"silu({at:g}) is {want:.3g}, got {got:.3g}"
    return None


SWIGLU = lab.Problem(
    name="swiglu",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, M, N: lab.Work(bytes=3 * M * N * dtype.itemsize, flops=5 * M * N),
    terms=lambda M, N: 2,  # 1 + exp(-g)
    dtypes=(torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
    # One element; primes; below, at and above a Triton tile, in all and in one row.
    test_sizes=tuple(
        {"M": m, "N": n}
        for m, n in ((1, 1), (3, 31), (1, 1023), (1, 1030), (2, 71), (2, 512), (3, 347), (3, 37))
    ),
    empty_size={"M": 0, "N": 8},
    huge_size={"M": 2**17 + 1, "N": 2**14},
    bench_size={"M": 8192, "N": 14336},  # a prompt of 8,192 tokens through Llama-3-8B
    sweep=(
        *({"M": m, "N": 3072} for m in (1, 64, 1024, 8192)),  # Qwen3-0.6B
        *({"M": m, "N": 12288} for m in (1, 64, 1024, 8192)),  # Qwen3-8B
        {"M": 8192, "N": 14336},
    ),
    target=(bars.fraction("swiglu_fused", 0.99, dtype="bfloat16", M=8192, N=14336),),
    peers={"liger": liger_swiglu, "flashinfer": flashinfer_swiglu},
    suspects={
        "forgets the activation": lambda gate, up: gate * up,
        "swaps gate and up": lambda gate, up: reference(up, gate),
        "GELU in the place of SiLU": lambda gate, up: torch.nn.functional.gelu(gate) * up,
        "sigmoid without the product": lambda gate, up: torch.sigmoid(gate) * up,
        "wrong sign in the exponent": lambda gate, up: gate * torch.sigmoid(-gate) * up,
        "activation of the product": lambda gate, up: reference(gate * up, torch.ones_like(up)),
        "adds instead of multiplies": lambda gate, up: reference(gate, torch.ones_like(up)) + up,
        "forgets up": lambda gate, up: reference(gate, torch.ones_like(up)),
    },
    properties=(
        lab.Property("linear in up", "swaps gate and up", linear_in_up),
        lab.Property("silu(±100) is 100 and 0", "exp overflows", silu_far_out),
        lab.Property(
            "bf16 is rounded where Transformers rounds it",
            "wrong cast order",
            casts_like(library, inputs, M=8, N=256),
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def projection_inputs(
    dtype: torch.dtype, seed: int = 0, *, M: int, N: int, K: int
) -> tuple[Tensor, ...]:
    """Standard normal x; normal weights of variance 1/K, so that gate and up are as large as x."""
    x, w_gate_up = lab.randn((M, K), (2 * N, K), dtype=dtype, seed=seed)
    return x, w_gate_up.mul_(K**-0.5)


def projection_reference(x: Hidden, w_gate_up: Weights) -> Rows:
    """Two products, the activation, their product."""
    gate, up = (x @ w_gate_up.T).chunk(2, dim=1)
    return reference(gate, up)


def projection_library(x: Hidden, w_gate_up: Weights) -> Rows:
    """Transformers' Qwen3MLP: two products, silu, a product. Its last projection is left out."""
    w_gate, w_up = w_gate_up.chunk(2)
    return library(torch.nn.functional.linear(x, w_gate), torch.nn.functional.linear(x, w_up))


def one_linear(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """Both projections in one product, then silu and a product."""
    return library(*torch.nn.functional.linear(x, w_gate_up).chunk(2, dim=1))


def flashinfer_projection(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """Both projections in one product, then FlashInfer's kernel: two launches, as vLLM does."""
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(torch.nn.functional.linear(x, w_gate_up))


def linear_in_the_up_rows(kernel) -> str | None:
    """Twice the weights of up give twice the output, bit for bit; not so for the gate's."""
    x, w_gate_up = projection_inputs(torch.float32, seed=1, M=1, N=7, K=128)
    twice = w_gate_up.clone()
    twice[7:] *= 2
    if torch.equal(kernel(x, twice), 2 * kernel(x, w_gate_up)):
        return None
    return "twice the rows of up do not give twice the output"


def projection_sizes(*sizes: tuple[int, int, int]) -> tuple[dict[str, int], ...]:
    """(M, N, K) as the dicts that a problem wants."""
    return tuple({"M": m, "N": n, "K": k} for m, n, k in sizes)


def of_columns(x: Tensor, w: Tensor, first: int, last: int) -> Tensor:
    """What a kernel computes that sums over the columns first … last - 1 only."""
    return projection_reference(x[:, first:last], w[:, first:last])


PROJECTIONS = {
    "inputs": projection_inputs,
    "reference": projection_reference,
    "library": projection_library,
    "work": lambda dtype, M, N, K: lab.Work(
        bytes=(M * K + 2 * N * K + M * N) * dtype.itemsize, flops=4 * M * N * K
    ),
    "terms": lambda M, N, K: K,
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),
    "peers": {"one F.linear": one_linear, "F.linear + flashinfer": flashinfer_projection},
    "suspects": {
        "forgets the activation": lambda x, w: torch.mul(*(x @ w.T).chunk(2, dim=1)),
        "swaps gate and up": lambda x, w: reference(*(x @ w.T).chunk(2, dim=1)[::-1]),
        "GELU in the place of SiLU": lambda x, w: torch.mul(
            torch.nn.functional.gelu(x @ w[: len(w) // 2].T), x @ w[len(w) // 2 :].T
        ),
        "uses the gate twice": lambda x, w: reference(*2 * [x @ w[: len(w) // 2].T]),
        "takes gate and up from alternate rows": lambda x, w: reference(
            x @ w[::2].T, x @ w[1::2].T
        ),
        "keeps the last columns only": lambda x, w: of_columns(
            x, w, (x.shape[1] - 1) // DEPTH * DEPTH, x.shape[1]
        ),
        # With fewer than DEPTH columns nothing is left: zeros, which the checker knows by itself.
        "drops the last columns": lambda x, w: of_columns(
            x, w, 0, x.shape[1] // DEPTH * DEPTH or x.shape[1]
        ),
    },
    "properties": (
        lab.Property("linear in the rows of up", "swaps gate and up", linear_in_the_up_rows),
        lab.Property(
            "bf16 is rounded where Transformers rounds it",
            "wrong cast order",
            casts_like(projection_library, projection_inputs, M=1, N=256, K=512),
            dtypes=(torch.bfloat16,),
        ),
    ),
}

GATE_UP_SWIGLU_PREFILL = lab.Problem(
    name="gate_up_swiglu_prefill",
    # One element; primes; below, at and above a tile of the output, and of the columns of x.
    test_sizes=projection_sizes(
        (1, 1, 1), (3, 5, 31), (16, 32, 64), (17, 33, 65), (65, 63, 40), (15, 31, 127), (5, 67, 97)
    ),
    empty_size={"M": 0, "N": 8, "K": 8},
    huge_size={"M": 2, "N": 2**17 + 1, "K": 2**13},
    bench_size={"M": 4096, "N": 3072, "K": 1024},
    sweep=projection_sizes(
        *((m, 3072, 1024) for m in (16, 64, 256, 1024, 4096)),  # Qwen3-0.6B
        (4096, 12288, 4096),  # Qwen3-8B
        (4096, 14336, 4096),  # Llama-3-8B
    ),
    target=(),  # the chapter sets none for this form
    **PROJECTIONS,
)

GATE_UP_SWIGLU = lab.Problem(
    name="gate_up_swiglu",
    # One element; primes; rows below, at and above a program's; columns below, at and above DEPTH;
    # rows that one warp of rung 6 has alone, and that 2, 4 and 8 share, in one round and in more;
    # more than one token, which goes to rung 4.
    test_sizes=projection_sizes(
        *((1, 1, 1), (1, 5, 31), (1, 3, 1023), (1, 4, 1024), (1, 9, 1500), (1, 9, 2304)),
        *((1, 3, 4096), (2, 7, 33), (1, 13, 67)),
    ),
    empty_size={"M": 0, "N": 8, "K": 8},
    huge_size={"M": 1, "N": 2**17 + 1, "K": 2**13},
    bench_size={"M": 1, "N": 3072, "K": 1024},  # a token through Qwen3-0.6B
    sweep=projection_sizes(
        *((m, 3072, 1024) for m in (1, 2, 8)),  # Qwen3-0.6B
        (1, 12288, 4096),  # Qwen3-8B
        (1, 14336, 4096),  # Llama-3-8B
    ),
    target=(bars.seconds("gate_up_swiglu_split_k", 5e-6, dtype="bfloat16", M=1, N=3072, K=1024),),
    timing="graph",  # as in a decode step; between two events, the launch would hide the kernel
    ceiling="read",  # a token writes 1/2,000 of what it reads
    **PROJECTIONS,
)


def check_args(gate: Tensor, up: Tensor) -> tuple[int, int]:
    """What rungs 1 to 3 need: two matrices of one shape, dtype and device; returns M and N."""
    lab.check_tensors(gate=gate, up=up)
    if gate.ndim != 2 or up.shape != gate.shape:
        shapes = f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}"
        raise ValueError(f"{shapes}, must be [M, N] both")
    return gate.shape


def check_projection(x: Tensor, w_gate_up: Tensor, out: Tensor | None) -> tuple[int, int, int]:
    """What rungs 4 to 6 need; returns M, N and K."""
    lab.check_tensors(x=x, w_gate_up=w_gate_up)
    lab.check_contiguous(x=x, w_gate_up=w_gate_up)
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [M, K] with K above zero")
    M, K = x.shape
    if w_gate_up.ndim != 2 or w_gate_up.shape[0] % 2 or w_gate_up.shape[1] != K:
        shape = tuple(w_gate_up.shape)
        raise ValueError(f"w_gate_up has shape {shape}, must be (2·N, {K}): gate's rows, then up's")
    N = w_gate_up.shape[0] // 2
    if out is not None:
        lab.check_tensors(x=x, out=out)
        lab.check_contiguous(out=out)
        if out.shape != (M, N):
            raise ValueError(f"out has shape {tuple(out.shape)}, must be {(M, N)}")
        lab.check_apart(out=out, x=x, w_gate_up=w_gate_up)
    return M, N, K


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def swiglu_naive_kernel(gate, up, y):
    """Thread t computes y[t % M, t // M]: the next thread has the next row."""
    M, N = y.shape
    t = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    row, col = t % M, t // M
    if col < N:
        g = float32(gate[row, col])
        silu = g / (float32(1) + math.exp(-g))
        y[row, col] = rounded(silu, y) * up[row, col]


def swiglu_naive(gate: Tensor, up: Tensor) -> Tensor:
    """One thread per element, counted down the columns: neighbours are a whole row apart."""
    M, N = check_args(gate, up)
    y = torch.empty((M, N), dtype=gate.dtype, device=gate.device)
    if y.numel() > 0:
        blocks = (M * N + THREADS - 1) // THREADS
        swiglu_naive_kernel[blocks, THREADS, lab.stream()](gate, up, y)
    return y


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def swiglu_coalesced_kernel(gate, up, y):
    """Thread tx of block (row, tile) computes y[row, tile·THREADS + tx]."""
    N = y.shape[1]
    row = cuda.blockIdx.x
    col = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if col < N:  # the last tile may reach past the end of the row
        g = float32(gate[row, col])
        silu = g / (float32(1) + math.exp(-g))
        y[row, col] = rounded(silu, y) * up[row, col]


def swiglu_coalesced(gate: Tensor, up: Tensor) -> Tensor:
    """Counted along the rows instead: a warp reads 32 neighbours, and no index is divided."""
    M, N = check_args(gate, up)
    y = torch.empty((M, N), dtype=gate.dtype, device=gate.device)
    if y.numel() > 0:
        grid = (M, (N + THREADS - 1) // THREADS)
        swiglu_coalesced_kernel[grid, THREADS, lab.stream()](gate, up, y)
    return y


# Rung 3 --------------------------------------------------------------------------------------


@triton.jit
def swiglu_fused_kernel(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """Program `pid` computes BLOCK of the `count` elements of y, in the order of memory."""
    pid = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    gate = tl.load(gate_ptr + offs, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask)
    silu = gate / (1 + tl.exp(-gate))  # where exp overflows, the quotient is the right -0
    y = silu.to(up.dtype) * up  # rounds here, and again in the product
    tl.store(y_ptr + offs, y, mask=mask)


def swiglu_fused(gate: Rows, up: Rows) -> Rows:
    """No rows at all: elements are independent, so one tile after another, 16 bytes a load.

    TypeError or ValueError for arguments that are not contiguous matrices of one shape and dtype.
    """
    M, N = check_args(gate, up)
    lab.check_contiguous(gate=gate, up=up)
    y = torch.empty((M, N), dtype=gate.dtype, device=gate.device)
    if y.numel() > 0:
        grid = (triton.cdiv(M * N, BLOCK),)
        swiglu_fused_kernel[grid](gate, up, y, M * N, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y


# Rung 4 --------------------------------------------------------------------------------------


def tile(M: int, itemsize: int) -> dict[str, int]:
    """The tile of a program of rung 4, its warps and stages, for M tokens."""
    BLOCK_K = 128 // itemsize  # whole cache lines of x and w
    rows = max(16, triton.next_power_of_2(M))  # a tensor core takes 16
    if itemsize == 4:  # no tensor cores at full precision: operands fill registers, too
        tile = {"BLOCK_M": min(rows, 32), "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    elif M <= 64:  # few tokens: weights are most of the traffic, and the grid must fill the chip
        tile = {"BLOCK_M": rows, "BLOCK_N": 32, "num_warps": 4, "num_stages": 4}
    else:  # 64 sums of float32 a thread; three stages are 96 KiB, which every GPU has from sm_80 on
        tile = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    return {**tile, "BLOCK_K": BLOCK_K}


@triton.jit
def gate_up_swiglu_tiled_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (pid_m, pid_n) computes a tile of gate, the same tile of up, and that of y."""
    # Neighbouring programs share rows of w: they come from memory once, and then from L2.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[:, None]
    acc_gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask_m & mask_k, other=0.0)
        gate_offs = offs_n[:, None] * K + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
        up_offs = (offs_n + N)[:, None] * K + offs_k[None, :]
        w_gate = tl.load(w_ptr + gate_offs, mask_n & mask_k, other=0.0)
        w_up = tl.load(w_ptr + up_offs, mask_n & mask_k, other=0.0)
        # "ieee": float32 inputs are multiplied as they are, not rounded to TF32 first.
        acc_gate = tl.dot(x, w_gate.T, acc_gate, input_precision="ieee")
        acc_up = tl.dot(x, w_up.T, acc_up, input_precision="ieee")
    gate = acc_gate.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if written and read back
    up = acc_up.to(x_ptr.dtype.element_ty)
    y = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
    y_offs = offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptr + y_offs, y, mask=mask_m & (offs_n < N)[None, :])


def gate_up_swiglu_tiled(x: Hidden, w_gate_up: Weights, *, out: Rows | None = None) -> Rows:
    """Both products in one kernel: it holds a tile of gate and of up, and writes only y.

    TypeError or ValueError for arguments other than contiguous x [M, K] and w_gate_up [2·N, K] of
    one dtype; `out`, if given, is [M, N] and is what is written and returned.
    """
    M, N, K = check_projection(x, w_gate_up, out)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device) if out is None else out
    if y.numel() > 0:
        how = tile(M, x.itemsize)
        grid = (triton.cdiv(M, how["BLOCK_M"]), triton.cdiv(N, how["BLOCK_N"]))
        gate_up_swiglu_tiled_kernel[grid](x, w_gate_up, y, M, N, K, **how)
    return y


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def gate_up_swiglu_vectorized_kernel(
    x_ptr, w_ptr, y_ptr, N, K, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Program `pid` computes y[pid·ROWS : (pid + 1)·ROWS] of one token: ROWS rows of each half."""
    pid = tl.program_id(0).to(tl.int64)
    offs_n = pid * ROWS + tl.arange(0, ROWS)
    mask_n = offs_n < N
    gate_rows = offs_n
    up_rows = offs_n + N
    gate = tl.zeros((ROWS,), tl.float32)
    up = tl.zeros((ROWS,), tl.float32)
    for k in range(0, K, DEPTH):
        offs_k = k + tl.arange(0, DEPTH)
        mask_k = offs_k < K
        mask = mask_n[:, None] & mask_k[None, :]
        # Weights come from memory and are used once; x comes from L1, so it is asked for last.
        w_gate = tl.load(w_ptr + gate_rows[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        w_up = tl.load(w_ptr + up_rows[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(w_gate.to(tl.float32) * x, axis=1)
        up += tl.sum(w_up.to(tl.float32) * x, axis=1)
    gate = gate.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if written and read back
    up = up.to(x_ptr.dtype.element_ty)
    y = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
    tl.store(y_ptr + offs_n, y, mask=mask_n)


def gate_up_swiglu_vectorized(x: Hidden, w_gate_up: Weights, *, out: Rows | None = None) -> Rows:
    """One token is no tile: a program takes whole rows of gate and up, 1,024 columns at a time.

    More than one token goes to rung 4. Arguments and errors as there. With `out`, nothing is
    allocated, so a CUDA graph can hold the launch; it never waits for the GPU.
    """
    M, N, K = check_projection(x, w_gate_up, out)
    if M != 1:
        return gate_up_swiglu_tiled(x, w_gate_up, out=out)
    y = torch.empty((1, N), dtype=x.dtype, device=x.device) if out is None else out
    if N > 0:
        grid = (triton.cdiv(N, ROWS),)
        gate_up_swiglu_vectorized_kernel[grid](
            x, w_gate_up, y, N, K, ROWS=ROWS, DEPTH=DEPTH, num_warps=ROW_WARPS
        )
    return y


# Rung 6 --------------------------------------------------------------------------------------

PAIR = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// A pack of w: 16 bytes. It is used once, so it takes no room in L1, where x should stay.
// `volatile` keeps the loads in the order of the source.
__device__ uint4 stream(const uint4* from) {
    uint4 pack;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w) : "l"(from) : "memory");
    return pack;
}

// sum + a · b of the numbers in a 32-bit word: one float, or two of 16 bits.
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
    // A bfloat16 is the upper half of a float: a shift or a mask converts it.
    sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
    return fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
}
template <typename T> __device__ float dot(uint4 a, uint4 b, float sum) {
    return dot<T>(a.w, b.w, dot<T>(a.z, b.z, dot<T>(a.y, b.y, dot<T>(a.x, b.x, sum))));
}

// SHARE warps compute y[n] from row n of w, the gate's, and row N + n, up's. A lane takes PACKS
// packs of each at a time; a row is a whole number of such rounds, so no load has a mask.
template <typename T, int SHARE, int PACKS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) gate_up_swiglu_split_k_kernel(
    const uint4* x, const uint4* w, T* y, int N, int packs) {
    constexpr int STEP = 32 * SHARE, OUTPUTS = WARPS / SHARE;
    __shared__ float gate_s[WARPS], up_s[WARPS];  // what each warp has of its two sums
    const int first_n = blockIdx.x * OUTPUTS, in_block = threadIdx.x / STEP;
    const int column = threadIdx.x % STEP, warp = threadIdx.x / 32;

    // Past the last output, warps read its rows again: every warp comes to the barrier.
    const int n = min(first_n + in_block, N - 1);
    const uint4* w_gate = w + (long long)n * packs + column;
    const uint4* w_up = w + (long long)(n + N) * packs + column;
    float gate = 0, up = 0;
    #pragma unroll 1
    for (int k = 0; k < packs; k += PACKS * STEP) {
        uint4 g[PACKS], u[PACKS], h[PACKS];
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            g[i] = stream(w_gate + k + i * STEP);
            u[i] = stream(w_up + k + i * STEP);
        }
        __syncwarp();  // the compiler moves no load past this: all of w first, then x
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) h[i] = x[column + k + i * STEP];
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            gate = dot<T>(g[i], h[i], gate);
            up = dot<T>(u[i], h[i], up);
        }
    }

    // The lanes' sums become the warp's, and the warps' sums the output's: no second launch.
    #pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        gate += __shfl_xor_sync(~0u, gate, offset);
        up += __shfl_xor_sync(~0u, up, offset);
    }
    if (threadIdx.x % 32 == 0) {
        gate_s[warp] = gate;
        up_s[warp] = up;
    }
    __syncthreads();
    const int tx = threadIdx.x;
    if (tx < OUTPUTS && first_n + tx < N) {  // neighbouring threads write neighbouring outputs
        gate = up = 0;
        #pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            gate += gate_s[tx * SHARE + i];
            up += up_s[tx * SHARE + i];
        }
        gate = float(T(gate));  // as if written and read back
        const T silu = T(gate / (1 + expf(-gate)));
        y[first_n + tx] = T(float(silu) * float(T(up)));  // exact in float, then rounded
    }
}
"""
CPP_TYPES = ((torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))
# All that could be wanted; what is launched is compiled.
PAIR_KERNELS = {
    (dtype, share, packs): lab.cuda_kernel(
        PAIR, f"gate_up_swiglu_split_k_kernel<{name}, {share}, {packs}, {BLOCK_WARPS}>"
    )
    for (dtype, name), share, packs in product(CPP_TYPES, (1, 2, 4, 8), range(1, LANE_PACKS + 1))
}


def cut(K: int, itemsize: int) -> tuple[int, int]:
    """How rung 6 cuts a row of w: warps that share it, packs of it that a lane loads at a time.

    (0, 0) if K is no multiple of 512 bytes, a pack for each lane of a warp.
    """
    pieces, rest = divmod(K * itemsize, WARP * VECTOR_BYTES)
    if rest:
        return 0, 0
    # Two warps if they come out even; more where a lane would have more than LANE_PACKS.
    share = max(
        w for w in (1, 2, 4, 8) if pieces % w == 0 and (w <= 2 or 2 * pieces > w * LANE_PACKS)
    )
    return share, max(n for n in range(1, LANE_PACKS + 1) if pieces // share % n == 0)


def gate_up_swiglu_split_k(x: Hidden, w_gate_up: Weights, *, out: Rows | None = None) -> Rows:
    """K is split over warps of a block, and all loads of w come before the first of x.

    Rung 5 takes what is not cut evenly: K that is no multiple of 512 bytes (in bf16, of 256), x or
    w_gate_up that begins between two multiples of 16 bytes; and all under the simulators. More than
    one token goes to rung 4. Arguments and errors as there. With `out`, nothing is allocated.
    """
    M, N, K = check_projection(x, w_gate_up, out)
    share, packs = cut(K, x.itemsize)
    late = x.data_ptr() % VECTOR_BYTES + w_gate_up.data_ptr() % VECTOR_BYTES
    if SIMULATED or M != 1 or share == 0 or late:
        return gate_up_swiglu_vectorized(x, w_gate_up, out=out)
    y = torch.empty((1, N), dtype=x.dtype, device=x.device) if out is None else out
    if N > 0:
        blocks = triton.cdiv(N, BLOCK_WARPS // share)
        row = np.int32(K * x.itemsize // VECTOR_BYTES)
        PAIR_KERNELS[x.dtype, share, packs][blocks, WARP * BLOCK_WARPS](
            x, w_gate_up, y, np.int32(N), row
        )
    return y


# Mutants -------------------------------------------------------------------------------------

SILU = "gate / (1 + tl.exp(-gate))"
FUSED = lab.Exercise(
    "swiglu_fused",
    "swiglu_fused_kernel",
    hints=(
        "y has `count` elements in a row; which matrix they came from does not matter here. "
        "`tl.arange(0, BLOCK)` numbers those of one program: where do they begin? Offsets may pass "
        "2³¹, so count from `tl.program_id(0).to(tl.int64)`.",
        "Every element needs gate and up at its own place. The last program reaches past the end: "
        "one mask guards both loads and the store.",
        "`gate / (1 + tl.exp(-gate))` in float32. Here an infinite exponential does no harm.",
        "Transformers writes silu(gate) to memory before it multiplies. Round it to the dtype of "
        "up, then multiply in that dtype.",
    ),
    mutants=(
        lab.Mutant("no_silu", "forgets the activation", {SILU: "gate"}),
        lab.Mutant("sigmoid", "sigmoid without the product", {SILU: "1 / (1 + tl.exp(-gate))"}),
        lab.Mutant("sign", "wrong sign in the exponent", {SILU: "gate / (1 + tl.exp(gate))"}),
        lab.Mutant("overflow", "exp overflows", {SILU: "gate * tl.exp(gate) / (1 + tl.exp(gate))"}),
        lab.Mutant(
            "swapped",
            "swaps gate and up",
            {
                "gate = tl.load(gate_ptr": "gate = tl.load(up_ptr",
                "up = tl.load(up_ptr": "up = tl.load(gate_ptr",
            },
        ),
        lab.Mutant("no_mask", "missing tail guard", {"offs, y, mask=mask": "offs, y"}),
        lab.Mutant("first_tile", "local index used for global", {"pid * BLOCK + tl": "tl"}),
    ),
)

VECTORIZED = lab.Exercise(
    "gate_up_swiglu_vectorized",
    "gate_up_swiglu_vectorized_kernel",
    hints=(
        "A program has `ROWS` outputs, n from `pid * ROWS` on. Output n needs row n of w, which "
        "is the gate's, and row N + n, which is up's. A row has K elements. Take `pid` as int64.",
        "Load tiles of ROWS × DEPTH: `offs_n[:, None] * K + offs_k[None, :]`. Walk over K in steps "
        "of DEPTH and add up; both tail masks need zeros where nothing is loaded.",
        "`tl.sum(w * x, axis=1)` in float32 is one number a row. Issue both loads of w before the "
        "first use of either.",
        "When the sums are complete, round gate and up to the dtype of x, as rung 4 does with "
        "`x_ptr.dtype.element_ty`: there the unfused model writes them to memory. Then silu(gate), "
        "rounded, times up.",
    ),
    mutants=(
        lab.Mutant(
            "alternate",
            "takes gate and up from alternate rows",
            {"gate_rows = offs_n": "gate_rows = 2 * offs_n", "offs_n + N": "2 * offs_n + 1"},
        ),
        lab.Mutant(
            "swapped",
            "swaps gate and up",
            {
                "gate_rows = offs_n": "gate_rows = offs_n + N",
                "up_rows = offs_n + N": "up_rows = offs_n",
            },
        ),
        lab.Mutant("no_silu", "forgets the activation", {f"({SILU})": "gate"}),
        lab.Mutant(
            "overwrites", "keeps the last columns only", {"gate += ": "gate = ", "up += ": "up = "}
        ),
        lab.Mutant(
            "short",
            "drops the last columns",
            {"range(0, K, DEPTH)": "range(0, K // DEPTH * DEPTH, DEPTH)"},
        ),
        lab.Mutant("first_rows", "local index used for global", {"pid * ROWS + tl": "tl"}),
        lab.Mutant("no_mask", "missing tail guard", {"offs_n, y, mask=mask_n": "offs_n, y"}),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------

SPLIT = 4  # programs that share the columns of a row
SPLIT_ROWS = 16  # rows of a program, which takes 256 of their columns at a time


@triton.jit
def gate_up_partial_kernel(
    x_ptr, w_ptr, sums_ptr, rows, K, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Program (pid, part) sums ROWS of the `rows` rows of w over the columns of its part."""
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_n = offs_n < rows
    part, parts = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((ROWS,), tl.float32)
    for k in range(part * DEPTH, K, parts * DEPTH):
        offs_k = k + tl.arange(0, DEPTH)
        mask = mask_n[:, None] & (offs_k < K)[None, :]
        w = tl.load(w_ptr + offs_n[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(w.to(tl.float32) * x, axis=1)
    tl.store(sums_ptr + part * rows + offs_n, total, mask=mask_n)


@triton.jit
def gate_up_combine_kernel(sums_ptr, y_ptr, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program `pid` adds up the parts of BLOCK gates and ups, and computes y from them."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        gate += tl.load(sums_ptr + part * 2 * N + offs, mask=mask)
        up += tl.load(sums_ptr + part * 2 * N + N + offs, mask=mask)
    gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs, (gate / (1 + tl.exp(-gate))).to(up.dtype) * up, mask=mask)


def gate_up_swiglu_two_launches(x: Hidden, w_gate_up: Weights) -> Rows:
    """Four programs share a row; a second kernel adds their sums up. One token."""
    M, N, K = check_projection(x, w_gate_up, None)
    if M != 1:
        raise ValueError(f"{M=} must be 1")
    y = torch.empty((1, N), dtype=x.dtype, device=x.device)
    sums = torch.empty((SPLIT, 2 * N), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(2 * N, SPLIT_ROWS), SPLIT)
    gate_up_partial_kernel[grid](x, w_gate_up, sums, 2 * N, K, ROWS=SPLIT_ROWS, DEPTH=256)
    gate_up_combine_kernel[(triton.cdiv(N, 128),)](sums, y, N, PARTS=SPLIT, BLOCK=128)
    return y


@triton.jit
def gate_up_swiglu_interleaved_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As rung 4, with one product: rows of gate and up take turns in one tile of w."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    turn = tl.arange(0, 2 * BLOCK_N)
    offs_n = first + turn // 2
    offs_w = offs_n + turn % 2 * N  # gate 0, up 0, gate 1, up 1, …
    mask_m, mask_w = (offs_m < M)[:, None], (offs_n < N)[:, None]
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask_m & mask_k, other=0.0)
        w = tl.load(w_ptr + offs_w[:, None] * K + offs_k[None, :], mask_w & mask_k, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    # A thread holds pairs of neighbouring columns: gate and up of one element. Nothing moves.
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
    gate = gate.to(x_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(x_ptr.dtype.element_ty)
    y = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
    offs_y = first + tl.arange(0, BLOCK_N)
    y_offs = offs_m[:, None] * N + offs_y[None, :]
    tl.store(y_ptr + y_offs, y, mask=mask_m & (offs_y < N)[None, :])


def gate_up_swiglu_interleaved(x: Hidden, w_gate_up: Weights) -> Rows:
    """One product twice as wide instead of two."""
    M, N, K = check_projection(x, w_gate_up, None)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    how = tile(M, x.itemsize)
    grid = (triton.cdiv(M, how["BLOCK_M"]), triton.cdiv(N, how["BLOCK_N"]))
    gate_up_swiglu_interleaved_kernel[grid](x, w_gate_up, y, M, N, K, **how)
    return y


LADDER = lab.Ladder(
    SWIGLU,
    (
        lab.Rung(swiglu_naive, "numba"),
        lab.Rung(swiglu_coalesced, "numba"),
        lab.Rung(swiglu_fused, "triton"),
        lab.Rung(gate_up_swiglu_tiled, "triton", problem=GATE_UP_SWIGLU_PREFILL),
        lab.Rung(gate_up_swiglu_vectorized, "triton", problem=GATE_UP_SWIGLU),
        # Under the simulators it is rung 5.
        lab.Rung(gate_up_swiglu_split_k, "cuda", problem=GATE_UP_SWIGLU, simulates=False),
    ),
    exercises=(FUSED, VECTORIZED),
    rejected=(
        lab.Rejected(
            gate_up_swiglu_interleaved,
            against="gate_up_swiglu_tiled",
            attempt="one product twice as wide: rows of gate and of up take turns in one tile",
            expected="half as many tensor-core instructions, each twice as wide; x is read from "
            "shared memory once for both: up to 10 % less time",
            cause="The compile card counts half as many tensor-core instructions, as expected, and "
            "the time hardly changes: neither they nor the reads of x from shared memory are "
            "what binds. Not worth the harder text.",
        ),
        lab.Rejected(
            gate_up_swiglu_two_launches,
            against="gate_up_swiglu_split_k",
            attempt="split-K over the grid: four Triton programs share a row, and a second kernel "
            "adds up and activates",
            expected="more and shorter chains of loads, but silu needs the whole sum, so a second "
            "launch: 1 to 2 µs more",
            cause="As expected: the second launch, and the way of the partial sums through memory, "
            "cost more than shorter chains save.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

swiglu = swiglu_fused
gate_up_swiglu_prefill = gate_up_swiglu_tiled
gate_up_swiglu = gate_up_swiglu_split_k

torch.library.custom_op(
    "kernel_ladder::swiglu", swiglu, mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor"
).register_fake(lambda gate, up: gate.new_empty(gate.shape))
for _op in ("gate_up_swiglu_prefill", "gate_up_swiglu"):
    torch.library.custom_op(
        f"kernel_ladder::{_op}",
        globals()[_op],
        mutates_args=(),
        schema="(Tensor x, Tensor w_gate_up) -> Tensor",
    ).register_fake(lambda x, w_gate_up: x.new_empty((x.shape[0], w_gate_up.shape[0] // 2)))
