"""Small changes of the decode step's kernels, as data: `qwen3_step.py` times and combines them.

Where a token's 575 µs on the H200 are at context 512 (floor: 256, and 13 for K and V). The head
takes 70; a layer takes 18.0, of which DRAM works for 7.2. Run alone, with dependent launch (alone:
of the probe, an earlier text; instructions of a warp after the wait: of the SASS; times: guesses):

              MB   floor  alone
    qkv       8.4   1.8    2.9   640 instructions, half of them the norm: 8 warps an SM, 0.65 µs
    attention 2.1   0.5    3.8   2,084 (two copies of the loop's body): about 0.7 µs, then the
                                 merge's fence, atomic and reload: about 1 µs
    o         4.2   0.9    2.3   155 on 16 warps: 0.3 µs
    gate_up  12.6   2.7    3.8   919: 0.95 µs
    down      6.3   1.4    3.1   209 on 16 warps: 0.4 µs

A kernel starts 0.5 to 0.8 µs after the one before it stopped waiting, and its first bytes take 0.5:
about 1.1 µs in which DRAM rests. The chain from a wait to the next is a load of x (0.2), its norm
and the products (0.4 to 1), a reduction, a store, and the end of the grid (0.5). So less arithmetic
should help (tensor cores, pairs of bfloat16), and DRAM at work meanwhile: the first MB of the next
weights into L2 as soon as x is asked for; all of gate_up's during attention. Not so a trigger
before the wait elsewhere: with it, the probe took 2.4 instead of 1.6 µs a node, for the next
kernel's loads are in the queue before x. At 8,192, attention reads 33.5 MB at 3.2 TB/s after the
wait, with 32 KB under way in an SM. DRAM is free from qkv's wait on: K and V could be on their way
into L2 by then, but no more of them than the queue takes (64 KB an SM), or q waits behind them.

An early trigger is safe if nothing that is read before a wait can still be written. No kernel ends
before it has waited, and none writes before, so what has seen its predecessor end comes after all
kernels before that, too, whatever started early. Read before a wait are: weights, gains, the table
(constant); the position and older rows of K and V, of the step before, which has ended, as `first`
(layer 0's qkv) triggers after its wait in all candidates; and x in o and down. Its writer is two
kernels back, so x is read behind the wait where the kernel before triggers early.
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
    QKV_SIGNATURE,
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
    # Into L2: of how many launches ahead, which argument, from which row on, at most how many MB.
    ahead: dict[str, tuple[int, int, int, float]] = field(default_factory=dict)
    splits: int = 0  # blocks for a kv head in attention's grid
    tokens: int = 1  # in a graph


def together(parts: tuple[Candidate, ...]) -> Candidate:
    """All changes in one candidate. ValueError if two set the same thing to different values."""
    edits = {p: tuple(dict.fromkeys(e for c in parts for e in c.edits.get(p, ()))) for p in PHASES}
    constants: dict[str, dict[str, object]] = {}
    ahead: dict[str, tuple[int, int, int, float]] = {}
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
            distance, argument, row, most = candidate.ahead[phase]
            rows = launches[i].args[0][:0]
            if i + distance < len(launches) - 1:  # the head is no target
                rows = launches[i + distance].args[argument][row:]
            size = min(rows.numel() * rows.element_size(), int(most * 1e6)) // 16 * 16
            launches[i] = launch._replace(args=(*launch.args, rows, np.uint32(size)))
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


ASK_FOR_X = (
    "    load_row(b, EMBED ? embed + (long long)tokens[*position] * (32 * PACKS) : x, lane);\n"
)
ASK_FOR_H = "    for (int i = 0; i < PACKS; ++i) b[i] = h[column + i * STEP];\n"
ANCHORS = {  # its parameters; its first loads of what the kernel before has written
    "first": (QKV_SIGNATURE, ASK_FOR_X),
    "qkv": (QKV_SIGNATURE, ASK_FOR_X),
    "attention": (ATTENTION_SIGNATURE, HAVE_Q),
    "o": (RESIDUAL_SIGNATURE, ASK_FOR_H),
    "gate_up": (GATE_UP_SIGNATURE, "    load_row(v, x, lane);\n"),
    "down": (RESIDUAL_SIGNATURE, ASK_FOR_H),
}
ALL = 1e3  # MB
GATE_UP, DOWN, QKV_W, K, V = 2, 1, 2, 5, 6  # which argument of its launch


def fetches(name: str, expected: str, early: bool = False, **ahead) -> Candidate:
    """Phases bring something into L2: before they wait, or else after their first loads."""
    edits = {}
    for phase in ahead:
        signature, asked = ANCHORS[phase]
        block = ("blockIdx.x, gridDim.x", "split * heads + head, used * heads")[
            phase == "attention"
        ]
        line = f"    fetch(ahead, bytes, {block});\n"
        place = before(WAITS[phase], line) if early else after(asked, line)
        edits[phase] = (INTO_L2, (signature, signature.replace(") {\n", AHEAD)), place)
    return Candidate(name, expected, edits, ahead=ahead)


def next_weights(most: float) -> dict[str, tuple[int, int, int, float]]:
    """At most so many MB of those of the next launch."""
    of_next = {"o": GATE_UP, "gate_up": DOWN, "down": QKV_W}
    return {phase: (1, argument, 0, most) for phase, argument in of_next.items()}


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
    after(ASK_FOR_H, READ_X),
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
    fetches("3 MB of the next weights", "-30, -30", **next_weights(3)),
    Candidate("o triggers early", "-12, -5", early("o")),
    fetches("o fetches gate_up", "-12, -5", True, o=(1, GATE_UP, 0, ALL)),
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
    fetches("6 MB of the next weights", "-20, -20", **next_weights(6)),
    fetches(
        "down and qkv fetch 4 MB of K and V", "0, -30", down=(2, K, 1024, 4), qkv=(1, V, 1024, 4)
    ),
    Candidate("fences of the atomic only", "-4, -4", edit(("attention",), *FENCES)),
    Candidate("4 tokens a graph", "-4, -4", tokens=4),
    Candidate("K, V: 3 tiles into L2", "0, -60", edit(("attention",), *kv_ahead(3))),
    Candidate("K, V: 1 tile into L2", "0, -40", edit(("attention",), *kv_ahead(1))),
    Candidate("K, V: 7 tiles into L2", "0, -40", edit(("attention",), *kv_ahead(7))),
    fetches("1.5 MB of the next weights", "-15, -15", **next_weights(1.5)),
    fetches("qkv fetches 4 MB of V", "0, -15", qkv=(1, V, 1024, 4)),
    fetches(
        "down and qkv fetch 8 MB of K and V", "0, -30", down=(2, K, 1024, 8), qkv=(1, V, 1024, 8)
    ),
    fetches("o fetches half of gate_up", "-10, -5", True, o=(1, GATE_UP, 0, 6.3)),
    fetches("attention fetches gate_up", "-8, +5", attention=(2, GATE_UP, 0, ALL)),
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
    fetches("3 MB of the next weights, before the wait", "?", True, **next_weights(3)),
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
