"""CUDA C++ kernels and compile cards: three languages, four architectures, no GPU needed."""

import labkit as lab
from labkit.compile import (
    CompileError,
    compile_card,
    compiles,
    cuda_kernel,
    occupancy,
)
from labkit.source import portable

import linecache
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numba import cuda, float32

gpu_only = pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")

N = 1 << 16
ADD = lab.Problem(
    "add",
    inputs=lambda dtype, seed=0, *, N: tuple(lab.randn((N,), (N,), dtype=dtype, seed=seed)),
    reference=lambda x, y: x + y,
    library=lambda x, y: x + y,
    work=lambda dtype, *, N: lab.Work(3 * N * dtype.itemsize, N),
    terms=lambda N: 1,
    dtypes=(torch.float32, torch.bfloat16),
    test_sizes=({"N": 5},),
    bench_size={"N": N},
    sweep=(),
    target=(),
)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def add_kernel(x_ptr, y_ptr, o_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = twice(tl.load(x_ptr + i, mask=i < N)) + tl.load(y_ptr + i, mask=i < N)
    tl.store(o_ptr + i, total, mask=i < N)


def add_triton(x, y):
    """One program per tile."""
    o = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, o, x.numel(), BLOCK=1024, num_warps=8
    )
    return o


def add_triton_misaligned(x, y):
    """The same on addresses that no 16 bytes divide."""
    return add_triton(x[1:], y[1:])


@cuda.jit(device=True)
def plus(a, b):
    return a + b


@cuda.jit
def add_naive_kernel(x, y, o, N):
    i = cuda.grid(1)
    if i < N:
        o[i] = plus(x[i], y[i])


def add_naive(x, y):
    """One thread per element."""
    o = torch.empty_like(x)
    add_naive_kernel[ceil(x.numel() / 256), 256, lab.stream()](x, y, o, x.numel())
    return o


@cuda.jit
def reverse_kernel(x, o):
    tile = cuda.shared.array(512, float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.blockIdx.x * 512 + t]
    cuda.syncthreads()
    o[cuda.blockIdx.x * 512 + t] = tile[511 - t]


def two_kernels(x, y):
    """A shared tile reversed in each block twice over, then a sum."""
    o, p = torch.empty_like(x), torch.empty_like(x)
    reverse_kernel[x.numel() // 512, 512, lab.stream()](x, o)
    reverse_kernel[x.numel() // 512, 512, lab.stream()](o, p)
    return add_triton(p, y)


ADD4 = cuda_kernel(
    r"""
extern "C" __global__ void add4(const float4* x, const float4* y, float4* o, int n4) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n4) return;
  float4 a = x[i], b = y[i];
  o[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}""",
    "add4",
)


def add_vectorized(x, y):
    """Four elements per thread in one access."""
    o = torch.empty_like(x)
    n4 = x.numel() // 4
    ADD4[ceil(n4 / 256), 256](x, y, o, np.int32(n4))
    return o


# Forty values stay alive across two rounds while the launch bound leaves 32 registers a thread.
SPILL = cuda_kernel(
    r"""
#include <cuda_bf16.h>
template <typename T>
__global__ void __launch_bounds__(1024, 2) spill(const T* x, T* o) {
  __shared__ float s[256];
  float v[40], total = 0;
#pragma unroll
  for (int k = 0; k < 40; ++k) v[k] = x[threadIdx.x + k * 1024];
  s[threadIdx.x % 256] = v[0];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 40; ++k) total += v[k] * s[(threadIdx.x + k) % 256];
#pragma unroll
  for (int k = 0; k < 40; ++k) o[threadIdx.x + k * 1024] = total + v[k];
}""",
    "spill<float>",
)


def spilled(x, y):
    """More values than registers."""
    SPILL[1, 1024, 2048](x, y)
    return y


BROKEN = cuda_kernel(
    'extern "C" __global__ void broken(int* x) {\n  *x = 1;\n  x[0] = wrong;\n}', "broken"
)


def broken(x, y):
    """Names something that is not there."""
    BROKEN[1, 32](x)


WGMMA_FENCE = cuda_kernel(
    'extern "C" __global__ void f(float* x) { asm volatile("wgmma.fence.sync.aligned;"); *x = 1; }',
    "f",
)


def hopper_only(x, y):
    """An instruction that exists on sm_90a alone."""
    WGMMA_FENCE[1, 128](x)


def test_triton_card_has_vector_loads_and_what_the_launch_asked_for():
    card = compile_card(add_triton, ADD, dtype=torch.float32)
    (kernel,) = card.kernels
    assert (kernel.name, kernel.kind, kernel.grid, kernel.threads) == (
        "add_kernel",
        "triton",
        (N // 1024, 1, 1),
        256,
    )
    assert list(kernel.archs) == ["sm_80", "sm_90", "sm_100", "sm_120"]
    for arch in kernel.archs.values():
        assert arch.instructions["LDG.128"] == 2
        assert arch.instructions["STG.128"] == 1
        assert arch.widths("LDG") == {128: 2}
        assert 8 <= arch.registers <= 64
        assert arch.stack_bytes == arch.static_shared == 0
        assert arch.occupancy.blocks > 0
    again = str(compile_card(add_triton, ADD, dtype=torch.float32))
    assert str(card) == again
    header, loads = again.splitlines()[1], again.splitlines()[-2]
    assert header.split() == ["sm_80", "sm_90", "sm_100", "sm_120"]
    assert loads.split() == ["global", "loads,", "bits", *["2×128"] * 4]


def test_triton_misaligned_pointers_lose_the_vector_loads():
    card = compile_card(add_triton_misaligned, ADD, dtype=torch.float32, archs=("sm_90",))
    assert max(card.kernels[0].archs["sm_90"].widths("LDG")) == 32


def test_numba_naive_loads_one_element_at_a_time():
    card = compile_card(add_naive, ADD, dtype=torch.float32, archs=("sm_80", "sm_90"))
    (kernel,) = card.kernels
    assert (kernel.kind, kernel.grid, kernel.threads) == ("numba", (N // 256, 1, 1), 256)
    for arch in kernel.archs.values():
        assert arch.widths("LDG") == {32: 2}
        assert arch.widths("STG") == {32: 1}
    half = compile_card(lab.Rung(add_naive, "numba", problem=ADD), archs=("sm_90",))
    assert half.kernels[0].archs["sm_90"].widths("LDG") == {16: 2}  # bfloat16, the default


def test_each_kernel_once_with_its_shared_memory():
    card = compile_card(two_kernels, ADD, dtype=torch.float32, archs=("sm_80", "sm_90"))
    assert [(k.name, k.kind) for k in card.kernels] == [
        ("reverse_kernel", "numba"),
        ("add_kernel", "triton"),
    ]
    for arch in card.kernels[0].archs.values():
        assert arch.static_shared == 512 * 4
        assert arch.instructions["BAR"] == 1
        assert arch.widths("LDS") == {32: 1}


def test_cuda_float4_is_128_bits():
    card = compile_card(add_vectorized, ADD, dtype=torch.float32, archs=("sm_80", "sm_120"))
    for arch in card.kernels[0].archs.values():
        assert arch.widths("LDG") == {128: 2}
        assert arch.widths("STG") == {128: 1}


def test_cuda_spills_and_static_and_dynamic_shared_memory():
    card = compile_card(spilled, ADD, dtype=torch.float32, archs=("sm_80", "sm_90"), N=N)
    for arch in card.kernels[0].archs.values():
        assert arch.registers <= 32
        assert arch.stack_bytes > 0
        assert arch.widths("STL")
        assert arch.widths("LDL")
        assert (arch.static_shared, arch.dynamic_shared) == (1024, 2048)
        assert arch.occupancy.blocks == 2


def test_compile_error_names_the_line():
    with pytest.raises(CompileError, match=r"broken\.cu\(3\).*\n?.*wrong"):
        compiles(broken, ADD, archs=("sm_90",))


def test_a_kernel_for_one_architecture():
    assert compiles(hopper_only, ADD, archs=("sm_80", "sm_90")) == ["sm_90"]
    card = compile_card(hopper_only, ADD, archs=("sm_80", "sm_90"))
    assert "wgmma" in card.kernels[0].archs["sm_80"].error
    assert "sm_80" in str(card)


def test_launcher_that_fails_or_launches_nothing():
    with pytest.raises(ValueError, match="launched no kernel"):
        compile_card(_no_kernel, ADD, archs=("sm_90",))
    with pytest.raises(RuntimeError, match="not for you"):
        compile_card(_refuses, ADD, archs=("sm_90",))
    with pytest.raises(ValueError, match="sm_75"):
        compile_card(add_naive, ADD, archs=("sm_75",))


def _no_kernel(x, y):
    return x + y


def _refuses(x, y):
    raise ValueError("not for you")


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limiter"),
    [
        ("sm_90", 256, 32, 0, 8, "warps"),
        ("sm_90", 32, 32, 0, 32, "blocks"),
        ("sm_86", 32, 32, 0, 16, "blocks"),
        ("sm_80", 256, 128, 0, 2, "registers"),
        ("sm_80", 256, 255, 0, 1, "registers"),
        ("sm_90", 128, 32, 64 * 1024, 3, "shared memory"),
        ("sm_120", 128, 32, 99 * 1024, 1, "shared memory"),
        ("sm_120", 128, 32, 100 * 1024, 0, "shared memory"),
        ("sm_90", 1024, 65, 0, 0, "registers"),
        ("sm_90", 2048, 16, 0, 0, "warps"),
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks, limiter):
    got = occupancy(arch, threads, registers, shared)
    assert (got.blocks, got.limiter) == (blocks, limiter)
    assert got.warps == blocks * -(-threads // 32)


def test_portable_source_of_a_nested_function():
    text, name = portable(_notebook_function())
    assert text.startswith("import labkit as lab\n")
    module = {}
    exec(compile(text, "<portable>", "exec"), module)
    assert torch.equal(module[name](torch.ones(3)), torch.full((3,), 12.0))


def _notebook_function():
    factor, scales = 3, {"half": (torch.float32, 4)}

    def scaled(x):
        dtype, scale = scales["half"]
        return plain(x.to(dtype)) * scale

    def plain(x):
        N = factor  # the module's N is another one
        return x * N

    return scaled


def test_portable_kernels_of_a_nested_launcher():
    fill = cuda_kernel('extern "C" __global__ void fill(float* x) { *x = 1; }', "fill")

    @cuda.jit
    def double_kernel(x):
        x[cuda.threadIdx.x] *= 2

    def filled(x, y):
        fill[1, 1](x)
        double_kernel[1, 32, lab.stream()](x)

    text, _ = portable(filled)
    assert f"fill = lab.cuda_kernel({fill.source!r}, 'fill')" in text
    card = compile_card(filled, ADD, dtype=torch.float32, archs=("sm_90",))
    assert [(k.name, k.kind) for k in card.kernels] == [
        ("fill", "cuda"),
        ("double_kernel", "numba"),
    ]


def test_portable_kernel_written_in_a_notebook():
    """Source that exists only in linecache, as IPython leaves it, in a module of no file."""
    source = (
        "import triton, triton.language as tl, torch\n"
        "import labkit as lab\n"
        "SIZE = 64\n"
        "@triton.jit\n"
        "def k(x_ptr, BLOCK: tl.constexpr):\n"
        "    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)\n"
        "def ones(x, y):\n"
        "    k[(1,)](x, BLOCK=SIZE)\n"
        "    return x\n"
    )
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
    cell = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), cell)
    card = compile_card(cell["ones"], replace(ADD, bench_size={"N": 64}), archs=("sm_90",))
    assert card.kernels[0].archs["sm_90"].widths("STG") != {}


def test_portable_refuses_what_cannot_travel():
    handle = open(linecache.__file__)  # noqa: SIM115

    def reads(x):
        return handle.read()

    with pytest.raises(ValueError, match="'handle' cannot be copied"):
        portable(reads)
    handle.close()


def test_launch_refuses_numbers_of_unknown_width():
    x = torch.zeros(4, device=lab.DEVICE.torch)
    with pytest.raises(TypeError, match="argument 3 is 1, a int"):
        ADD4[1, 32](x, x, x, 1)


@pytest.mark.skipif(not lab.SIMULATED, reason="needs a machine without a GPU")
def test_launch_without_a_gpu_says_what_still_works():
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="raw CUDA needs a GPU"):
        ADD4[1, 32](x, x, x, np.int32(1))


@gpu_only
def test_launch_on_a_gpu():
    x, y = ADD.inputs(torch.float32, N=4096)
    assert torch.equal(add_vectorized(x, y), x + y)
    big = torch.empty(40 * 1024, device="cuda")
    SPILL.launch(1, 1024, torch.ones_like(big), big, shared=100 * 1024)  # above 48 KiB
    assert torch.equal(big, torch.full_like(big, 41.0))


@gpu_only
def test_launch_checks_count_width_and_device():
    x = torch.zeros(4, device="cuda")
    with pytest.raises(TypeError, match="takes 4 arguments, got 3"):
        ADD4[1, 32](x, x, x)
    with pytest.raises(TypeError, match="of 8 bytes"):
        ADD4[1, 32](x, x, x, np.int64(1))
    with pytest.raises(ValueError, match="argument 1 is on cpu"):
        ADD4[1, 32](x, x.cpu(), x, np.int32(1))
    with pytest.raises(CompileError, match=r"broken\.cu\(3\)"):
        BROKEN[1, 32](x)


@gpu_only
def test_launch_takes_the_current_stream():
    x, y = ADD.inputs(torch.float32, N=1 << 22)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would run ahead of the zeros
        o = torch.zeros_like(x)
        ADD4[1 << 12, 256](x, y, o, np.int32(1 << 20))
    side.synchronize()
    assert torch.equal(o, x + y)


@gpu_only
def test_launch_in_a_cuda_graph():
    x, y = ADD.inputs(torch.float32, N=4096)
    add_vectorized(x, y)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = add_vectorized(x, y)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, x + y)


@gpu_only
def test_cluster_and_cooperative_launch():
    grid_sync = cuda_kernel(
        r"""
#include <cooperative_groups.h>
extern "C" __global__ void count(int* x) {
  atomicAdd(x, 1);
  cooperative_groups::this_grid().sync();
  if (threadIdx.x == 0) x[1 + blockIdx.x] = x[0];
}""",
        "count",
    )
    x = torch.zeros(5, dtype=torch.int32, device="cuda")
    grid_sync.launch(4, 32, x, cooperative=True)
    assert x.tolist() == [128] * 5
    if torch.cuda.get_device_capability() >= (9, 0):
        ranks = cuda_kernel(
            'extern "C" __global__ void rank(int* x) { int r; '
            'asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); x[blockIdx.x] = r; }',
            "rank",
        )
        ranks.launch(4, 1, x, cluster=2)
        assert x.tolist()[:4] == [0, 1, 0, 1]
