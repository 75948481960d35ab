"""Texts in the place of parts of kernels.py's: what `qwen3_step_candidates.py` is made of."""

from __future__ import annotations

from solutions._qwen3_decode import kernels

Edit = tuple[str, str]  # what is in the text once, and what takes its place


def text_of(edits: tuple[Edit, ...]) -> str:
    """SOURCE with these edits, the long ones first: short ones may fall inside."""
    text = kernels.SOURCE
    for old, new in sorted(edits, key=lambda e: -len(e[0])):
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times in the text: {old[:60]!r}")
        text = text.replace(old, new)
    return text


def between(first: str, last: str) -> str:
    """SOURCE from `first` up to `last`."""
    begin = kernels.SOURCE.index(first)
    return kernels.SOURCE[begin : kernels.SOURCE.index(last, begin)]


def after(line: str, more: str) -> Edit:
    """More text behind a line."""
    return line, line + more


def before(line: str, more: str) -> Edit:
    """More text ahead of a line."""
    return line, more + line


# Bfloat16 in pairs: the same bits -------------------------------------------------------------

NORMED = between("// RMSNorm rounds twice", "// 1 / rms of a row")
PAIRS_OF_BFLOAT16 = (
    NORMED,
    r"""
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
__device__ void normed(uint4 x, uint4 gain, float rstd, float (&h)[8]) {
    unpack(normed(x, gain, rstd), h);
}

""",
)
ROTATION_IN_PAIRS = (
    (
        between(
            "template <int LANES>\n__device__ void norm_rope(", "// Block (head, split) attends"
        ),
        r"""template <int LANES>
__device__ void norm_rope(uint4 x, uint4 gain, uint4 cosine, uint4 sine, float eps, float (&y)[8]) {
    const uint4 row[1] = {x}, p = normed(x, gain, rstd_of<1, LANES>(row, eps));
    auto turned = [&](unsigned h, unsigned c, unsigned s) {
        return total(product(h, c), product(__shfl_xor_sync(~0u, h, LANES / 2), s));
    };
    unpack(uint4{turned(p.x, cosine.x, sine.x), turned(p.y, cosine.y, sine.y),
                 turned(p.z, cosine.z, sine.z), turned(p.w, cosine.w, sine.w)}, y);
}

""",
    ),
    (
        between("    float cosine[8], sine[8];\n", "    previous_kernel();\n\n    uint4 q_raw"),
        r"""    float turn[2][8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float* row = cos_sin + (long long)pos * D + lane % (LANES / 2) * 8 + j;
        turn[0][j] = row[0];
        turn[1][j] = lane < LANES / 2 ? -row[D / 2] : row[D / 2];
    }
    const uint4 cosine = rounded_pairs(turn[0]), sine = rounded_pairs(turn[1]);
""",
    ),
)

# Products on the tensor cores -----------------------------------------------------------------

MMA = r"""
// c += a · b: a [16, 16] row by row, b [16, 8], c [16, 8]. Lane 4·r + t has of a rows r and r + 8,
// of b column r, at two neighbouring places from 2t and two from 2t + 8; of c, columns 2t, 2t + 1
// of rows r and r + 8. Where a and b are cut from rows of 16 bytes a lane, the places are others,
// the same in both: the sum does not mind.
__device__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                    unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""
TILES = (
    MMA
    + r"""
// Of TILES·16 rows of w from `row_of` on, the part of the columns that belongs to this warp: with 8
// warps, 4·STEPS packs of each row, a quarter of them in each lane.
template <int TILES, int STEPS, typename RowOf>
__device__ void stream_tiles(
    uint4 (&a)[TILES][2][STEPS], const uint4* w, int row_packs, int first_pack, RowOf row_of) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < 2 * TILES; ++n)
        #pragma unroll
        for (int i = 0; i < STEPS; ++i)
            a[n / 2][n % 2][i] = stream(
                w + (long long)row_of(8 * n + lane / 4) * row_packs + first_pack + lane % 4 +
                4 * i);
}
// Their products with norm(x), of which this warp norms its part. sum_s [WARPS][16·TILES].
template <int TILES, int STEPS>
__device__ void multiply(
    const uint4 (&a)[TILES][2][STEPS], uint4 own, uint4 gain, float rstd, uint4* h_s,
    float* sum_s) {
    const int lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
    float h[8], c[TILES][2][4] = {};
    normed(own, gain, rstd, h);
    h_s[lane % (4 * STEPS)] = pack(h);
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const uint4 b = h_s[4 * i + t];  // all columns of b are the same
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            mma(c[n][0], a[n][0][i].x, a[n][1][i].x, a[n][0][i].y, a[n][1][i].y, b.x, b.y);
            mma(c[n][1], a[n][0][i].z, a[n][1][i].z, a[n][0][i].w, a[n][1][i].w, b.z, b.w);
        }
    }
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
        if (t == 0) {
            sum_s[16 * n + r] = c[n][0][0] + c[n][1][0];
            sum_s[16 * n + r + 8] = c[n][0][2] + c[n][1][2];
        }
}
template <int WARPS, int ROWS>
__device__ float over_warps(const float (&sum_s)[WARPS][ROWS], int i) {
    float sum = 0;
    #pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += sum_s[n][i];
    return sum;
}

"""
)
QKV_SIGNATURE = """\
    uint4* x, const uint4* gain, const uint4* w, bf16* y, int N, float eps, const uint4* embed,
    const int* tokens, const int* position) {
"""
GATE_UP_SIGNATURE = (
    "    const uint4* x, const uint4* gain, const uint4* w, bf16* y, int N, float eps) {\n"
)
MMA_QKV = (
    between("// A warp computes ROWS numbers of y = W", "// The same for PAIRS rows of the gate"),
    TILES
    + r"""
template <int ROWS, int PACKS, bool EMBED, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 2) norm_gemv_kernel(
"""
    + QKV_SIGNATURE
    + r"""    constexpr int TILES = WARPS * ROWS / 16, STEPS = 8 * PACKS / WARPS, PART = 4 * STEPS;
    __shared__ float sum_s[WARPS][16 * TILES];
    __shared__ uint4 h_s[WARPS][PART];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * (16 * TILES);
    uint4 a[TILES][2][STEPS], b[PACKS];
    stream_tiles(a, w, 32 * PACKS, warp * PART, [&](int i) { return min(row + i, N - 1); });
    const uint4 g = gain[warp * PART + lane % PART];
    previous_kernel();
    load_row(b, EMBED ? embed + (long long)tokens[*position] * (32 * PACKS) : x, lane);
    const uint4 own = (EMBED ? embed + (long long)tokens[*position] * (32 * PACKS)
                             : x)[warp * PART + lane % PART];
    if (EMBED && blockIdx.x == 0 && warp == 0)
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) x[lane + 32 * i] = b[i];
    multiply(a, own, g, rstd_of<PACKS, 32>(b, eps), h_s[warp], sum_s[warp]);
    __syncthreads();
    const int i = threadIdx.x;
    if (i < 16 * TILES && row + i < N) y[row + i] = bf16(over_warps(sum_s, i));
}

""",
)
MMA_GATE_UP = (
    between("// The same for PAIRS rows of the gate", "// SHARE warps compute x[row]"),
    TILES
    + r"""
template <int PAIRS, int PACKS, int WARPS>
__global__ void __maxnreg__(160) norm_gate_up_kernel(
"""
    + GATE_UP_SIGNATURE
    + r"""    constexpr int ROWS = WARPS * PAIRS, TILES = 2 * ROWS / 16, STEPS = 8 * PACKS / WARPS;
    constexpr int PART = 4 * STEPS;
    __shared__ float sum_s[WARPS][2 * ROWS];
    __shared__ uint4 h_s[WARPS][PART];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS;
    uint4 a[TILES][2][STEPS], v[PACKS];
    stream_tiles(a, w, 32 * PACKS, warp * PART, [&](int i) {
        return min(row + i % ROWS, N - 1) + (i < ROWS ? 0 : N);
    });
    const uint4 g = gain[warp * PART + lane % PART];
    previous_kernel();
    load_row(v, x, lane);
    const uint4 own = x[warp * PART + lane % PART];
    multiply(a, own, g, rstd_of<PACKS, 32>(v, eps), h_s[warp], sum_s[warp]);
    __syncthreads();
    const int i = threadIdx.x;
    if (i < ROWS && row + i < N) {
        const float z = rounded(over_warps(sum_s, i));
        y[row + i] = bf16(rounded(z / (1 + expf(-z))) * rounded(over_warps(sum_s, ROWS + i)));
    }
}

""",
)
MMA_RESIDUAL = (
    between("// SHARE warps compute x[row]", "// Norm and rotation of a head"),
    MMA
    + r"""
// Eight rows of w are the columns of b, each warp has a part of them, and every row of a is h.
template <int PACKS, int SHARE, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 2) gemv_residual_kernel(
    const uint4* h, const uint4* w, bf16* x) {
    constexpr int ROWS = 8, STEP = 4;
    static_assert(SHARE == 1 && WARPS == 8);
    __shared__ float part_s[WARPS][ROWS];
    const int tx = threadIdx.x, lane = tx % 32, warp = tx / 32, first_row = blockIdx.x * ROWS;
    const int column = warp * (STEP * PACKS) + lane % 4;
    const long long row = first_row + lane / 4;
    uint4 a[PACKS], b[PACKS];
    #pragma unroll
    for (int i = 0; i < PACKS; ++i)
        a[i] = stream(w + row * (WARPS * STEP * PACKS) + column + i * STEP);
    // Not of the kernel before, but of the one before that. L1 may still have what was there then.
    const float before = __bfloat162float(__ldcg(x + first_row + tx % ROWS));
    previous_kernel();
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) b[i] = h[column + i * STEP];
    float c[4][4] = {};
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        mma(c[i % 2 * 2], b[i].x, b[i].x, b[i].y, b[i].y, a[i].x, a[i].y);
        mma(c[i % 2 * 2 + 1], b[i].z, b[i].z, b[i].w, b[i].w, a[i].z, a[i].w);
    }
    if (lane < 4)
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            part_s[warp][2 * lane + n] = (c[0][n] + c[1][n]) + (c[2][n] + c[3][n]);
    __syncthreads();
    if (tx < ROWS) {
        float total = 0;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) total += part_s[i][tx];
        x[first_row + tx] = bf16(before + rounded(total));
    }
}

""",
)
# The end of attention --------------------------------------------------------------------------

FENCES = (
    before(
        "__device__ float rounded(float v)",
        r"""// Counts from 0 to `last` and round again. What blocks wrote before, the last one sees.
__device__ unsigned count_up(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}
""",
    ),
    ("        __threadfence();\n        last_s = atomicInc(", "        last_s = count_up("),
    ("- 1;\n        __threadfence();\n    }\n    __syncthreads();\n    if (!last_s)",
     "- 1;\n    }\n    __syncthreads();\n    if (!last_s)"),
)  # fmt: skip
CLUSTER = 8  # the largest that every GPU with clusters can start
MERGED = between(
    "        if (used == 1) o[head * G * D + i] = bf16(y);", "    // The last block of a head"
)
LAST = between("        last_s = atomicInc(", "        o[head * G * D + i] = bf16(y / total);")
CLUSTERS = (
    (
        "attention_kernel(\n",
        f"__cluster_dims__(1, {CLUSTER}, 1)\nattention_kernel(\n",
    ),
    (
        "used = min((int)gridDim.y, tiles);\n",
        f"""SIZE = {CLUSTER};
    // Up to three tiles a block, one cluster is enough.
    const int used = min(tiles <= 3 * SIZE ? SIZE : (int)gridDim.y, tiles);
""",
    ),
    (
        MERGED,
        r"""        if (used == 1) o[head * G * D + i] = bf16(y);
        y_s[i] = y;
        if (i % D == 0) lse_s[g] = top + log2f(total);
    }
    if (used == 1) return;

    // The first block of a cluster merges what its blocks have in shared memory. They stay until
    // it has read that; blocks without work have left, and are not waited for.
    const int first = split - split % SIZE, count = min(SIZE, used - first);
    const int clusters = (used + SIZE - 1) / SIZE, cluster = split / SIZE;
    cluster_barrier();
    if (split == first)
        for (int i = threadIdx.x; i < G * D; i += 32 * WARPS) {
            float score[SIZE], part[SIZE], top = -1e30f, total = 0, y = 0;
            #pragma unroll
            for (int s = 0; s < SIZE; ++s) {
                score[s] = of_block(lse_s + i / D, min(s, count - 1));
                part[s] = of_block(y_s + i, min(s, count - 1));
            }
            #pragma unroll
            for (int s = 0; s < SIZE; ++s) {
                if (s >= count) score[s] = -CUDART_INF_F;
                top = fmaxf(top, score[s]);
            }
            #pragma unroll
            for (int s = 0; s < SIZE; ++s) {
                const float weight = exp2f(score[s] - top);
                total += weight;
                y = fmaf(weight, part[s], y);
            }
            y /= total;
            if (clusters == 1) o[head * G * D + i] = bf16(y);
            else partial[(head * SPLITS + cluster) * G * D + i] = y;
            if (clusters > 1 && i % D == 0)
                lse[(head * SPLITS + cluster) * G + i / D] = top + log2f(total);
        }
    cluster_barrier();
    if (split != first || clusters == 1) return;

""",
    ),
    (LAST, LAST.replace("used", "clusters").replace("SPLITS]", "SPLITS / SIZE]")
        .replace("s < SPLITS;", "s < SPLITS / SIZE;")),
    after("    __shared__ bool last_s;\n", "    __shared__ float y_s[G * D], lse_s[G];\n"),
    before(
        "// Block (head, split) attends",
        r"""__device__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What `mine` is in another block of the cluster.
__device__ float of_block(const float* mine, int rank) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(mine);
    unsigned there;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
}

""",
    ),
)  # fmt: skip

EVICT_FIRST = (
    (
        'asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"',
        'unsigned long long policy;\n'
        '    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));\n'
        '    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 "\n'
        '                 "{%0, %1, %2, %3}, [%4], %5;"',
    ),
    ('"l"(from) : "memory");\n    return v;', '"l"(from), "l"(policy) : "memory");\n    return v;'),
)  # fmt: skip
# A fragment's load takes 64 bytes of a row at a time; the next load takes the rest of the line.
LINES_OF_128 = ("ld.global.L1::no_allocate.v4.u32", "ld.global.L1::no_allocate.L2::128B.v4.u32")
