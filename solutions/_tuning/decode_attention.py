"""Check the last rungs of decode_attention on this GPU, then time three other texts of rung 5.

    PYTHONPATH=. python solutions/_tuning/decode_attention.py        at most 120 s, at most 90 lines

Every size is timed twice: with events and a cold L2, as the bars are, and in a CUDA graph of 50
calls or more that goes round copies of the inputs, as a model would replay it. Texts:

    w  the ring as it is; plain copies instead of zero-filling ones, and a shorter end
    r  no ring: 16-byte loads into registers, asked for again as soon as those are free
    t  so too, with tensor cores: a quarter of the instructions in the loop
"""

import labkit as lab
from labkit.bench import _in_graphs, ceilings, interleaved
from labkit.check import error_over_allowed

import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from solutions import _decode_attention as da

START, LIMIT, CHECKS_END = time.time(), 116, 45
P, MODEL = da.DECODE_ATTENTION, da.QWEN_SMALL
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


# Variants of rung 5's text ---------------------------------------------------------------------

# What the variants share: loads that stay where they are written, and a shorter end.
COMMON = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <math_constants.h>

// Volatile: the compiler neither moves such loads nor makes them wait for what they do not need.
__device__ uint4 stream(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
__device__ int number(const int* from) {
    int x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
// Into L2, for the atomic at the end.
__device__ void expect(const int* address) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
}

// Slots of a sequence, key after key. Past `limit` there is the last key before it once more.
struct Contiguous {
    int first_slot, most, first, limit;
    __device__ int readable(const int* context_len) const { return most; }
    __device__ void look_up(int s, int end) { first = s; limit = end; }
    __device__ int of(int i) const { return first_slot + min(first + i, limit - 1); }
};

// Every row is what a team knows of a head: m, l and D weighted sums of values. Rows, [G, TEAMS], are
// in shared memory at first, and one merge turns those of a head into one. If the head has several
// splits, that goes to the workspace, [G, splits], and the last block merges once more: the same
// code, which it need not fetch again.
template <typename T, int D, int G, int WARPS, int TEAMS>
__device__ void finish(
    const float2* m_and_l, const float* acc, T* o, float* partial, float2* lse, int* counter,
    int split, int splits, int used) {
    int count = TEAMS, stride = TEAMS;
    #pragma unroll 1
    for (bool whole = used == 1;; whole = true) {
        __syncthreads();
        #pragma unroll 1
        for (int i = threadIdx.x; i < G * D; i += 32 * WARPS) {
            const int g = i / D, d = i % D;
            const float2* from = m_and_l + g * stride;
            const float* column = acc + g * stride * D + d;
            float m = -1e30f, l = 0, sum = 0;
            #pragma unroll 1
            for (int first = 0; first < count; first += MERGED, from += MERGED) {
                float2 state[MERGED];
                float x[MERGED];
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) {  // all loads at once
                    const bool inside = first + n < count;
                    state[n] = inside ? from[n] : float2{-CUDART_INF_F, 0};
                    x[n] = inside ? column[n * D] : 0;
                }
                column += MERGED * D;
                float top = m;
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) top = fmaxf(top, state[n].x);
                const float alpha = exp2f(m - top);
                m = top;
                l *= alpha;
                sum *= alpha;
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) {
                    const float weight = exp2f(state[n].x - top);
                    l = fmaf(weight, state[n].y, l);
                    sum = fmaf(weight, x[n], sum);
                }
            }
            if (whole) {
                o[i] = T(l > 0 ? __fdividef(sum, l) : 0);
            } else {
                const int row = g * splits + split;
                partial[row * D + d] = sum;
                if (d == 0) lse[row] = float2{m, l};
            }
        }
        if (whole) return;

        // Releases what the whole block has stored, and acquires what others have.
        __syncthreads();
        int before = 0;
        if (threadIdx.x == 0)
            before =
                __nv_atomic_fetch_add(counter, 1, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
        if (!__syncthreads_or(threadIdx.x == 0 && before == used - 1)) return;
        if (threadIdx.x == 0) *counter = 0;  // ready for the next launch
        m_and_l = lse;
        acc = partial;
        count = used;
        stride = splits;
    }
}
"""

# w: the ring as it is, with plain copies of clamped addresses, fewer selects, and that end.
SUM_OVER_LANES = da.ATTEND[
    da.ATTEND.index("// 16 bytes of a key") : da.ATTEND.index("// Block (h,")
]
RING = (
    COMMON
    + changed(
        da.ATTEND[
            da.ATTEND.index("// 16 bytes of a key") : da.ATTEND.index("    // Merged are first")
        ],
        ("float* partial, float* lse,", "float* partial, float2* lse,"),
        (
            """        #pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int i = u * ROWS + row;
            const long long at = (long long)slots.of(first, i) * (H_kv * LANES);
            const int left_out = first + i < limit ? 0 : 16;  // bytes: nothing is read past limit
            __pipeline_memcpy_async(place(stage, 0, u), k_lane + at, 16, left_out);
            __pipeline_memcpy_async(place(stage, 1, u), v_lane + at, 16, left_out);
        }
""",
            """        if (tile * (WARPS * KEYS) < limit) {
            slots.look_up(first, limit);
            #pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                const long long at = (long long)slots.of(u * ROWS + row) * (H_kv * LANES);
                __pipeline_memcpy_async(place(stage, 0, u), k_lane + at, 16);
                __pipeline_memcpy_async(place(stage, 1, u), v_lane + at, 16);
            }
        }
""",
        ),
        ("        slots.look_up(first_key(tile + splits));\n", ""),
        (
            "    slots.look_up(first_key(split));\n",
            "    expect(counters + blockIdx.z * H_kv + h);\n",
        ),
        (
            """            const Pack<T> pack = *place(stage, 1, u);
            #pragma unroll
            for (int j = 0; j < W; ++j) value[u][j] = inside ? (float)pack.v[j] : 0;
""",
            """            uint4 words = *reinterpret_cast<const uint4*>(place(stage, 1, u));
            if (!inside) words = uint4{};
            const Pack<T> pack = reinterpret_cast<const Pack<T>&>(words);
            #pragma unroll
            for (int j = 0; j < W; ++j) value[u][j] = (float)pack.v[j];
""",
        ),
        (
            "    constexpr int MERGED = G * W < 32 ? 32 / (G * W) : 1;  // splits that a team reads at once\n",
            "",
        ),
    )
    + r"""
    __shared__ float2 state_s[G * TEAMS];
    float* acc_s = reinterpret_cast<float*>(ring_bytes);  // the ring has no use now
    __syncthreads();
    #pragma unroll
    for (int g = 0; g < G; ++g) {
        if (lane == 0) state_s[g * TEAMS + team] = float2{state[g].m, state[g].l};
        #pragma unroll
        for (int j = 0; j < W; j += 4)
            *reinterpret_cast<float4*>(acc_s + (g * TEAMS + team) * D + lane * W + j) =
                *reinterpret_cast<float4*>(state[g].acc + j);
    }
    finish<T, D, G, WARPS, TEAMS>(
        state_s, acc_s, o + head * D, partial + head * splits * D, lse + head * splits,
        counters + blockIdx.z * H_kv + h, split, splits, used);
}

template <typename T, int D, int G, int WARPS, int LOADS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
kernel(
    const T* q, const T* k, const T* v, const int* context_lens, T* o, float* partial, float2* lse,
    int* counters, float scale, int S) {
    attend<T, D, G, WARPS, LOADS, STAGES>(
        q, k, v, context_lens + blockIdx.z, o, partial, lse, counters, scale,
        Contiguous{(int)blockIdx.z * S, S});
}
"""
)

# r: the same arithmetic from registers. As soon as the keys of a tile are multiplied, those of the
# next are asked for into the same registers; so are values once they are added.
REGISTERS = (
    COMMON
    + SUM_OVER_LANES
    + r"""
template <typename T, int D, int G, int WARPS, int LOADS, typename Slots>
__device__ void attend(
    const T* q, const T* k, const T* v, const int* context_len, T* o, float* partial, float2* lse,
    int* counters, float scale, Slots slots) {
    constexpr int W = 16 / sizeof(T), LANES = D / W;
    constexpr int ROWS = 32 / LANES, TEAMS = WARPS * ROWS;  // teams of a warp, of the block
    constexpr int KEYS = LOADS * ROWS;  // of a warp in a tile
    constexpr int CHUNK = G * LOADS < 8 ? G * LOADS : 8;  // scores summed together
    const int h = blockIdx.x, split = blockIdx.y, H_kv = gridDim.x, splits = gridDim.y;
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / LANES;
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const long long head = ((long long)blockIdx.z * H_kv + h) * G;  // the first of all B·H
    int* counter = counters + blockIdx.z * H_kv + h;
    const uint4* k_lane = reinterpret_cast<const uint4*>(k) + h * LANES + lane;
    const uint4* v_lane = reinterpret_cast<const uint4*>(v) + h * LANES + lane;
    auto first_key = [&](int tile) { return (tile * WARPS + warp) * KEYS; };  // of the warp
    uint4 key[LOADS], value[LOADS], q_pack[G];
    auto load = [&](const uint4* from, uint4 (&to)[LOADS]) {
        #pragma unroll
        for (int u = 0; u < LOADS; ++u)
            to[u] = stream(from + (long long)slots.of(u * ROWS + row) * (H_kv * LANES));
    };

    int length = number(context_len);
    const int readable = min(slots.readable(context_len), slots.most);
    if (split * (WARPS * KEYS) < readable) {  // before the length is known
        slots.look_up(first_key(split), readable);
        load(k_lane, key);
        load(v_lane, value);
    }
    #pragma unroll
    for (int g = 0; g < G; ++g)
        q_pack[g] = stream(reinterpret_cast<const uint4*>(q) + (head + g) * LANES + lane);
    expect(counter);
    length = min(length, slots.most);
    const int tiles = (length + WARPS * KEYS - 1) / (WARPS * KEYS);
    const int used = max(1, min(splits, tiles));  // an empty context takes one, to store zeros
    if (split >= used) return;
    float q_lane[G][W];
    #pragma unroll
    for (int g = 0; g < G; ++g)
        #pragma unroll
        for (int j = 0; j < W; ++j)
            q_lane[g][j] = scale * (float)reinterpret_cast<const Pack<T>&>(q_pack[g]).v[j];
    #pragma unroll
    for (int u = 0; u < LOADS; ++u)  // what lies past the context may be NaN
        if (first_key(split) + u * ROWS + row >= length) value[u] = uint4{};

    float m[G], l[G];
    alignas(16) float acc[G][W];
    #pragma unroll
    for (int g = 0; g < G; ++g) {
        m[g] = -1e30f;
        l[g] = 0;
        #pragma unroll
        for (int j = 0; j < W; ++j) acc[g][j] = 0;
    }
    #pragma unroll 1
    for (int tile = split; tile < tiles; tile += splits) {
        const int first = first_key(tile);
        const bool more = tile + splits < tiles;
        float score[G][LOADS];
        #pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const Pack<T> pack = reinterpret_cast<const Pack<T>&>(key[u]);
            #pragma unroll
            for (int g = 0; g < G; ++g) {
                score[g][u] = 0;
                #pragma unroll
                for (int j = 0; j < W; ++j)
                    score[g][u] = fmaf(q_lane[g][j], (float)pack.v[j], score[g][u]);
            }
        }
        if (more) {
            slots.look_up(first_key(tile + splits), length);
            load(k_lane, key);
        }
        #pragma unroll
        for (int i = 0; i < G * LOADS; i += CHUNK) {
            float some[CHUNK];
            #pragma unroll
            for (int n = 0; n < CHUNK; ++n) some[n] = score[(i + n) / LOADS][(i + n) % LOADS];
            sum_over_lanes<LANES>(some);
            #pragma unroll
            for (int n = 0; n < CHUNK; ++n) score[(i + n) / LOADS][(i + n) % LOADS] = some[n];
        }
        #pragma unroll
        for (int g = 0; g < G; ++g) {
            float top = m[g];
            #pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                if (first + u * ROWS + row >= length) score[g][u] = -CUDART_INF_F;
                top = fmaxf(top, score[g][u]);
            }
            const float alpha = exp2f(m[g] - top);
            m[g] = top;
            l[g] *= alpha;
            #pragma unroll
            for (int j = 0; j < W; ++j) acc[g][j] *= alpha;
            #pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                score[g][u] = exp2f(score[g][u] - top);
                l[g] += score[g][u];
            }
        }
        #pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const Pack<T> pack = reinterpret_cast<const Pack<T>&>(value[u]);
            #pragma unroll
            for (int j = 0; j < W; ++j)
                #pragma unroll
                for (int g = 0; g < G; ++g)
                    acc[g][j] = fmaf(score[g][u], (float)pack.v[j], acc[g][j]);
        }
        if (more) load(v_lane, value);
    }

    __shared__ float2 state_s[G * TEAMS];
    __shared__ alignas(16) float acc_s[TEAMS * G * D];
    #pragma unroll
    for (int g = 0; g < G; ++g) {
        if (lane == 0) state_s[g * TEAMS + team] = float2{m[g], l[g]};
        #pragma unroll
        for (int j = 0; j < W; j += 4)
            *reinterpret_cast<float4*>(acc_s + (g * TEAMS + team) * D + lane * W + j) =
                *reinterpret_cast<float4*>(acc[g] + j);
    }
    finish<T, D, G, WARPS, TEAMS>(
        state_s, acc_s, o + head * D, partial + head * splits * D, lse + head * splits, counter,
        split, splits, used);
}

template <typename T, int D, int G, int WARPS, int LOADS, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
kernel(
    const T* q, const T* k, const T* v, const int* context_lens, T* o, float* partial, float2* lse,
    int* counters, float scale, int S) {
    attend<T, D, G, WARPS, LOADS>(
        q, k, v, context_lens + blockIdx.z, o, partial, lse, counters, scale,
        Contiguous{(int)blockIdx.z * S, S});
}
"""
)

# t: tensor cores, which need the fewest instructions, and no numbers are converted.
TENSOR = (
    COMMON
    + r"""
// c += a · b: a [16, 16] row by row, b [16, 8], c [16, 8]. Lane 4·r + t of the warp has two
// neighbouring numbers a register: of a, rows r and r + 8 at columns 2t, then both at 2t + 8; of b,
// rows 2t and 2t + 8 of column r; of c, columns 2t of rows r and r + 8.
__device__ void mma(__nv_bfloat16, float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                    unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ void mma(__half, float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                    unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ unsigned pair(__nv_bfloat16, float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const unsigned&>(both);
}
__device__ unsigned pair(__half, float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return reinterpret_cast<const unsigned&>(both);
}
// An 8 x 8 matrix, in which lane 4·r + t has columns 2t and 2t + 1 of row r, transposed.
__device__ unsigned transposed(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ unsigned word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// A tile has 16 keys for each warp, and a group up to four query heads. Lane 4·r + t:
//   keys     vectors t, t + 4, ... of keys r and r + 8. In a product, a's row r has words 0 and 2
//            of each, and row r + 8 has words 1 and 3: b has a head's words 0 and 2 in one column,
//            1 and 3 in another four on, and a score is the sum of two.
//   scores   of heads 2(t % 2) and one on, for key r, or r + 8 if t > 1
//   values   vectors r, r + 8, ... of keys 2t, 2t + 1, 2t + 8 and 2t + 9, of which two make a pair.
//            b has the weights of keys 0 … 7 in the first four columns, of 8 … 15 in the others.
//   acc      columns of o for the heads it has scores of; its softmax is that of half the keys.
template <typename T, int D, int G, int WARPS, typename Slots>
__device__ void attend(
    const T* q, const T* k, const T* v, const int* context_len, T* o, float* partial, float2* lse,
    int* counters, float scale, Slots slots) {
    static_assert(G <= 4);
    constexpr int KEYS = 16, VECTORS = D / 8, TEAMS = 2 * WARPS;
    constexpr int OF_KEY = VECTORS / 4, OF_VALUE = VECTORS / 8;  // vectors for a lane
    const int h = blockIdx.x, split = blockIdx.y, H_kv = gridDim.x, splits = gridDim.y;
    const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool low = t < 2;
    const long long head = ((long long)blockIdx.z * H_kv + h) * G;  // the first of all B·H
    int* counter = counters + blockIdx.z * H_kv + h;
    const uint4* k_lane = reinterpret_cast<const uint4*>(k) + h * VECTORS + t;
    const uint4* v_lane = reinterpret_cast<const uint4*>(v) + h * VECTORS + r;
    auto first_key = [&](int tile) { return (tile * WARPS + warp) * KEYS; };  // of the warp
    auto of_value = [&](int n) { return 2 * t + n % 2 + n / 2 * 8; };  // its key in the tile
    uint4 key[2][OF_KEY], value[4][OF_VALUE];
    auto load_keys = [&]() {
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint4* from = k_lane + (long long)slots.of(r + 8 * n) * (H_kv * VECTORS);
            #pragma unroll
            for (int i = 0; i < OF_KEY; ++i) key[n][i] = stream(from + 4 * i);
        }
    };
    auto load_values = [&]() {
        #pragma unroll
        for (int n = 0; n < 4; ++n) {
            const uint4* from = v_lane + (long long)slots.of(of_value(n)) * (H_kv * VECTORS);
            #pragma unroll
            for (int i = 0; i < OF_VALUE; ++i) value[n][i] = stream(from + 8 * i);
        }
    };

    int length = number(context_len);
    const int readable = min(slots.readable(context_len), slots.most);
    if (split * (WARPS * KEYS) < readable) {  // before the length is known
        slots.look_up(first_key(split), readable);
        load_keys();
        load_values();
    }
    unsigned q_b[OF_KEY][2];
    const unsigned* q_lane =
        reinterpret_cast<const unsigned*>(q) + ((head + r % 4) * VECTORS + t) * 4 + r / 4;
    #pragma unroll
    for (int i = 0; i < OF_KEY; ++i)
        #pragma unroll
        for (int n = 0; n < 2; ++n) q_b[i][n] = r % 4 < G ? q_lane[16 * i + 2 * n] : 0;
    expect(counter);
    length = min(length, slots.most);
    const int tiles = (length + WARPS * KEYS - 1) / (WARPS * KEYS);
    const int used = max(1, min(splits, tiles));  // an empty context takes one, to store zeros
    if (split >= used) return;
    if (first_key(split) + KEYS > length) {  // what lies past the context may be NaN
        #pragma unroll
        for (int n = 0; n < 4; ++n)
            #pragma unroll
            for (int i = 0; i < OF_VALUE; ++i)
                if (first_key(split) + of_value(n) >= length) value[n][i] = uint4{};
    }

    float m[2] = {-1e30f, -1e30f}, l[2] = {}, acc[4 * OF_VALUE][4] = {};
    #pragma unroll 1
    for (int tile = split; tile < tiles; tile += splits) {
        const bool more = tile + splits < tiles;
        float c[2][4] = {};
        #pragma unroll
        for (int i = 0; i < OF_KEY; ++i)
            #pragma unroll
            for (int n = 0; n < 2; ++n)
                mma(T{}, c[n], key[n][i].x, key[n][i].y, key[n][i].z, key[n][i].w, q_b[i][0],
                    q_b[i][1]);
        if (more) {
            slots.look_up(first_key(tile + splits), length);
            load_keys();
        }
        float p[2], alpha[2];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            float score = (low ? c[0][j] : c[1][2 + j]) +
                __shfl_xor_sync(~0u, low ? c[1][j] : c[0][2 + j], 2);
            const bool inside = first_key(tile) + r + (low ? 0 : 8) < length;
            score = inside ? score * scale : -CUDART_INF_F;
            float top = fmaxf(m[j], score);
            #pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
            alpha[j] = exp2f(m[j] - top);
            p[j] = exp2f(score - top);
            m[j] = top;
            l[j] = fmaf(l[j], alpha[j], p[j]);
        }
        if (tile != split) {  // before, acc is zero: short contexts need not fetch this code
            #pragma unroll
            for (int x = 0; x < 4 * OF_VALUE; ++x)
                #pragma unroll
                for (int j = 0; j < 4; ++j) acc[x][j] *= alpha[j % 2];
        }
        const unsigned p_b = transposed(pair(T{}, p[0], p[1]));
        #pragma unroll
        for (int x = 0; x < 4 * OF_VALUE; ++x) {
            unsigned a[4];
            #pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int d = x + n % 2 * 4 * OF_VALUE, w = d % 8 / 2;  // a column, and its word
                a[n] = __byte_perm(word(value[n / 2 * 2][d / 8], w),
                                   word(value[n / 2 * 2 + 1][d / 8], w), d % 2 ? 0x7632 : 0x5410);
            }
            mma(T{}, acc[x], a[0], a[1], a[2], a[3], r < 4 ? p_b : 0, r < 4 ? 0 : p_b);
        }
        if (more) load_values();
    }

    __shared__ float2 state_s[G * TEAMS];
    __shared__ alignas(16) float acc_s[TEAMS * G * D];
    #pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
        #pragma unroll
        for (int j = 0; j < 2; ++j) l[j] += __shfl_xor_sync(~0u, l[j], offset);
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int g = t % 2 * 2 + j, at = g * TEAMS + warp * 2 + t / 2;
        if (g < G) {
            if (r == 0) state_s[at] = float2{m[j], l[j]};
            #pragma unroll
            for (int d = 0; d < 8 * OF_VALUE; d += 4) {
                const int x = d % (4 * OF_VALUE), y = d / (4 * OF_VALUE) * 2 + j;
                *reinterpret_cast<float4*>(acc_s + at * D + (r + d / 8 * 8) * 8 + d % 8) =
                    make_float4(acc[x][y], acc[x + 1][y], acc[x + 2][y], acc[x + 3][y]);
            }
        }
    }
    finish<T, D, G, WARPS, TEAMS>(
        state_s, acc_s, o + head * D, partial + head * splits * D, lse + head * splits, counter,
        split, splits, used);
}

template <typename T, int D, int G, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
kernel(
    const T* q, const T* k, const T* v, const int* context_lens, T* o, float* partial, float2* lse,
    int* counters, float scale, int S) {
    attend<T, D, G, WARPS>(
        q, k, v, context_lens + blockIdx.z, o, partial, lse, counters, scale,
        Contiguous{(int)blockIdx.z * S, S});
}
"""
)

SOURCES = {"w": RING, "r": REGISTERS, "t": TENSOR}
# (text, splits merged at once, warps, ...): w has loads and stages, r loads and blocks per SM that
# registers must leave room for, t those blocks.
SHAPES = (
    ("w", 8, 4, 4, 2), ("w", 8, 8, 4, 2),
    ("r", 8, 4, 4, 4), ("r", 8, 8, 4, 2), ("r", 8, 8, 2, 3), ("r", 16, 8, 2, 2), ("r", 8, 4, 8, 3),
    ("r", 8, 16, 2, 1),
    ("t", 8, 4, 4), ("t", 8, 4, 3), ("t", 8, 8, 2), ("t", 16, 8, 2), ("t", 4, 8, 2), ("t", 8, 16, 1),
)  # fmt: skip
TRITON = ((8, 4),)  # (warps, unroll) of rung 4
SIZES = {  # splits of the variants, splits of rung 4
    (1, 512): ((4, 8, 16), (16,)),
    (1, 2048): ((8, 16, 32), (16,)),
    (1, 8192): ((16, 33), (33,)),
    (1, 32768): ((16, 33, 66), (33,)),
    (32, 4096): ((1, 2, 3), (1,)),
}


def variant_kernel(shape):
    kind, merged, *rest = shape
    text = f"#define MERGED {merged}\n" + SOURCES[kind]
    name = f"kernel<__nv_bfloat16, 128, 2, {', '.join(map(str, rest))}>"
    return lab.cuda_kernel(text, name, options={"use_fast_math": True})


KERNELS = {shape: variant_kernel(shape) for shape in SHAPES}


def variant(shape, q, k, splits):
    """A function of q, k, v and context_lens with memory of its own, for these shapes."""
    kind, _, warps, *rest = shape
    (B, H, D), (S, H_kv) = q.shape, k.shape[1:3]
    ring = rest[1] * 2 * rest[0] * warps * 512 if kind == "w" else 0
    run = KERNELS[shape].configure((H_kv, splits, B), warps * 32, ring)
    scale, out = np.float32(D**-0.5 * da.LOG2_E), torch.empty_like(q)
    partial = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    m_and_l = torch.empty((B, H, splits, 2), dtype=torch.float32, device=q.device)
    counters = torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)

    def call(q, k, v, n):
        run(q, k, v, n, out, partial, m_and_l, counters, scale, np.int32(S))
        return out

    return call


def triton_variant(shape, q, k, splits):
    warps, unroll = shape
    (B, H, D), (S, H_kv) = q.shape, k.shape[1:3]
    out, counters = torch.empty_like(q), torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)
    workspace = da.new_workspace(q, H_kv, splits, counters)

    def call(q, k, v, n):
        da.decode_attention_fused_kernel[(H_kv, splits, B)](
            q, k, v, n, out, *workspace, D**-0.5 * da.LOG2_E, S, splits, H_KV=H_kv, G=H // H_kv,
            D=D, BLOCK_D=D, LEAST=16, UNROLL=unroll, ROWS=da.rows(D, q.itemsize, warps),
            MERGE_UNROLL=da.MERGE_UNROLL, MERGE_ROWS=da.rows(D, 4, warps), num_warps=warps,
        )  # fmt: skip
        return out

    return call


def fixed(fn, q, k):
    """A rung with an output and a workspace."""
    out, workspace = torch.empty_like(q), da.decode_attention_workspace(q, k)
    return lambda *args: fn(*args, out=out, workspace=workspace)


# Checks ----------------------------------------------------------------------------------------


def check_one(name: str, dtype: str) -> None:
    """In a process of its own: one verdict, one line."""
    import labkit.lens

    def off(*_, **__):
        raise RuntimeError("races were looked at without a GPU")

    labkit.lens.lens = off
    rung = da.LADDER.rung(name)
    try:
        verdict = lab.check(lab.Rung(rung.fn, rung.kind, dtypes=(DTYPES[dtype],)), P)
        print(f"{verdict.state} {name} {dtype} worst {verdict.worst:.2f}")
    except lab.CheckFailed as failure:
        print(f"🔴 {name} {dtype}:", " | ".join(str(failure).splitlines()[:4])[:400])
    except Exception:
        print(f"💥 {name} {dtype}:", " | ".join(traceback.format_exc().splitlines()[-3:])[:400])


def edges(shape) -> str | None:
    """Lengths at the edges of tiles, NaN after them, 1 to 9 splits, three launches of each."""
    lens = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1500, 1024, 777)
    q, k, v, n = P.inputs(torch.bfloat16, seed=1, B=len(lens), S=1501, **MODEL)
    n.copy_(torch.tensor(lens))
    truth = da.reference(q.double(), k.double(), v.double(), n)
    past = torch.arange(k.shape[1], device=k.device) >= n[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], float("nan")) for x in (k, v))
    allowed = 2**-7 * truth.abs().amax(dim=(1, 2)).clamp(min=1e-5)
    for splits in (1, 2, 9):
        call, first = variant(shape, q, k, splits), None
        for _ in range(3):
            o = call(q, k, v, n).clone()
            error = (o.double() - truth).abs().amax(dim=(1, 2))
            if not bool((error <= allowed).all()):
                wrong = [lens[i] for i in (~(error <= allowed)).nonzero().flatten().tolist()]
                return f"{splits} splits, wrong for contexts of {wrong}"
            if first is not None and not torch.equal(o, first):
                return f"{splits} splits, other bits in another launch"
            first = o
    return None


def exactness(shape) -> str:
    """The error over what is allowed, ragged and full."""
    found = []
    for size in ({"B": 3, "S": 3000, "ragged": 1}, {"B": 1, "S": 700}):
        q, k, *_ = P.inputs(torch.bfloat16, **size, **MODEL)
        call = variant(shape, q, k, 5)
        found.append(f"{error_over_allowed(call, P, torch.bfloat16, **size, **MODEL):.2f}")
    return " and ".join(found)


def warm(job) -> tuple | None:
    """Compiled and checked; the reason if it cannot be used."""
    make, shape = job
    try:
        q, k, v, n = P.inputs(torch.bfloat16, B=1, S=512, **MODEL)
        make(shape, q, k, 8)(q, k, v, n)
        torch.cuda.synchronize()
    except Exception as why:
        return shape, f"{type(why).__name__} {str(why).splitlines()[0][:90]}"


def graph_holds() -> str:
    """Capture with out and workspace, change inputs and lengths, replay three times."""
    args = P.inputs(torch.bfloat16, seed=1, B=3, S=3000, ragged=1, **MODEL)
    out, ws = torch.empty_like(args[0]), da.decode_attention_workspace(*args[:2])
    da.decode_attention(*args, out=out, workspace=ws)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        da.decode_attention(*args, out=out, workspace=ws)
    for seed in (2, 3, 4):
        fresh = P.inputs(torch.bfloat16, seed=seed, B=3, S=3000, ragged=1, **MODEL)
        for old, new in zip(args, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(out, da.decode_attention(*fresh)):
            return f"🔴 replay with seed {seed} differs from a call"
    return "🟢 replays equal calls" if not ws.counters.any() else "🔴 counters are not zero"


def guarded(what, fn) -> None:
    try:
        print(what, fn(), flush=True)
    except Exception:
        print("💥", what, " | ".join(traceback.format_exc().splitlines()[-3:])[:400], flush=True)


# Times -----------------------------------------------------------------------------------------


def time_size(B, S, plans, shapes, triton_shapes) -> None:
    args = P.inputs(torch.bfloat16, B=B, S=S, **MODEL)
    q, k, v, n = args
    none = torch.zeros_like(n)
    functions = {
        "SDPA, full": da.full_sdpa,
        "op": fixed(da.decode_attention, q, k),
        "op, no keys": lambda q, k, v, n, op=fixed(da.decode_attention, q, k): op(q, k, v, none),
        "rung 4": fixed(da.decode_attention_fused, q, k),
    }
    keep, truth, bad = list(functions), da.full_sdpa(*args).float(), []
    jobs = [(variant, s, x) for s in shapes for x in plans[0]]
    jobs += [(triton_variant, s, x) for s in triton_shapes for x in plans[1]]
    for make, shape, splits in jobs:
        try:
            call = make(shape, q, k, splits)
            if (call(*args).float() - truth).abs().max() > 0.02 * truth.abs().max():
                bad.append((splits, *shape))
            functions[splits, *shape] = call
        except Exception as why:
            bad.append((splits, *shape, type(why).__name__))
    calls = {name: lambda fn=fn: fn(*args) for name, fn in functions.items()}
    first = {name: statistics.median(t) for name, t in interleaved(calls, 11).items()}
    ranked = sorted((x for x in first if not isinstance(x, str)), key=first.get)
    for kind, count in (("w", 1), ("r", 3), ("t", 3)):
        keep += [x for x in ranked if x[1] == kind][:count]
    keep += [x for x in ranked if x[1] not in SOURCES][:1]
    best = next((x for x in ranked if x[1] in SOURCES), None)
    if best:
        call = functions[best]
        functions["best, no keys"] = lambda q, k, v, n: call(q, k, v, none)
        calls["best, no keys"] = lambda: call(q, k, v, none)
        keep.insert(3, "best, no keys")
    cold = interleaved({x: calls[x] for x in keep}, 50)
    work = P.work(torch.bfloat16, B=B, S=S, **MODEL)
    try:
        graph = _in_graphs({x: functions[x] for x in keep}, args, work, 12)
    except Exception:
        print("💥 graphs:", " | ".join(traceback.format_exc().splitlines()[-3:])[:400])
        graph = {x: [float("nan")] for x in keep}
    cold, graph = ({x: statistics.median(t) for x, t in ts.items()} for ts in (cold, graph))
    read = ceilings()["read_bytes_per_s"]
    late = f"; wrong: {len(bad)}, {bad[:3]}" if bad else ""
    print(
        f"-- B={B} S={S}: µs, of SDPA, of read: cold | in a graph; {time.time() - START:.0f} s{late}"
    )
    for x in keep:
        line = (
            f"{t[x] * 1e6:7.2f} {t[x] / t['SDPA, full']:5.2f} {work.bytes / t[x] / read:5.0%}"
            for t in (cold, graph)
        )
        print(f"  {x!s:26} {' | '.join(line)}", flush=True)


def stop() -> None:
    print("⏱ stopped", flush=True)
    os._exit(1)


def main() -> None:
    watch = threading.Timer(LIMIT + 3, stop)
    watch.daemon = True
    watch.start()
    jobs = [
        (r.name, d, subprocess.Popen([sys.executable, __file__, "check", r.name, d],
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        for r in reversed(da.LADDER.rungs[-2:]) for d in DTYPES
    ]  # fmt: skip
    guarded("graph:", graph_holds)
    todo = [(variant, s) for s in SHAPES] + [(triton_variant, s) for s in TRITON]
    with ThreadPoolExecutor(6) as pool:
        failed = dict(w for w in pool.map(warm, todo) if w)
    for shape in SHAPES:
        if shape not in failed:
            try:
                if wrong := edges(shape):
                    failed[shape] = wrong
            except Exception as why:
                failed[shape] = f"{type(why).__name__} {str(why).splitlines()[0][:90]}"
    for shape, why in failed.items():
        print("left out:", shape, why)
    for kind in SOURCES:
        shape = next((s for s in SHAPES if s[0] == kind and s not in failed), None)
        if shape:
            guarded(f"{shape}: error over allowed", lambda shape=shape: exactness(shape))
    for name, dtype, job in jobs:
        try:
            print(job.communicate(timeout=max(1, CHECKS_END - (time.time() - START)))[0].strip())
        except subprocess.TimeoutExpired:
            job.kill()
            print(f"⏱ {name} {dtype}: stopped")
    print(f"{lab.DEVICE.name}, read {ceilings()['read_bytes_per_s'] / 1e12:.2f} TB/s,"
          f" {time.time() - START:.0f} s; splits, text, merged at once, warps, ...", flush=True)  # fmt: skip
    for (B, S), plans in SIZES.items():
        if LIMIT - (time.time() - START) < 8:
            print("out of time")
            break
        try:
            usable = [s for s in SHAPES if s not in failed], [s for s in TRITON if s not in failed]
            time_size(B, S, plans, *usable)
        except Exception:
            print("💥", B, S, " | ".join(traceback.format_exc().splitlines()[-3:])[:400])
        torch.cuda.empty_cache()
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    check_one(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
