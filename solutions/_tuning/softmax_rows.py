"""A cluster that takes several rows one after another, the next one on its way: is it faster?

PYTHONPATH=. python solutions/_tuning/softmax_rows.py        about 20 s
PYTHONPATH=. python solutions/_tuning/softmax_rows.py --compile    registers; no GPU
"""

import labkit as lab
from labkit import compile_worker
from labkit.bench import ceilings, interleaved
from labkit.compile import compile_cuda

import re
import statistics
import sys

import numpy as np
import torch
import triton

from solutions import softmax as sm

HEAD = sm.CLUSTER[: sm.CLUSTER.index("// A cluster of blocks computes one row")]
TEXT = (
    HEAD
    + r"""
// A cluster of blocks computes `rows` rows, one after another; each thread keeps PACKS packs of a
// row in shared memory, where no other thread looks, and those of the next row are on their way.
template <typename T, int PACKS, bool RAGGED, int REGISTERS>
__global__ void __maxnreg__(REGISTERS) softmax_rows_kernel(
    const T* x, T* y, int M, int N, int rows) {
#if __CUDA_ARCH__ >= 900
    constexpr int W = 16 / sizeof(T);
    extern __shared__ __align__(16) unsigned char row_bytes[];
    Pack<T>* row_s = reinterpret_cast<Pack<T>*>(row_bytes) + threadIdx.x;
    __shared__ Part part_s[2][8 * 32];  // of each warp in the cluster, for two rows

    // The functions behind cooperative_groups.h, which would ask for more headers.
    __cluster_barrier_arrive_relaxed();  // waited for before the first write to another block
    const int rank = __clusterRelativeBlockRank(), blocks = __clusterSizeInBlocks();
    const int first_row = blockIdx.x / blocks * rows, end = min(M, first_row + rows);
    const int first = rank * PACKS * blockDim.x + threadIdx.x;
    auto shift_of = [&](int row) { return RAGGED ? (int)((long long)row * N % W) : 0; };
    auto whole = [&](int p, int shift) { return p * W >= shift && (p + 1) * W <= shift + N; };
    auto ask = [&](int row) {
        if (row < end) {
            const long long begin = (long long)row * N;
            const int shift = shift_of(row);  // pack 0 starts so many elements before the row
            const Pack<T>* x_pack = reinterpret_cast<const Pack<T>*>(x) + begin / W;
            #pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int p = first + i * blockDim.x;
                Pack<T>* pack_s = row_s + (row % 2 * PACKS + i) * blockDim.x;
                if (whole(p, shift)) {
                    __pipeline_memcpy_async(pack_s, x_pack + p, 16);
                } else {
                    for (int j = 0; j < W; ++j) {
                        const int col = p * W + j - shift;
                        const bool inside = RAGGED && col >= 0 && col < N;
                        pack_s->v[j] = inside ? x[begin + col] : T(NEG_INF);
                    }
                }
            }
        }
        __pipeline_commit();
    };
    ask(first_row);
    __cluster_barrier_wait();  // every block has started
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    #pragma unroll 1
    for (int row = first_row; row < end; ++row) {
        ask(row + 1);
        __pipeline_wait_prior(1);
        Part part = {NEG_INF, 0};
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const Pack<T> h = row_s[(row % 2 * PACKS + i) * blockDim.x];
            float m = part.m;
            #pragma unroll
            for (int j = 0; j < W; ++j) m = fmaxf(m, (float)h.v[j]);
            const float safe = m == NEG_INF ? 0 : m;
            float total = part.total * __expf(part.m - safe);
            #pragma unroll
            for (int j = 0; j < W; ++j) total += __expf((float)h.v[j] - safe);
            part = {m, total};
        }
        part = merged_in_warp(part);
        // Every warp tells every block of the cluster its part, through distributed shared memory.
        // Who writes there for the row after the next has passed this row's barrier and the next.
        if (lane < blocks) {
            Part* there_s = static_cast<Part*>(__cluster_map_shared_rank(part_s[row % 2], lane));
            there_s[rank * warps + threadIdx.x / 32] = part;
        }
        __cluster_barrier_arrive();
        __cluster_barrier_wait();  // every part has arrived
        part = {NEG_INF, 0};
        #pragma unroll 1
        for (int i = lane; i < blocks * warps; i += 32) part = merged(part, part_s[row % 2][i]);
        part = merged_in_warp(part);

        const float scale = 1 / part.total;
        const long long begin = (long long)row * N;
        const int shift = shift_of(row);
        Pack<T>* y_pack = reinterpret_cast<Pack<T>*>(y) + begin / W;
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int p = first + i * blockDim.x;
            Pack<T> h = row_s[(row % 2 * PACKS + i) * blockDim.x];
            #pragma unroll
            for (int j = 0; j < W; ++j) h.v[j] = T(__expf((float)h.v[j] - part.m) * scale);
            if (whole(p, shift)) {
                y_pack[p] = h;
            } else if (RAGGED) {
                for (int j = 0; j < W; ++j) {
                    const int col = p * W + j - shift;
                    if (col >= 0 && col < N) y[begin + col] = h.v[j];
                }
            }
        }
    }
#else
    __trap();
#endif
}
"""
)
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
# packs in a thread, threads of a block, registers of a thread, rows of a cluster
BF16 = [(p, t, r, n) for p, t, r in ((8, 256, 80), (8, 512, 64), (4, 512, 64), (4, 256, 48))
        for n in (1, 2, 4, 8)]  # fmt: skip
FP32 = [(p, t, r, n) for p, t, r in ((8, 256, 80), (8, 512, 64), (16, 256, 80), (4, 512, 64))
        for n in (1, 2, 4, 8)]  # fmt: skip
SHAPES = {torch.bfloat16: BF16, torch.float32: FP32}


def kernel(dtype, packs, registers, ragged=False):
    """An instance of the template."""
    name = f"softmax_rows_kernel<{TYPES[dtype]}, {packs}, {str(ragged).lower()}, {registers}>"
    return lab.cuda_kernel(TEXT, name, options={"use_fast_math": True})


KERNELS = {(d, p, r): kernel(d, p, r) for d in TYPES for p, _, r, _ in SHAPES[d]}
KERNELS |= {(d, "ragged"): kernel(d, 8, 80, True) for d in TYPES}


def variant(dtype, packs, threads, registers, rows, M, N, which=None):
    """A function of x, or None where a cluster of 8 holds no such row."""
    per_pack = 16 // dtype.itemsize
    count, blocks = -(-N // per_pack) + (N % per_pack != 0), 1
    while count > blocks * threads * packs:
        blocks *= 2
    if blocks > 8:
        return None
    used = triton.cdiv(count, blocks * packs * 32) * 32
    run = KERNELS[which or (dtype, packs, registers)].configure(
        (triton.cdiv(M, rows) * blocks,), used, 2 * packs * 16 * used, cluster=(blocks, 1, 1)
    )
    y = torch.empty((M, N), dtype=dtype, device="cuda")

    def call(x):
        run(x, y, np.int32(M), np.int32(N), np.int32(rows))
        return y

    return call


def card() -> None:
    """Registers of all instances."""
    for k in KERNELS.values():
        dump = compile_worker._disassemble(compile_cuda(k, "sm_90").code)
        print(k.name, re.findall(r"(?:REG|STACK|SHARED):\d+", dump))


def main() -> None:
    """Check, then time."""
    for dtype in TYPES:
        for M, N in ((5, 40001), (3, 131071), (9, 100003)):  # ragged rows, a rest of rows
            x = torch.randn(M, N, device="cuda").to(dtype)
            truth = torch.softmax(x.double(), 1)
            for rows in (1, 2, 4):
                call = variant(dtype, 8, 512, 80, rows, M, N, (dtype, "ragged"))
                off = ((call(x).double() - truth).abs() / truth).max().item()
                print(dtype, M, N, rows, f"off by {off:.2e}" if off > 2**-7 or off != off else "ok")
        for M, N in ((4096, 32768), (2048, 65536), (1024, 131072)):
            (x,) = sm.SOFTMAX.inputs(dtype, M=M, N=N)
            floor = sm.SOFTMAX.work(dtype, M=M, N=N).bytes / ceilings()["copy_bytes_per_s"]
            calls = {"rung 7": sm.softmax_cluster, "rung 4": sm.softmax_fused}
            for shape in SHAPES[dtype]:
                if call := variant(dtype, *shape, M, N):
                    calls[str(shape)] = call
            want = sm.softmax_cluster(x).float()
            wrong = [n for n, f in calls.items() if not (f(x).float() - want).abs().max() < 1e-4]
            t = interleaved({n: lambda f=f, x=x: f(x) for n, f in calls.items()}, 25)
            t = {n: statistics.median(v) for n, v in t.items()}
            print(f"-- {dtype} {M} × {N}: floor {floor * 1e6:.1f}", f"WRONG {wrong}" * bool(wrong))
            for n in ["rung 7", "rung 4", *sorted(t, key=t.get)[:7]]:
                print(f"  {n:24} {t[n] * 1e6:7.1f} {floor / t[n]:.3f}", flush=True)


if __name__ == "__main__":
    card() if sys.argv[1:] == ["--compile"] else main()
