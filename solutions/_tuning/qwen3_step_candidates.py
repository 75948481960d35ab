"""Small changes of the decode step's kernels, as data: `qwen3_step.py` times and combines them.

Where the time of a token goes at context 512 (575 µs on the H200; floor 256 + 13 for K and V). The
head takes 70; a layer takes 18.0 for 7.2 of DRAM. Run alone, with dependent launch (the probe):

             MB    floor  alone  after the wait, instructions of a warp: issue time on an SM
    qkv      8.4    1.8    2.9   640, of which the norm is half: 8 warps, 0.65 µs
    attention 2.1   0.5    3.8   2,084 with both copies of the loop's body and the merges: about
                                 0.7 µs, then fence, atomic and reload of the merge: about 1 µs
    o        4.2    0.9    2.3   209 on 16 warps: 0.4 µs
    gate_up 12.6    2.7    3.8   919: 0.95 µs
    down     6.3    1.4    3.1   260 on 16 warps: 0.5 µs

A kernel starts 0.5 to 0.8 µs after the one before it stopped waiting, and its loads take 0.5 µs and
their bytes: about 1.1 µs + bytes, a period in which DRAM rests. The chain from the wait to the next
wait is a load of x (0.2), its norm and the products (0.4 … 1), a reduction, a store, and the end of
the grid (0.5). What helps: less arithmetic after the wait (tensor cores, pairs of bfloat16); DRAM
at work during attention's chain (gate_up's weights into L2, or into registers by an early trigger
of o). What should not: triggers before the wait elsewhere. The probe had 2.4 instead of 1.6 µs a
node with them: the next kernel's 8 MB are in the queue when x is asked for. At 8,192, attention
reads 33.5 MB at 3.2 TB/s after the wait, with 32 KB on its way in an SM; DRAM is free from qkv's
wait on, so K and V should be on their way to L2 by then, but no more than the queue takes.

An early trigger is safe if nothing read before a wait can still be written. Every block of a kernel
that outlives its first lines waits, and writes only then; so a kernel whose predecessor is complete
comes after all kernels before that, whatever started early. What is read before a wait: weights,
gains and the table (constant); the position and older rows of K and V, last written in the step
before, which is complete if `first` (layer 0's qkv) triggers after its wait, as it does in all
candidates; and x in o and down. x's writers are two kernels back, so that read goes behind the
wait wherever the kernel before triggers early (attention before o, gate_up before down).
"""

from __future__ import annotations

import labkit as lab

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from solutions._qwen3_decode import kernels
from solutions._qwen3_decode.step import DecodeStep
from solutions._tuning.qwen3_step_texts import (
    CLUSTERS,
    EVICT_FIRST,
    FENCES,
    GATE_UP_SIGNATURE,
    LINES_OF_128,
    MMA_GATE_UP,
    MMA_QKV,
    MMA_RESIDUAL,
    PAIRS_OF_BFLOAT16,
    ROTATION_IN_PAIRS,
    Edit,
    after,
    before,
    between,
    text_of,
)

LAYER = ("qkv", "attention", "o", "gate_up", "down")
PHASES = ("first", *LAYER, "head")  # first: qkv of layer 0, which reads the embedding


@dataclass(frozen=True)
class Candidate:
    """Changes for some phases: of the text, of constants of kernels.py, of finished launches."""

    name: str
    expected: str  # µs a token at 512 and at 8,192
    edits: dict[str, tuple[Edit, ...]] = field(default_factory=dict)
    constants: dict[str, dict[str, object]] = field(default_factory=dict)
    ahead: dict[str, tuple[int, float]] = field(default_factory=dict)  # launches ahead, share
    splits: int = 0  # blocks for a kv head in attention's grid
    tokens: int = 1  # in a graph


def together(parts: tuple[Candidate, ...]) -> Candidate:
    """All changes in one candidate. ValueError if two set the same thing to different values."""
    edits = {p: tuple(dict.fromkeys(e for c in parts for e in c.edits.get(p, ()))) for p in PHASES}
    constants: dict[str, dict[str, object]] = {}
    ahead: dict[str, tuple[int, float]] = {}
    for part in parts:
        pairs = [(constants.setdefault(p, {}), more) for p, more in part.constants.items()]
        for known, more in (*pairs, (ahead, part.ahead)):
            if any(known.get(k, v) != v for k, v in more.items()):
                raise ValueError(f"{part.name}: {more} over {known}")
            known.update(more)
    splits, tokens = ({getattr(c, n) for c in parts} for n in ("splits", "tokens"))
    if len(splits - {0}) > 1 or len(tokens - {1}) > 1:
        raise ValueError(f"{splits=} {tokens=}")
    name = " + ".join(c.name for c in parts)
    return Candidate(
        name, "", edits, constants, ahead, max(splits, default=0), max(tokens, default=1)
    )


FUNCTIONS = {  # of kernels.py -> the phase, which may depend on the keywords
    "norm_gemv": lambda how: "first" if how["first"] else "qkv",
    "attention": lambda how: "attention",
    "new_partials": lambda how: "attention",
    "gemv_residual": lambda how: "down" if how["name"] == "intermediate_size" else "o",
    "norm_gate_up": lambda how: "gate_up",
    "norm_head": lambda how: "head",
}
WEIGHTS_OF = {"o": 1, "down": 1}  # which argument they are; else the third


@cache
def kernel_of(text: str, name: str, **options):
    """kernels.py's `cuda_kernel`, for another text."""
    return lab.cuda_kernel(text, name, options=options)


@contextmanager
def patched(values: dict[str, object]):
    """Names of kernels.py with other values."""
    were = {name: getattr(kernels, name) for name in values}
    try:
        for name, value in values.items():
            setattr(kernels, name, value)
        yield
    finally:
        for name, value in were.items():
            setattr(kernels, name, value)


def plan(step: DecodeStep, candidate: Candidate) -> list[tuple[str, kernels.Launch]]:
    """The launches of a step with a candidate's changes, each with its phase."""
    texts = {p: text_of(candidate.edits.get(p, ())) for p in PHASES}

    def changed(name):
        function, phase_of = getattr(kernels, name), FUNCTIONS[name]

        def call(*args, **how):
            phase = phase_of(how)
            constants = candidate.constants.get(phase, {})
            text = texts[phase]
            with patched(
                constants
                | {"cuda_kernel": lambda name, **options: kernel_of(text, name, **options)}
            ):
                return function(*args, **how)

        return call

    with patched({name: changed(name) for name in FUNCTIONS}):
        launches = list(step._plan(lab.DEVICE.sms or 132))
    phases = [*LAYER] * (len(launches) // len(LAYER))
    phases = ["first", *phases[1:], "head"]
    for i, (phase, launch) in enumerate(zip(phases, launches, strict=True)):
        if phase == "attention" and candidate.splits:
            launches[i] = launch = launch._replace(grid=(launch.grid[0], candidate.splits))
        if phase in candidate.ahead:
            distance, share = candidate.ahead[phase]
            w, count = launch.args[0], 0
            if i + distance < len(launches) - 1:  # the head is no target
                w = launches[i + distance].args[WEIGHTS_OF.get(phases[i + distance], 2)]
                count = int(w.numel() * w.element_size() * share) // 16 * 16
            launches[i] = launch._replace(args=(*launch.args, w, np.uint32(count)))
    return list(zip(phases, launches, strict=True))


# Into L2 ahead of use -------------------------------------------------------------------------

INTO_L2 = before(
    "__device__ float rounded(float v)",
    r"""// Bytes that L2 shall have soon: a multiple of 16, as is the address.
__device__ void into_l2(const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}
// A warp of each block asks for the block's share of them.
__device__ void fetch(const char* from, unsigned bytes, unsigned block, unsigned blocks) {
    const unsigned share = (bytes / 16 + 32 * blocks - 1) / (32 * blocks) * 16;
    const unsigned begin = (block * 32 + threadIdx.x) * share;
    if (threadIdx.x < 32 && begin < bytes) into_l2(from + begin, min(share, bytes - begin));
}

""",
)
KV_LOAD = "    load(split, k, v);\n"


def kv_ahead(tiles: int) -> tuple[Edit, ...]:
    """So many tiles of K and V ahead of the one in registers, the first of them before the wait."""
    start = f"""
    // A tile is one piece of memory, of which each head's block fetches an equal part. The last one
    // may not be whole.
    auto fetch_tile = [&](int tile) {{
        if (threadIdx.x == 0 && tile < tiles - 1) {{
            const long long at = ((long long)tile * heads + head) * (TILE * LANES);
            into_l2(k_cache + at, TILE * LANES * 16);
            into_l2(v_cache + at, TILE * LANES * 16);
        }}
    }};
    #pragma unroll 1
    for (int i = 1; i <= {tiles}; ++i) fetch_tile(split + i * used);
"""
    next_tile = (
        "        load(tile + used, k_next, v_next);  // under way during most of what follows\n"
    )
    more = f"        fetch_tile(tile + {tiles + 1} * used);\n"
    return INTO_L2, after(KV_LOAD, start), after(next_tile, more)


RESIDUAL_SIGNATURE = "    const uint4* h, const uint4* w, bf16* x) {\n"
ATTENTION_SIGNATURE = "    unsigned* counters, float scale, float eps) {\n"
AHEAD = ", const char* ahead, unsigned bytes) {\n"
FETCH = "    fetch(ahead, bytes, blockIdx.x, gridDim.x);\n"
WAIT = "    previous_kernel();\n"
WAITS = {  # each with what follows it, which tells them apart
    "first": WAIT + "    load_row(b, EMBED",
    "qkv": WAIT + "    load_row(b, EMBED",
    "attention": WAIT + "\n    uint4 q_raw[G];",
    "o": WAIT + "    #pragma unroll\n    for (int i = 0; i < PACKS; ++i) b[i] = h[",
    "gate_up": WAIT + "    load_row(v, x, lane);",
    "down": WAIT + "    #pragma unroll\n    for (int i = 0; i < PACKS; ++i) b[i] = h[",
}
HAVE_Q = "    const uint4 k_new = pack(turned);\n"


def with_ahead(signature: str) -> Edit:
    """Two more arguments."""
    return signature, signature.replace(") {\n", AHEAD)


O_FETCHES = (INTO_L2, with_ahead(RESIDUAL_SIGNATURE), before(WAITS["o"], FETCH))
GATE_UP_FETCHES = (INTO_L2, with_ahead(GATE_UP_SIGNATURE), before(WAITS["gate_up"], FETCH))
ATTENTION_FETCHES = (
    INTO_L2,
    with_ahead(ATTENTION_SIGNATURE),
    after(HAVE_Q, "    fetch(ahead, bytes, split * heads + head, used * heads);\n"),
)

# Triggers -------------------------------------------------------------------------------------

TRIGGER = '    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n'
PREVIOUS = between("__device__ void previous_kernel() {", "// 16 bytes that are used once")
MAY_BE_EARLY = (
    PREVIOUS,
    "template <bool EARLY = false> "
    + PREVIOUS.replace(TRIGGER, "    if (!EARLY)\n    " + TRIGGER).replace(
        "    asm volatile(\"griddepcontrol.wait", "    if (EARLY)\n    " + TRIGGER
        + "    asm volatile(\"griddepcontrol.wait"
    ),
)  # fmt: skip
BEFORE = between("    // Not of the kernel before, but", WAIT)
READ_X = "    const float before = __bfloat162float(__ldcg(x + first_row + tx % ROWS));\n"
X_AFTER_WAIT = (
    (BEFORE, ""),
    after("    for (int i = 0; i < PACKS; ++i) b[i] = h[column + i * STEP];\n", READ_X),
)


def early(*phases: str) -> dict[str, tuple[Edit, ...]]:
    """These phases trigger before they wait; x is read later where that makes it necessary."""
    edits = {
        p: (MAY_BE_EARLY, (WAITS[p][:-1], WAITS[p][:-1].replace("kernel()", "kernel<true>()")))
        for p in phases
    }
    for trigger, reader in (("attention", "o"), ("gate_up", "down")):
        if trigger in phases:
            edits[reader] = (*edits.get(reader, ()), *X_AFTER_WAIT)
    return edits


LATE = (
    after(
        PREVIOUS,
        PREVIOUS.replace("previous_kernel", "previous_kernel_only").replace(TRIGGER, "")
        + "__device__ void next_kernel() {\n#if __CUDA_ARCH__ >= 900\n" + TRIGGER + "#endif\n}\n",
    ),
    (WAITS["attention"][:-1], WAITS["attention"][:-1].replace("kernel()", "kernel_only()")),
    after(HAVE_Q, "    next_kernel();\n"),
)  # fmt: skip


# The list, the most promising first -----------------------------------------------------------

QKV, RESIDUAL = ("first", "qkv"), ("o", "down")
WEIGHTS = (*QKV, *RESIDUAL, "gate_up", "head")


def edit(phases: tuple[str, ...], *edits: Edit) -> dict[str, tuple[Edit, ...]]:
    """These edits in each of the phases."""
    return dict.fromkeys(phases, edits)


def constant(phases: tuple[str, ...], **values) -> dict[str, dict[str, object]]:
    """These constants in each of the phases."""
    return dict.fromkeys(phases, values)


def fetches(name: str, expected: str, phase: str, launches: int, share: float) -> Candidate:
    """A phase brings this share of the weights of a launch further on into L2."""
    how = {"o": O_FETCHES, "gate_up": GATE_UP_FETCHES, "attention": ATTENTION_FETCHES}[phase]
    return Candidate(name, expected, edit((phase,), *how), ahead={phase: (launches, share)})


CANDIDATES = (
    Candidate("gate_up on tensor cores", "-15, -15", edit(("gate_up",), MMA_GATE_UP)),
    Candidate("K, V: 2 tiles into L2", "0, -60", edit(("attention",), *kv_ahead(2))),
    Candidate("qkv on tensor cores", "-10, -10", edit(QKV, MMA_QKV)),
    Candidate(
        "bfloat16 in pairs",
        "-12, -12; same bits",
        edit((*QKV, "gate_up", "head"), PAIRS_OF_BFLOAT16)
        | edit(("attention",), PAIRS_OF_BFLOAT16, *ROTATION_IN_PAIRS),
    ),
    Candidate("o triggers early", "-12, -5", early("o")),
    fetches("o fetches gate_up", "-12, -5", "o", 1, 1.0),
    Candidate("attention in clusters", "-10, 0", edit(("attention",), *CLUSTERS), splits=16),
    Candidate(
        "o, down on tensor cores",
        "-6, -6",
        edit(RESIDUAL, MMA_RESIDUAL),
        constant(RESIDUAL, SHARES=(1,), SHARE_PACKS=12),
    ),
    Candidate(
        "qkv, gate_up on tensor cores, 128 bytes into L2",
        "-25, -25",
        edit(QKV, MMA_QKV, LINES_OF_128) | edit(("gate_up",), MMA_GATE_UP, LINES_OF_128),
    ),
    Candidate("fences of the atomic only", "-4, -4", edit(("attention",), *FENCES)),
    Candidate("4 tokens a graph", "-4, -4", tokens=4),
    Candidate("K, V: 3 tiles into L2", "0, -60", edit(("attention",), *kv_ahead(3))),
    Candidate("K, V: 1 tile into L2", "0, -40", edit(("attention",), *kv_ahead(1))),
    Candidate("K, V: 7 tiles into L2", "0, -40", edit(("attention",), *kv_ahead(7))),
    fetches("o fetches half of gate_up", "-10, -5", "o", 1, 0.5),
    fetches("attention fetches gate_up", "-8, +5", "attention", 2, 1.0),
    Candidate("qkv triggers early", "0, -10", early("qkv")),
    Candidate("all but first and head trigger early", "?", early(*LAYER)),
    Candidate("attention triggers with q", "0, 0", edit(("attention",), *LATE)),
    Candidate(
        "attention in clusters, 5 keys a team",
        "-12, 0",
        edit(("attention",), *CLUSTERS),
        constant(("attention",), LOADS=5),
        splits=16,
    ),
    Candidate("down triggers early", "+5, +5", early("down")),
    Candidate("gate_up triggers early", "+5, +5", early("gate_up")),
    fetches("gate_up fetches the next qkv", "-3, -3", "gate_up", 2, 1.0),
    Candidate("2 keys a team", "0, +20", constants=constant(("attention",), LOADS=2)),
    Candidate(
        "32 splits", "+3, -10", constants=constant(("attention",), MOST_SPLITS=32), splits=32
    ),
    Candidate(
        "o, down: a warp a row",
        "0, 0",
        constants=constant(RESIDUAL, SHARES=(1,), SHARE_PACKS=12),
    ),
    Candidate("o, down: 4 warps a row", "+3, +3", constants=constant(RESIDUAL, SHARES=(4,))),
    Candidate("qkv: 2 rows a warp", "+3, +3", constants=constant(QKV, QKV_ROWS=2)),
    Candidate("gate_up: 1 pair a warp", "+5, +5", constants=constant(("gate_up",), PAIRS=1)),
    Candidate(
        "head: 16 warps, 1 row", "0, 0", constants=constant(("head",), HEAD_WARPS=16, HEAD_ROWS=1)
    ),
    Candidate("head: 8 warps, 2 rows", "+2, +2", constants=constant(("head",), HEAD_WARPS=8)),
    Candidate(
        "head: 8 warps, 3 rows", "0, 0", constants=constant(("head",), HEAD_WARPS=8, HEAD_ROWS=3)
    ),
    Candidate("weights leave L2 first", "0, 0", edit(WEIGHTS, *EVICT_FIRST)),
    Candidate("16 tokens a graph", "-5, -5", tokens=16),
)
