"""Rung 5 of decode_attention on this GPU: is it right, is there a faster end, where is the time?

    PYTHONPATH=. python solutions/_tuning/decode_attention.py            at most 45 s, 90 lines
    PYTHONPATH=. python solutions/_tuning/decode_attention.py check decode_attention_fused bf16

Every size is timed twice: with events and a cold L2, as the bars are, and in a CUDA graph of 50
calls or more that goes round copies of the inputs, as a model would replay it.

    op             rung 5 as it is; "no keys": with contexts of 0
    ring W x S     its kernel with W warps and S blocks to a context
    cluster S      the S blocks of a head are a cluster and merge through distributed shared memory
    no merge       a block leaves its part and ends; wrong, only timed
    half loads     keys are used for values too, which are not copied; wrong, only timed
    no loads       nothing is copied; wrong, only timed
"""

import labkit as lab
from labkit.bench import _in_graphs, ceilings, interleaved
from labkit.compile import _checked, _load

import os
import statistics
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from solutions import _decode_attention as da

START, LIMIT = time.time(), 38
P, MODEL = da.DECODE_ATTENTION, da.QWEN_SMALL
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Texts -----------------------------------------------------------------------------------------


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first part, which must occur once, replaced by the second."""
    for old, new in pairs:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


# The end of a block in a cluster. It stores columns of o itself, G·D / splits of them: every block
# sends it those of its own row. Nothing goes to memory, no counter comes back, all merge at once.
CLUSTER_FINISH = r"""
template <typename T, int D, int G, int WARPS, int TEAMS, int MERGED>
__device__ void finish(
    const float* lse, const float* acc, T* o, float* split_acc, float* split_lse, int* counter,
    int split, int splits, int used) {
    __shared__ float part_s[G * D];
    __shared__ float part_lse_s[16];  // one of each block: all of these columns are of one head
    const int share = G * D / splits;
    int columns = G * D, count = TEAMS;
    #pragma unroll 1
    for (bool whole = false;; whole = true) {
        __syncthreads();
        if (!whole) __cluster_barrier_wait();  // every block has started
        #pragma unroll 1
        for (int i = threadIdx.x; i < columns; i += 32 * WARPS) {
            const float *lse_i, *column;
            lse_i = whole ? part_lse_s : lse + i / D * TEAMS;
            column = whole ? part_s + i : acc + i / D * TEAMS * D + i % D;
            const int step = whole ? share : D;
            float m = -1e30f, l = 0, sum = 0;
            #pragma unroll 1
            for (int first = 0; first < count; first += MERGED) {
                float score[MERGED], value[MERGED], top = m;
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) {
                    const bool inside = first + n < count;
                    score[n] = inside ? lse_i[first + n] : -CUDART_INF_F;
                    value[n] = inside ? column[(first + n) * step] : 0;
                }
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) top = fmaxf(top, score[n]);
                const float alpha = exp2f(m - top);
                m = top;
                l *= alpha;
                sum *= alpha;
                #pragma unroll
                for (int n = 0; n < MERGED; ++n) {
                    const float weight = exp2f(score[n] - m);
                    l += weight;
                    sum = fmaf(weight, value[n], sum);
                }
            }
            const float y = l > 0 ? sum / l : 0;
            if (whole) {
                o[split * share + i] = T(y);
            } else {
                float* there = static_cast<float*>(__cluster_map_shared_rank(part_s, i / share));
                there[split * share + i % share] = y;
                if (i % share == 0)
                    static_cast<float*>(__cluster_map_shared_rank(part_lse_s, i / share))[split] =
                        m + log2f(l);
            }
        }
        if (whole) return;
        __cluster_barrier_arrive();
        __cluster_barrier_wait();  // every part has arrived, and no block reads another's memory
        columns = share;
        count = splits;
    }
}

"""
HEAD = da.ATTEND[: da.ATTEND.index("// Stores o of G heads")]
FINISH = da.ATTEND[len(HEAD) : da.ATTEND.index("// Block (h, split, b)")]
LOOP = da.ATTEND[len(HEAD) + len(FINISH) :]
KERNEL = da.PIPELINED[len(da.ATTEND) :]
COPY_VALUES = "                __pipeline_memcpy_async(place(stage, 1, u), v_lane + at, 16);\n"
CLUSTER_LOOP = changed(
    LOOP,
    (
        "    Pack<T> q_pack[G];\n",
        "    __cluster_barrier_arrive_relaxed();\n    Pack<T> q_pack[G];\n",
    ),
    # A block without keys has columns of o all the same.
    ("    if (split >= used) {\n        __pipeline_wait_prior(0);\n        return;\n    }\n", ""),
)
TEXTS = {
    "ring": da.PIPELINED,
    "cluster": HEAD + CLUSTER_FINISH + CLUSTER_LOOP + KERNEL,
    "no merge": HEAD
    + changed(FINISH, ("        if (whole) return;\n", "        return;\n"))
    + LOOP
    + KERNEL,
    "half loads": HEAD
    + FINISH
    + changed(
        LOOP, (COPY_VALUES, ""), ("uint4*>(place(stage, 1, u))", "uint4*>(place(stage, 0, u))")
    )
    + KERNEL,
    "no loads": HEAD
    + FINISH
    + changed(LOOP, ("if (last >= 0)", "if (last == -(1 << 30))"))
    + KERNEL,
}


def compiled(kind: str, warps: int):
    """Rung 5's kernel for bf16, heads of 128 and groups of 2, in one of the texts."""
    template = f"__nv_bfloat16, 128, 2, {warps}, {da.LOADS}, {da.STAGES}, {da.MERGED}"
    name = f"decode_attention_pipelined_kernel<{template}>"
    return lab.cuda_kernel(TEXTS[kind], name, options={"use_fast_math": True})


KERNELS = {(kind, warps): compiled(kind, warps) for kind in TEXTS for warps in (4, 8)}


def ring_bytes(warps: int) -> int:
    """Shared memory of a block's ring."""
    return da.STAGES * 2 * da.LOADS * warps * da.WARP * da.VECTOR_BYTES


def allow_large_clusters(kernel, shared: int) -> None:
    """Clusters of more than 8 blocks, which not every GPU with clusters can start."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    device = _checked(driver.cuDeviceGet(0))
    _checked(driver.cuKernelSetAttribute(attribute, 1, _load(kernel, 0, shared).handle, device))


def variant(kind: str, warps: int, splits: int, q, k):
    """A function of q, k, v and context_lens with memory of its own, for these shapes."""
    (B, _, D), (S, H_kv) = q.shape, k.shape[1:3]
    kernel, ring = KERNELS[kind, warps], ring_bytes(warps)
    how = {"cluster": (1, splits, 1)} if kind == "cluster" else {}
    if kind == "cluster" and splits > 8:
        allow_large_clusters(kernel, ring)
    run = kernel.configure((H_kv, splits, B), warps * da.WARP, ring, **how)
    scale, out = np.float32(D**-0.5 * da.LOG2_E), torch.empty_like(q)
    counters = torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)
    workspace = da.new_workspace(q, H_kv, splits, counters)

    def call(q, k, v, n):
        run(q, k, v, n, out, *workspace, scale, np.int32(S))
        return out

    return call


def op(q, k):
    """The op with an output and a workspace."""
    out, workspace = torch.empty_like(q), da.decode_attention_workspace(q, k)
    return lambda *args: da.decode_attention(*args, out=out, workspace=workspace)


# Checks ----------------------------------------------------------------------------------------


def check_one(name: str, dtype: str) -> None:
    """The whole check of a rung in one dtype, in one line."""
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


def edges(kind: str, warps: int, all_splits: tuple[int, ...]) -> str | None:
    """Lengths at the edges of tiles, NaN after them, three launches for each number of splits."""
    lens = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1500, 1024, 777)
    q, k, v, n = P.inputs(torch.bfloat16, seed=1, B=len(lens), S=1501, **MODEL)
    n.copy_(torch.tensor(lens))
    truth = da.reference(q.double(), k.double(), v.double(), n)
    past = torch.arange(k.shape[1], device=k.device) >= n[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], float("nan")) for x in (k, v))
    allowed = 2**-7 * truth.abs().amax(dim=(1, 2)).clamp(min=1e-5)
    for splits in all_splits:
        call, first = variant(kind, warps, splits, q, k), None
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


def guarded(what, fn) -> object:
    """What `fn` gives, or what went wrong in one line; printed."""
    try:
        found = fn()
    except Exception:
        found = "💥 " + " | ".join(traceback.format_exc().splitlines()[-3:])[:400]
    print(what, "🟢" if found is None else found, flush=True)
    return found


# Times -----------------------------------------------------------------------------------------

SIZES = ((1, 512), (1, 2048), (1, 4096), (1, 8192), (1, 32768), (32, 4096))


def time_size(B: int, S: int, clusters: list[int]) -> None:
    """One table: cold and in a graph, for all texts."""
    args = P.inputs(torch.bfloat16, B=B, S=S, **MODEL)
    q, k, _, n = args
    none = torch.zeros_like(n)

    def empty(fn):
        return lambda q, k, v, n: fn(q, k, v, none)

    warps, splits = da.ring_shape(B, MODEL["H_kv"], S, 256)
    functions = {"SDPA, full": da.full_sdpa, "op": op(q, k), "op, no keys": empty(op(q, k))}
    for w, s in ((8, 8), (8, 16)) if B == 1 else ((8, 1), (4, 2)):
        functions[f"ring {w} x {s}"] = variant("ring", w, s, q, k)
    for s in clusters:
        functions[f"cluster {s}"] = variant("cluster", 8, s, q, k)
        functions[f"cluster {s}, no keys"] = empty(variant("cluster", 8, s, q, k))
    right = [x for x in functions if "no keys" not in x]
    for kind in ("no merge", "half loads", "no loads"):
        functions[kind] = variant(kind, warps, splits, q, k)
    truth = da.full_sdpa(*args).float()
    far = {x: (functions[x](*args).float() - truth).abs().max() for x in right}
    wrong = [x for x in right if not far[x] <= 0.02 * truth.abs().max()]
    cold = interleaved({x: lambda fn=fn: fn(*args) for x, fn in functions.items()}, 50)
    work = P.work(torch.bfloat16, B=B, S=S, **MODEL)
    graph = _in_graphs(functions, args, work, 12)
    cold, graph = ({x: statistics.median(t) for x, t in ts.items()} for ts in (cold, graph))
    read = ceilings()["read_bytes_per_s"]
    print(f"-- B={B} S={S}, op {warps} x {splits}: µs, of SDPA, of read: cold | in a graph;"
          f" {time.time() - START:.0f} s", f"WRONG: {wrong}" if wrong else "")  # fmt: skip
    for x in functions:
        line = (
            f"{t[x] * 1e6:7.2f} {t[x] / t['SDPA, full']:5.2f} {work.bytes / t[x] / read:5.0%}"
            for t in (cold, graph)
        )
        print(f"  {x:20} {' | '.join(line)}", flush=True)


def stop() -> None:
    """End the process: time is up."""
    print("⏱ stopped", flush=True)
    os._exit(1)


def main() -> None:
    """Compile, check, time; what fails is left out and said."""
    watch = threading.Timer(LIMIT + 3, stop)
    watch.daemon = True
    watch.start()
    torch.zeros(1, device="cuda")
    with ThreadPoolExecutor(6) as pool:  # what fails here fails again, and is reported, below
        for x in KERNELS:
            pool.submit(_load, KERNELS[x], 0, ring_bytes(x[1]))
    guarded("graph:", graph_holds)
    guarded("templates:", lambda: da.templates_are_right(da.decode_attention))
    guarded("ring, 4 warps:", lambda: edges("ring", 4, (1, 2, 9)))
    guarded("ring, 8 warps:", lambda: edges("ring", 8, (1, 2, 9)))
    clusters = [
        s
        for s in (8, 16)
        if guarded(f"cluster {s}:", lambda s=s: edges("cluster", 8, (s,))) is None
    ]
    read, empty = (ceilings()[x] for x in ("read_bytes_per_s", "empty_kernel_s"))
    ceiling = f"read {read / 1e12:.2f} TB/s, an empty kernel {empty * 1e6:.2f} µs"
    print(f"{lab.DEVICE.name}, {ceiling}, {time.time() - START:.0f} s", flush=True)
    for B, S in SIZES:
        if LIMIT - (time.time() - START) < 4:
            print("out of time")
            break
        try:
            time_size(B, S, clusters)
        except Exception:
            print("💥", B, S, " | ".join(traceback.format_exc().splitlines()[-3:])[:400])
        torch.cuda.empty_cache()
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    check_one(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
