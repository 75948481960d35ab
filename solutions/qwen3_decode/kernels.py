"""The kernels of one decode step: a token of Qwen3 at batch 1, five launches a layer and the head.

    norm_gemv       y = W · norm(x)                         x is the token's embedding in layer 0
    attention       o = attention(rope(norm(q)), K, V)      writes the new row of K and V
    gemv_residual   x = x + W · h                           the o and the down projection
    norm_gate_up    y = silu(G · h) · (U · h), h = norm(x)
    norm_head       logits = W · norm(x), and the next token: the largest of them

The functions below check their arguments and return a `Launch`; nothing is launched, allocated or
copied by them. The memory is the caller's, and the same in every step.

Rounding. What Transformers writes to memory is rounded to bfloat16 here too: norm(x) before the
gain and after it, every projection, q and k after norm, after each product of the rotation and
after its sum, o, silu(gate), silu(gate) · up, both residual sums, and the logits. Attention's
weights are, too: the tensor cores take them so, as in SDPA. Sums and softmax stay in float32.

Dependent launch. With `programmatic`, a kernel starts while the ones before it still work. So each
asks for its weights first, or for the older keys and values, then waits for the kernel before it,
then reads what that one wrote. No kernel ends before it has waited, and none writes before: so
whoever has seen its predecessor end comes after all kernels before that. Before its wait, a kernel
reads only what none of those still at work may write: weights, gains and the rotation's table, and
in attention the position and the older rows of K and V. Those are of the step before, which has
ended: the first kernel of a step lets the next one start only when it has waited itself. So does
the head; all others do at once. Below sm_90 nothing of this exists, and the order of loads stays
the same.

Shapes   x [hidden], qkv [(H + 2·H_kv)·D], o [H·D], y [intermediate], logits [V]: one token
         weights [out, in]; k_cache, v_cache [S, H_kv, D]; cos_sin [S, D] float32, as in chapter 04
         tokens [S + 1] int32: the token at each position; position [1] int32: that of this step
Cost     every weight once, and K and V up to the position
Source   Programmatic dependent launch: CUDA C++ Programming Guide 13
"""

from __future__ import annotations

import labkit as lab

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from solutions import decode_attention

from .config import ModelError

WARP = 32
PACK = 8  # bfloat16 numbers in 16 bytes, the widest load a thread can issue
PIECE = WARP * PACK  # columns of a row for which a warp needs one load
WARPS = 8  # of a block, in all kernels but the head
# Rows of W in a warp. Its registers hold all of them before the wait, and beside the blocks of one
# kernel, one of the next must fit into an SM's 65,536 registers, or its loads come late: hence
# these, and the limits of __launch_bounds__ and __maxnreg__ below. Fewer warps also norm x fewer
# times.
QKV_ROWS, PAIRS, HEAD_ROWS = 4, 3, 2
HEAD_WARPS = 12  # one block an SM, two rows under way and two in use in each warp
MOST_PACKS = 4  # loads a row in a lane: with more, that many rows do not fit in registers
# Warps that share a row of the o and the down projection: the first number that fits.
SHARES = (2, 4, 8, 1)
SHARE_PACKS = 6  # loads a row in a lane there
STAGES = 2  # of attention's ring: tiles that are used or on their way
MOST_SPLITS = 16  # blocks that share a context: with 8 kv heads, one for nearly every SM of an H200
HEAD_SIZES, GROUPS = (64, 128), (1, 2)  # a warp norms as many heads of 128 at once
LOG2_E = math.log2(math.e)  # exp(x) = 2^(x · log2 e), and the hardware has 2^x only

SOURCE = (
    decode_attention.CONSTANTS
    + decode_attention.TENSOR_CORES
    + r"""
typedef __nv_bfloat16 bf16;

// What comes before this runs while the kernel before still works, and may read nothing that one
// writes; what comes after sees all of it. EARLY: the next kernel may start at once, or else when
// this one has waited.
template <bool EARLY> __device__ void previous_kernel() {
#if __CUDA_ARCH__ >= 900
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    __syncwarp();  // on any chip, the compiler moves no load past this
}

// 16 bytes that are used once, so they take no room in L1. Not ld.global.nc: the assembler moves
// such loads down, behind the wait. These stay where they are.
__device__ uint4 stream(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ float rounded(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

// A bfloat16 is the upper half of the same float32: a shift or a mask converts it.
__device__ void unpack(uint4 from, float (&v)[8]) {
    const unsigned word[4] = {from.x, from.y, from.z, from.w};
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(word[i] << 16);
        v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}

// Of numbers that are rounded already.
__device__ uint4 pack(const float (&v)[8]) {
    unsigned word[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        word[i] = __float_as_uint(v[2 * i]) >> 16 | __float_as_uint(v[2 * i + 1]);
    return {word[0], word[1], word[2], word[3]};
}

__device__ float dot(uint4 a, const float (&x)[8], float sum) {
    float v[8];
    unpack(a, v);
    #pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[i], x[i], sum);
    return sum;
}

__device__ uint4 choose(bool first, uint4 a, uint4 b) {
    return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// The sum over LANES neighbouring lanes, in all of them.
template <int LANES> __device__ float sum_over(float v) {
    #pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// Arithmetic of bfloat16 pairs rounds each result, which is what norm and rotation want.
__device__ unsigned bits(__nv_bfloat162 v) { return reinterpret_cast<const unsigned&>(v); }
__device__ __nv_bfloat162 pair(unsigned v) { return reinterpret_cast<const __nv_bfloat162&>(v); }
__device__ unsigned product(unsigned a, unsigned b) { return bits(__hmul2_rn(pair(a), pair(b))); }
__device__ unsigned total(unsigned a, unsigned b) { return bits(__hadd2_rn(pair(a), pair(b))); }
__device__ uint4 rounded_pairs(const float (&v)[8]) {
    return {bits(__floats2bfloat162_rn(v[0], v[1])), bits(__floats2bfloat162_rn(v[2], v[3])),
            bits(__floats2bfloat162_rn(v[4], v[5])), bits(__floats2bfloat162_rn(v[6], v[7]))};
}

// RMSNorm rounds twice: x / rms, and the product with the gain.
__device__ uint4 normed(uint4 x, uint4 gain, float rstd) {
    float v[8];
    unpack(x, v);
    #pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= rstd;
    const uint4 h = rounded_pairs(v);
    return {product(h.x, gain.x), product(h.y, gain.y), product(h.z, gain.z),
            product(h.w, gain.w)};
}

// 1 / rms of a row of which a lane has PACKS packs.
template <int PACKS, int LANES> __device__ float rstd_of(const uint4 (&x)[PACKS], float eps) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        float v[8];
        unpack(x[i], v);
        sum = dot(x[i], v, sum);
    }
    return rsqrtf(sum_over<LANES>(sum) / (8 * PACKS * LANES) + eps);
}

// What a lane has of a row: packs lane, lane + 32, ... of it.
template <int PACKS> __device__ void load_row(uint4 (&x)[PACKS], const uint4* row, int lane) {
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) x[i] = row[lane + 32 * i];
}
// The same of ROWS rows of w from `row` on. Past the last, that one is read again.
template <int ROWS, int PACKS>
__device__ void stream_rows(uint4 (&a)[ROWS][PACKS], const uint4* w, int row, int N, int lane) {
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int i = 0; i < PACKS; ++i)
            a[r][i] = stream(w + (long long)min(row + r, N - 1) * (32 * PACKS) + lane + 32 * i);
}

// Number `lane` of N that all lanes know.
template <int N> __device__ float own(const float (&v)[N], int lane) {
    float mine = v[0];
    #pragma unroll
    for (int i = 1; i < N; ++i) mine = lane == i ? v[i] : mine;
    return mine;
}

// A warp computes ROWS numbers of y = W · norm(x). Each warp norms x for itself: that takes less
// time than a barrier. EMBED: x is a row of the embedding, and is kept for the residual sum.
template <int ROWS, int PACKS, bool EMBED, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 2) norm_gemv_kernel(
    uint4* x, const uint4* gain, const uint4* w, bf16* y, int N, float eps, const uint4* embed,
    const int* tokens, const int* position) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = (blockIdx.x * WARPS + warp) * ROWS;
    uint4 a[ROWS][PACKS], g[PACKS], b[PACKS];
    stream_rows(a, w, row, N, lane);
    load_row(g, gain, lane);
    previous_kernel<!EMBED>();
    load_row(b, EMBED ? embed + (long long)tokens[*position] * (32 * PACKS) : x, lane);
    if (EMBED && blockIdx.x == 0 && warp == 0)
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) x[lane + 32 * i] = b[i];
    const float rstd = rstd_of<PACKS, 32>(b, eps);
    float sum[ROWS] = {};
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        float h[8];
        unpack(normed(b[i], g[i], rstd), h);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = dot(a[r][i], h, sum[r]);
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] = sum_over<32>(sum[r]);
    if (lane < ROWS && row + lane < N) y[row + lane] = bf16(own(sum, lane));
}

// The same for PAIRS rows of the gate, and as many of up, which begin at row N of w.
template <int PAIRS, int PACKS, int WARPS>
__global__ void __maxnreg__(160) norm_gate_up_kernel(
    const uint4* x, const uint4* gain, const uint4* w, bf16* y, int N, float eps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = (blockIdx.x * WARPS + warp) * PAIRS;
    uint4 a[PAIRS][PACKS], b[PAIRS][PACKS], g[PACKS], v[PACKS];
    stream_rows(a, w, row, N, lane);
    stream_rows(b, w + (long long)N * (32 * PACKS), row, N, lane);
    load_row(g, gain, lane);
    previous_kernel<true>();
    load_row(v, x, lane);
    const float rstd = rstd_of<PACKS, 32>(v, eps);
    float gate[PAIRS] = {}, up[PAIRS] = {};
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        float h[8];
        unpack(normed(v[i], g[i], rstd), h);
        #pragma unroll
        for (int r = 0; r < PAIRS; ++r) {
            gate[r] = dot(a[r][i], h, gate[r]);
            up[r] = dot(b[r][i], h, up[r]);
        }
    }
    #pragma unroll
    for (int r = 0; r < PAIRS; ++r) {
        gate[r] = sum_over<32>(gate[r]);
        up[r] = sum_over<32>(up[r]);
    }
    if (lane < PAIRS && row + lane < N) {
        const float z = rounded(own(gate, lane));
        y[row + lane] = bf16(rounded(z / (1 + expf(-z))) * rounded(own(up, lane)));
    }
}

// SHARE warps compute x[row] + w[row] · h, and put it in the place of x[row].
template <int PACKS, int SHARE, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 2) gemv_residual_kernel(
    const uint4* h, const uint4* w, bf16* x) {
    constexpr int ROWS = WARPS / SHARE, STEP = 32 * SHARE;
    __shared__ float part_s[WARPS];
    const int tx = threadIdx.x, column = tx % STEP, first_row = blockIdx.x * ROWS;
    const long long row = first_row + tx / STEP;
    uint4 a[PACKS], b[PACKS];
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) a[i] = stream(w + row * (STEP * PACKS) + column + i * STEP);
    previous_kernel<true>();
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) b[i] = h[column + i * STEP];
    const float before = __bfloat162float(x[first_row + tx % ROWS]);
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        float v[8];
        unpack(b[i], v);
        sum = dot(a[i], v, sum);
    }
    sum = sum_over<32>(sum);
    if (tx % 32 == 0) part_s[tx / 32] = sum;
    __syncthreads();
    if (tx < ROWS) {
        float total = 0;
        #pragma unroll
        for (int i = 0; i < SHARE; ++i) total += part_s[tx * SHARE + i];
        x[first_row + tx] = bf16(before + rounded(total));
    }
}

// Norm and rotation of a head, of which each of LANES lanes has 8 columns. Column i turns with
// i + D/2, which half as many lanes away has. `sine` is negative in the lower half.
template <int LANES>
__device__ uint4 norm_rope(uint4 x, uint4 gain, uint4 cosine, uint4 sine, float eps) {
    const uint4 row[1] = {x}, h = normed(x, gain, rstd_of<1, LANES>(row, eps));
    auto turned = [&](unsigned h, unsigned c, unsigned s) {
        return total(product(h, c), product(__shfl_xor_sync(~0u, h, LANES / 2), s));
    };
    return {turned(h.x, cosine.x, sine.x), turned(h.y, cosine.y, sine.y),
            turned(h.z, cosine.z, sine.z), turned(h.w, cosine.w, sine.w)};
}

// Block (head, split) attends for the G query heads of a kv head: to tile `split` of the context
// and to every `used`-th after it, as chapter 10's last kernel does. A warp has KEYS keys of each.
// Those before the position are on their way from the cache before the kernel before has finished;
// the key at the position comes from that kernel, and the warp that has it puts it into the cache.
template <int D, int G, int STAGES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) attention_kernel(
    const uint4* qkv, const uint4* q_gain, const uint4* k_gain, const float* cos_sin,
    const int* position, uint4* k_cache, uint4* v_cache, bf16* o, unsigned* parts, float scale,
    float eps) {
    constexpr int PACKS = D / 8, COPIES = KEYS * PACKS / 32, TILE = KEYS * PACKS;
    __shared__ uint4 q_s[WARPS][G][PACKS];
    extern __shared__ uint4 ring_packs[];
    const int head = blockIdx.x, heads = gridDim.x, split = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pack = lane % PACKS;
    uint4* ring_s = ring_packs + warp * (STAGES * 2 * TILE);
    const int pos = __ldcg(position);  // written by the last kernel of the step before
    const int tiles = pos / (WARPS * KEYS) + 1, used = min((int)gridDim.y, tiles);
    if (split >= used) return;  // block 0 of each head stays, and waits: so the kernel does

    auto first_key = [&](int tile) { return (tile * WARPS + warp) * KEYS; };  // of the warp
    auto ask = [&](int tile, int stage) {
        const int first = first_key(tile), last = pos - 1 - first;
        if (last >= 0)
            #pragma unroll
            for (int u = 0; u < COPIES; ++u) {
                const int key = (32 * u + lane) / PACKS;
                // Past the end, the last key once more.
                const long long row = (long long)(first + min(key, last)) * heads + head;
                uint4* to = ring_s + stage * 2 * TILE + place<D>(key, pack);
                __pipeline_memcpy_async(to, k_cache + row * PACKS + pack, 16);
                __pipeline_memcpy_async(to + TILE, v_cache + row * PACKS + pack, 16);
            }
        __pipeline_commit();
    };
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) ask(split + i * used, i);
    const uint4 q_gains = q_gain[pack], k_gains = k_gain[pack];
    alignas(16) float turn[2][8];  // cosines and sines
    #pragma unroll
    for (int j = 0; j < 4; ++j)
        reinterpret_cast<float4*>(turn)[j] = reinterpret_cast<const float4*>(
            cos_sin + (long long)pos * D + j / 2 * (D / 2) + pack % (PACKS / 2) * 8)[j % 2];
    previous_kernel<true>();

    const int mine = min(lane / PACKS, G - 1);  // a head of the group
    const uint4 q_raw = qkv[(head * G + mine) * PACKS + pack];
    const uint4 k_raw = qkv[(heads * G + head) * PACKS + pack];
    const uint4 v_new = qkv[(heads * (G + 1) + head) * PACKS + pack];
    __syncwarp();  // all loads go out before the arithmetic
    #pragma unroll
    for (int j = 0; j < 8; ++j) turn[1][j] = pack < PACKS / 2 ? -turn[1][j] : turn[1][j];
    const uint4 cosine = rounded_pairs(turn[0]), sine = rounded_pairs(turn[1]);
    q_s[warp][mine][pack] = norm_rope<PACKS>(q_raw, q_gains, cosine, sine, eps);
    const uint4 k_new = norm_rope<PACKS>(k_raw, k_gains, cosine, sine, eps);
    __syncwarp();
    Heads<bf16, D> state;
    #pragma unroll
    for (int i = 0; i < PACKS; ++i)
        state.query[i] = lane / 4 < G ? reinterpret_cast<const unsigned*>(
                                            &q_s[warp][lane / 4][i])[lane % 4] : 0;

    int stage = 0;
    #pragma unroll 1
    for (int tile = split; tile < tiles; tile += used) {
        __syncwarp();  // all lanes have read the stage that is filled next
        ask(tile + (STAGES - 1) * used, stage == 0 ? STAGES - 1 : stage - 1);
        __pipeline_wait_prior(STAGES - 1);
        __syncwarp();  // what the other lanes have copied is there
        uint4 *keys = ring_s + stage * 2 * TILE, *values = keys + TILE;
        const int count = pos + 1 - first_key(tile);
        if (count <= KEYS) {
            if (count > 0 && lane < PACKS) {
                keys[place<D>(count - 1, lane)] = k_new;
                values[place<D>(count - 1, lane)] = v_new;
                const long long row = (long long)pos * heads + head;
                k_cache[row * PACKS + lane] = k_new;
                v_cache[row * PACKS + lane] = v_new;
            }
            #pragma unroll
            for (int u = 0; u < COPIES; ++u) {  // 0 times what happens to be there could be NaN
                const int key = (32 * u + lane) / PACKS;
                if (key >= count) values[place<D>(key, pack)] = uint4{};
            }
            __syncwarp();
        }
        state.attend(keys, values, count, scale);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __syncwarp();
    state.template finish<WARPS, STAGES * TILE * 8>(
        o + head * G * D, reinterpret_cast<float*>(ring_packs),
        parts + head * gridDim.y * G * (D + 1), G, split, used);
}

// A key that orders rows by their logit, and of equal ones the first row before the others, as
// torch.argmax does. The sum with 0 makes -0 and 0 equal. No key is 0.
__device__ unsigned long long rank_of(float logit, int row) {
    const unsigned bits = __float_as_uint(logit + 0.0f);
    const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (unsigned long long)ordered << 32 | ~(unsigned)row;
}

// A warp computes logits of ROWS rows at a time, and has the next ones on their way meanwhile. The
// last block to finish writes the next token and goes to the next position.
template <int ROWS, int PACKS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) norm_head_kernel(
    const uint4* x, const uint4* gain, const uint4* w, bf16* logits, int N, float eps,
    unsigned long long* best, unsigned* counter, int* tokens, int* position) {
    __shared__ unsigned long long best_s[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * WARPS * ROWS;
    int row = (blockIdx.x * WARPS + warp) * ROWS;
    uint4 even[ROWS][PACKS], odd[ROWS][PACKS], g[PACKS], b[PACKS];
    stream_rows(even, w, row, N, lane);
    if (row + step < N) stream_rows(odd, w, row + step, N, lane);
    load_row(g, gain, lane);
    previous_kernel<false>();
    load_row(b, x, lane);
    const float rstd = rstd_of<PACKS, 32>(b, eps);
    float h[PACKS][8];
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) unpack(normed(b[i], g[i], rstd), h[i]);

    unsigned long long top = 0;
    auto turn = [&](uint4 (&a)[ROWS][PACKS]) {
        float sum[ROWS] = {};
        #pragma unroll
        for (int i = 0; i < PACKS; ++i)
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = dot(a[r][i], h[i], sum[r]);
        // There is room for the rows after the next ones. Those are on their way.
        if (row + 2 * step < N) stream_rows(a, w, row + 2 * step, N, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {  // a row read twice is the same row twice
            sum[r] = rounded(sum_over<32>(sum[r]));
            top = max(top, rank_of(sum[r], min(row + r, N - 1)));
        }
        if (lane < ROWS && row + lane < N) logits[row + lane] = bf16(own(sum, lane));
        row += step;
    };
    #pragma unroll 1
    while (row < N) {
        turn(even);
        if (row < N) turn(odd);
    }
    if (lane == 0) best_s[warp] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        #pragma unroll
        for (int i = 1; i < WARPS; ++i) top = max(top, best_s[i]);
        atomicMax(best, top);
        __threadfence();
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            const int following = *position + 1;
            tokens[following] = (int)~(unsigned)atomicExch(best, 0ull);  // 0 for the next step
            *position = following;
        }
    }
}
"""
)


@cache
def cuda_kernel(name: str, **options):
    """The instance `name` of a template in SOURCE; what is launched is compiled."""
    return lab.cuda_kernel(SOURCE, name, options=options)


class Launch(NamedTuple):
    """A kernel with all it needs: launched with the same memory again and again."""

    kernel: object
    grid: tuple[int, ...]
    block: int
    args: tuple
    shared: int = 0  # bytes

    def __call__(self, *, programmatic: bool = False) -> None:
        """Launch on torch's current stream; `programmatic`: it may start early. Needs a GPU."""
        self.kernel.configure(self.grid, self.block, self.shared, programmatic=programmatic)(
            *self.args
        )


def blocks(n: int, size: int) -> tuple[int]:
    """A grid of one dimension that covers n."""
    return (-(-n // size),)


def check(dtype: torch.dtype, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """TypeError or ValueError unless each tensor has the dtype, its shape, and whole vectors."""
    for name, (x, shape) in tensors.items():
        lab.check_tensors(dtypes=(dtype,), **{name: x})
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be {shape}")
        lab.check_contiguous(**{name: x})
        if x.data_ptr() % 16:
            raise ValueError(f"{name} begins at {x.data_ptr():#x}, must be at a multiple of 16")


def packs_of(name: str, K: int) -> int:
    """Loads that a lane needs for a row of K columns. ModelError if a warp cannot hold the row."""
    if K % PIECE or K > MOST_PACKS * PIECE:
        most = MOST_PACKS * PIECE
        raise ModelError(f"{name}={K}: the kernels take multiples of {PIECE} up to {most}")
    return K // PIECE


def shares_of(name: str, K: int) -> tuple[int, int]:
    """Warps that share a row of K columns, and loads of a lane. ModelError if there is no way."""
    pieces, rest = divmod(K, PIECE)
    for share in SHARES:
        if not rest and pieces % share == 0 and 0 < pieces // share <= SHARE_PACKS:
            return share, pieces // share
    raise ModelError(
        f"{name}={K}: the kernels take multiples of {PIECE} that 2, 4 or 8 warps share"
    )


def norm_gemv(
    x: Tensor,
    gain: Tensor,
    w: Tensor,
    y: Tensor,
    eps: float,
    embed: Tensor,
    tokens: Tensor,
    position: Tensor,
    *,
    first: bool,
) -> Launch:
    """y = W · norm(x). In the first layer, x becomes the embedding of tokens[position]."""
    K, N = x.numel(), y.numel()
    packs = packs_of("hidden_size", K)
    table = (embed, (len(embed), K))
    check(torch.bfloat16, x=(x, (K,)), gain=(gain, (K,)), w=(w, (N, K)), y=(y, (N,)), embed=table)
    check(torch.int32, tokens=(tokens, (tokens.numel(),)), position=(position, (1,)))
    name = f"norm_gemv_kernel<{QKV_ROWS}, {packs}, {str(first).lower()}, {WARPS}>"
    args = (x, gain, w, y, np.int32(N), np.float32(eps), embed, tokens, position)
    return Launch(cuda_kernel(name), blocks(N, WARPS * QKV_ROWS), WARPS * WARP, args)


def gemv_residual(h: Tensor, w: Tensor, x: Tensor, *, name: str) -> Launch:
    """x = x + W · h, in place. `name` is that of the size of h, for messages."""
    K, N = h.numel(), x.numel()
    check(torch.bfloat16, h=(h, (K,)), w=(w, (N, K)), x=(x, (N,)))
    share, packs = shares_of(name, K)
    if N % (WARPS // share):
        raise ValueError(f"{N=} must be a multiple of {WARPS // share}, the rows of a block")
    kernel = cuda_kernel(f"gemv_residual_kernel<{packs}, {share}, {WARPS}>")
    return Launch(kernel, blocks(N, WARPS // share), WARPS * WARP, (h, w, x))


def norm_gate_up(x: Tensor, gain: Tensor, w: Tensor, y: Tensor, eps: float) -> Launch:
    """y = silu(gate) · up of norm(x); w has the gate's rows before up's."""
    K, N = x.numel(), y.numel()
    packs = packs_of("hidden_size", K)
    check(torch.bfloat16, x=(x, (K,)), gain=(gain, (K,)), w=(w, (2 * N, K)), y=(y, (N,)))
    kernel = cuda_kernel(f"norm_gate_up_kernel<{PAIRS}, {packs}, {WARPS}>")
    args = (x, gain, w, y, np.int32(N), np.float32(eps))
    return Launch(kernel, blocks(N, WARPS * PAIRS), WARPS * WARP, args)


def new_parts(H: int, H_kv: int, D: int, device: torch.device) -> Tensor:
    """EMPTY slots, in which the blocks of an attention launch meet; all layers use them."""
    size = H_kv, MOST_SPLITS, H // H_kv * (D + 1)
    return torch.full(size, decode_attention.EMPTY, dtype=torch.int32, device=device)


def attention(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    cos_sin: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    o: Tensor,
    parts: Tensor,
    eps: float,
    sms: int,
) -> Launch:
    """Attention of one token up to `position`, with norm, rotation and the cache's new row.

    `sms` says how many blocks the chip runs at once.
    """
    S, H_kv, D = k_cache.shape
    H = o.numel() // D
    G = H // H_kv
    if D not in HEAD_SIZES or G not in GROUPS or G * H_kv != H:
        raise ModelError(
            f"head_dim={D}, {H} heads, {H_kv} kv heads: the kernels take head_dim of {HEAD_SIZES} "
            f"and groups of {GROUPS}"
        )
    rows = (k_cache, (S, H_kv, D)), (v_cache, (S, H_kv, D))
    check(torch.bfloat16, qkv=(qkv, ((H + 2 * H_kv) * D,)), o=(o, (H * D,)))
    check(torch.bfloat16, q_gain=(q_gain, (D,)), k_gain=(k_gain, (D,)))
    check(torch.bfloat16, k_cache=rows[0], v_cache=rows[1])
    check(torch.float32, cos_sin=(cos_sin, (len(cos_sin), D)))
    check(torch.int32, position=(position, (1,)))
    check(torch.int32, parts=(parts, (H_kv, MOST_SPLITS, G * (D + 1))))
    if len(cos_sin) < S:
        raise ValueError(f"cos_sin has {len(cos_sin)} rows, the cache {S} slots")
    row_bytes = D * k_cache.element_size()
    warps, keys = decode_attention.warps_for(row_bytes), decode_attention.KEYS
    splits = max(1, min(MOST_SPLITS, sms // H_kv, -(-S // (warps * keys))))
    # Fast maths: exp2 in one instruction, and no slow path for a division.
    name = f"attention_kernel<{D}, {G}, {STAGES}, {warps}>"
    kernel = cuda_kernel(name, use_fast_math=True)
    memory = (qkv, q_gain, k_gain, cos_sin, position, k_cache, v_cache, o, parts)
    args = (*memory, np.float32(D**-0.5 * LOG2_E), np.float32(eps))
    shared = decode_attention.ring_bytes(warps, STAGES, row_bytes)
    return Launch(kernel, (H_kv, splits), warps * WARP, args, shared)


def norm_head(
    x: Tensor,
    gain: Tensor,
    w: Tensor,
    logits: Tensor,
    eps: float,
    best: Tensor,
    counter: Tensor,
    tokens: Tensor,
    position: Tensor,
    sms: int,
) -> Launch:
    """logits = W · norm(x); the largest is the token at position + 1, and position moves there.

    `best` [1] int64 and `counter` [1] int32 are zeros, and left so. tokens must have room.
    """
    K, N = x.numel(), logits.numel()
    packs = packs_of("hidden_size", K)
    check(torch.bfloat16, x=(x, (K,)), gain=(gain, (K,)), w=(w, (N, K)), logits=(logits, (N,)))
    check(torch.int64, best=(best, (1,)))
    check(torch.int32, counter=(counter, (1,)), position=(position, (1,)))
    check(torch.int32, tokens=(tokens, (tokens.numel(),)))
    grid = (min(sms, *blocks(N, HEAD_WARPS * HEAD_ROWS)),)
    kernel = cuda_kernel(f"norm_head_kernel<{HEAD_ROWS}, {packs}, {HEAD_WARPS}>")
    args = (x, gain, w, logits, np.int32(N), np.float32(eps), best, counter, tokens, position)
    return Launch(kernel, grid, HEAD_WARPS * WARP, args)
