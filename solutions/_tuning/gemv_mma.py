"""GEMV on the tensor cores, on this GPU: 16 rows of w times up to 8 tokens, bf16 and 4-bit weights.

    PYTHONPATH=. python solutions/_tuning/gemv_mma.py        about 40 s
    PYTHONPATH=. python solutions/_tuning/gemv_mma.py --compile    registers; no GPU

Products along K may be added in any order. So a lane's 16 bytes of a row, whatever columns they
are, go into the product as they come, if its 16 bytes of x have the same columns.
"""

import labkit as lab
from labkit import compile_worker
from labkit.bench import _in_graphs, ceilings
from labkit.compile import compile_cuda

import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import triton

from solutions import decode_attention, gemv

BF16 = torch.bfloat16
TEXT = (
    decode_attention.TENSOR_CORES
    + r"""
__device__ uint4 stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// The warps' sums [16·TILES rows, 8 tokens] become y [M, N].
template <typename T, int TILES, int WARPS>
__device__ void finish(const float (&total)[TILES][4], T* y, int M, int N) {
    __shared__ float part_s[WARPS][16 * TILES][9];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int i = 0; i < TILES; ++i)
        #pragma unroll
        for (int n = 0; n < 4; ++n)
            part_s[warp][16 * i + g + n / 2 * 8][2 * t + n % 2] = total[i][n];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TILES * M; i += 32 * WARPS) {
        const int row = i % (16 * TILES), m = i / (16 * TILES);
        const long long n = (long long)blockIdx.x * 16 * TILES + row;
        float sum = 0;
        #pragma unroll
        for (int k = 0; k < WARPS; ++k) sum += part_s[k][row][m];
        if (n < N) y[m * (long long)N + n] = T(sum);
    }
}

// K is a multiple of 32.
template <typename T, int TILES, int STEPS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) plain_kernel(
    const uint4* x, const uint4* w, T* y, int M, int N, int K) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const long long first = (long long)blockIdx.x * 16 * TILES + g;
    const int packs = K / 8, steps = K / 32;
    float total[TILES][4] = {};
    for (int s = warp * STEPS; s < steps; s += WARPS * STEPS) {
        uint4 a[STEPS][TILES][2], b[STEPS];
        #pragma unroll
        for (int u = 0; u < STEPS; ++u)
            #pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const long long row = first + 8 * i;
                a[u][i / 2][i % 2] = row < N && s + u < steps
                    ? stream(w + row * packs + (s + u) * 4 + t) : uint4{};
            }
        #pragma unroll
        for (int u = 0; u < STEPS; ++u)
            b[u] = g < M && s + u < steps ? x[g * packs + (s + u) * 4 + t] : uint4{};
        #pragma unroll
        for (int u = 0; u < STEPS; ++u)
            #pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const uint4 p = a[u][i][0], q = a[u][i][1];
                const unsigned even[4] = {p.x, q.x, p.y, q.y}, odd[4] = {p.z, q.z, p.w, q.w};
                multiply(total[i], even, b[u].x, b[u].y, T());
                multiply(total[i], odd, b[u].z, b[u].w, T());
            }
    }
    finish<T, TILES, WARPS>(total, y, M, N);
}

// 128 or 1,024 with a nibble in the low bits is 128 or 1,024 plus the nibble, and 8 is its zero.
template <typename T> struct Magic { static constexpr unsigned bits = 0x43004300, ones = 0x3F803F80;
                                     static constexpr float zero = 136; };
template <> struct Magic<__half> { static constexpr unsigned bits = 0x64006400, ones = 0x3C003C00;
                                   static constexpr float zero = 1032; };

template <typename T> __device__ unsigned pair(unsigned word, int place) {
    return (word >> 4 * place & 0x000F000F) | Magic<T>::bits;
}

// Groups of 128 columns: a 16-byte load of a lane has 32 of them, so four lanes have a group.
template <typename T, int TILES, int GROUPS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) w4_kernel(
    const uint4* x, const uint4* w, const T* scale, T* y, int M, int N, int K) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const long long first = (long long)blockIdx.x * 16 * TILES + g;
    const int groups = K / 128;
    float total[TILES][4] = {};
    for (int j = warp; j < groups; j += WARPS * GROUPS) {
        uint4 a[GROUPS][TILES][2];
        T scales[GROUPS][TILES][2];
        #pragma unroll
        for (int u = 0; u < GROUPS; ++u)
            #pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const long long at = (first + 8 * i) * groups + j + u * WARPS;
                const bool there = first + 8 * i < N && j + u * WARPS < groups;
                a[u][i / 2][i % 2] = there ? stream(w + at * 4 + t) : uint4{};
                scales[u][i / 2][i % 2] = there ? scale[at] : T(0.0f);
            }
        #pragma unroll
        for (int u = 0; u < GROUPS; ++u) {
            const int group = j + u * WARPS;
            float ones[4] = {}, acc[TILES][4] = {};
            #pragma unroll
            for (int k = 0; k < 4; ++k) {  // a word of each row
                const uint4 b = g < M && group < groups
                    ? x[g * (K / 8) + group * 16 + 4 * t + k] : uint4{};
                const unsigned b04 = __byte_perm(b.x, b.z, 0x5410);
                const unsigned b15 = __byte_perm(b.x, b.z, 0x7632);
                const unsigned b26 = __byte_perm(b.y, b.w, 0x5410);
                const unsigned b37 = __byte_perm(b.y, b.w, 0x7632);
                const unsigned one[4] = {
                    Magic<T>::ones, Magic<T>::ones, Magic<T>::ones, Magic<T>::ones};
                multiply(ones, one, b04, b15, T());
                multiply(ones, one, b26, b37, T());
                #pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const unsigned p = reinterpret_cast<const unsigned*>(&a[u][i][0])[k];
                    const unsigned q = reinterpret_cast<const unsigned*>(&a[u][i][1])[k];
                    const unsigned low[4] = {
                        pair<T>(p, 0), pair<T>(q, 0), pair<T>(p, 1), pair<T>(q, 1)};
                    const unsigned high[4] = {
                        pair<T>(p, 2), pair<T>(q, 2), pair<T>(p, 3), pair<T>(q, 3)};
                    multiply(acc[i], low, b04, b15, T());
                    multiply(acc[i], high, b26, b37, T());
                }
            }
            #pragma unroll
            for (int i = 0; i < TILES; ++i)
                #pragma unroll
                for (int n = 0; n < 4; ++n)
                    total[i][n] = fmaf((float)scales[u][i][n / 2],
                                       fmaf(-Magic<T>::zero, ones[n], acc[i][n]), total[i][n]);
        }
    }
    finish<T, TILES, WARPS>(total, y, M, N);
}
"""
)
CUTS = [(1, 4, 8), (1, 2, 8), (2, 2, 8), (1, 4, 4), (2, 4, 8), (2, 2, 4), (1, 8, 4), (1, 1, 8)]
W4_CUTS = [(1, 2, 8), (2, 1, 8), (2, 2, 8), (1, 1, 8), (1, 4, 8), (2, 2, 4), (1, 2, 4), (1, 4, 4)]
CUDA = {BF16: "__nv_bfloat16", torch.float16: "__half"}


@cache
def kernel(kind: str, dtype: torch.dtype, cut: tuple):
    """An instance: row tiles, loads a row before the first is used, warps."""
    return lab.cuda_kernel(TEXT, f"{kind}_kernel<{CUDA[dtype]}, {', '.join(map(str, cut))}>")


def variant(kind: str, dtype: torch.dtype, cut: tuple):
    """A function of x, w and, for 4 bits, scale."""
    run, (tiles, _, warps) = kernel(kind, dtype, cut), cut

    def call(x, w, *scale):
        (M, K), N = x.shape, len(w)
        y = torch.empty((M, N), dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(N, 16 * tiles),)
        run[grid, 32 * warps](x, w, *scale, y, np.int32(M), np.int32(N), np.int32(K))
        return y

    return call


def compare(problem, rungs: dict, kind: str, cuts: list, M: int, N: int, K: int, read: float):
    """One line for each version, the fastest first."""
    args, work = (f(BF16, M=M, N=N, K=K) for f in (problem.inputs, problem.work))
    calls = rungs | {f"{kind} {cut}": variant(kind, BF16, cut) for cut in cuts}
    truth = problem.truth(*args)[0].double()
    most = truth.abs().max()
    off = {n: ((f(*args).double() - truth).abs().max() / most).item() for n, f in calls.items()}
    times = {n: statistics.median(t) for n, t in _in_graphs(calls, args, work, 20).items()}
    print(f"-- M={M} {N} × {K}: floor {work.bytes / read * 1e6:.2f} µs")
    for n in [*rungs, *sorted((n for n in times if n not in rungs), key=times.get)[:4]]:
        share = work.bytes / times[n] / read
        print(f"  {n:24} {times[n] * 1e6:8.2f} µs {share:4.0%} off by {off[n]:.1e}", flush=True)


def main() -> None:
    """bf16 with several tokens, then 4 bits."""
    read = ceilings()["read_bytes_per_s"]
    kernels = [kernel(k, BF16, c) for k, cuts in (("plain", CUTS), ("w4", W4_CUTS)) for c in cuts]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda k: compile_cuda(k, "sm_90"), kernels))
    bf16 = {"rung 5": gemv.gemv_split_k, "F.linear": gemv.library}
    for M, N, K in ((4, 151936, 1024), (8, 151936, 1024), (1, 151936, 1024), (8, 4096, 1024),
                    (8, 1024, 2048), (8, 6144, 1024), (8, 1024, 3072), (8, 28672, 8192),
                    (1, 28672, 8192), (1, 4096, 1024)):  # fmt: skip
        compare(gemv.GEMV, bf16, "plain", CUTS, M, N, K, read)
    w4 = {"rung 7": gemv.gemv_w4a16_fused}
    for M, N, K in ((1, 8192, 81920), (1, 28672, 8192), (4, 28672, 8192), (8, 28672, 8192),
                    (1, 151936, 1024), (1, 6144, 1024), (1, 4096, 1024), (1, 1024, 2048),
                    (1, 1024, 3072)):  # fmt: skip
        compare(gemv.GEMV_W4A16, w4, "w4", W4_CUTS, M, N, K, read)


def card() -> None:
    """Registers of all instances."""
    for kind, cuts in (("plain", CUTS), ("w4", W4_CUTS)):
        for cut in cuts:
            for dtype in CUDA if cut == cuts[0] else (BF16,):
                k = kernel(kind, dtype, cut)
                dump = compile_worker._disassemble(compile_cuda(k, "sm_90").code)
                print(k.name, re.findall(r"(?:REG|STACK|SHARED):\d+", dump))


if __name__ == "__main__":
    card() if sys.argv[1:] == ["--compile"] else main()
