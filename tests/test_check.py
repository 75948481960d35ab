"""The checker, tried on kernels that belong to no chapter: wrong ones, each with its class."""

import labkit as lab
from labkit.check import Verdict, error_over_allowed
from labkit.ladder import ladders
from labkit.launch import kernels_of
from labkit.problem import cloned, is_float

import dataclasses
import functools
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from numba import cuda, float32

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


# Two problems that no chapter teaches ---------------------------------------------------------

BLEND = lab.Problem(
    name="blend",
    inputs=lambda dtype, seed=0, *, M, N: tuple(lab.randn((M, N), (M, N), dtype=dtype, seed=seed)),
    reference=lambda a, b: a + 2 * b,
    library=lambda a, b: torch.add(a, b, alpha=2),
    work=lambda dtype, M, N: lab.Work(bytes=3 * M * N * dtype.itemsize, flops=2 * M * N),
    terms=lambda M, N: 1,
    dtypes=(F32, F16, BF16),
    test_sizes=({"M": 1, "N": 1}, {"M": 3, "N": 5}, {"M": 4, "N": 64}, {"M": 3, "N": 67}),
    empty_size={"M": 0, "N": 5},
    bench_size={"M": 4096, "N": 4096},
    sweep=(),
    target=(),
    suspects={"forgets the factor": lambda a, b: a + b},
)

ROW_SUM = lab.Problem(
    name="row_sum",
    inputs=lambda dtype, seed=0, *, M, N: tuple(lab.randn((M, N), dtype=dtype, seed=seed)),
    reference=lambda x: x.sum(1),
    library=lambda x: torch.sum(x, 1),
    work=lambda dtype, M, N: lab.Work(bytes=(M * N + M) * dtype.itemsize, flops=M * N),
    terms=lambda M, N: N,
    dtypes=(F32, F16, BF16),
    test_sizes=({"M": 1, "N": 1}, {"M": 3, "N": 33}, {"M": 2, "N": 64}, {"M": 2, "N": 301}),
    bench_size={"M": 4096, "N": 4096},
    sweep=(),
    target=(),
)


@triton.jit
def blend_kernel(a_ptr, b_ptr, y_ptr, N, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """Program pid computes y[pid·BLOCK : (pid+1)·BLOCK] and, wrongly, SLACK elements more."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offs, mask=offs < N)
    b = tl.load(b_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, a + 2 * b, mask=offs < N + SLACK)


def launch_blend(a, b, slack):
    y = torch.empty_like(a, memory_format=torch.contiguous_format)
    if a.numel():
        blend_kernel[(triton.cdiv(a.numel(), 64),)](a, b, y, a.numel(), SLACK=slack, BLOCK=64)
    return y


def blend_right(a, b):
    return launch_blend(a.contiguous(), b.contiguous(), 0)


def blend_refuses(a, b):
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"a and b must be contiguous, {a.stride()=}, {b.stride()=}")
    return launch_blend(a, b, 0)


@triton.jit
def blend_flagged_kernel(a_ptr, b_ptr, y_ptr, flag_ptr, N, BLOCK: tl.constexpr):
    """As blend_kernel, if the number at flag_ptr is not negative: the mask takes it along."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < N) & (tl.load(flag_ptr) >= 0)
    a = tl.load(a_ptr + offs, mask=mask)
    b = tl.load(b_ptr + offs, mask=mask)
    tl.store(y_ptr + offs, a + 2 * b, mask=mask)


def blend_flagged(a, b):
    a, b = a.contiguous(), b.contiguous()
    y, flag = torch.empty_like(a), torch.zeros(1, dtype=torch.int64, device=a.device)
    if a.numel():
        grid = (triton.cdiv(a.numel(), 64),)
        blend_flagged_kernel[grid](a, b, y, flag, a.numel(), BLOCK=64)
    return y


@triton.jit
def blend_misspelt_kernel(a_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Does not compile."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.laod(a_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, a, mask=offs < N)


def blend_misspelt(a, b):
    y = torch.empty_like(a)
    blend_misspelt_kernel[(1,)](a, b, y, a.numel(), BLOCK=64)
    return y


@cuda.jit
def blend_numba_kernel(a, b, y):
    """Thread (col, row) computes y[row, col]."""
    col, row = cuda.grid(2)
    if row < y.shape[0] and col < y.shape[1]:
        y[row, col] = a[row, col] + 2 * b[row, col]


def blend_numba(a, b):
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel():
        grid = (triton.cdiv(a.shape[1], 16), triton.cdiv(a.shape[0], 4))
        blend_numba_kernel[grid, (16, 4), lab.stream()](a, b, y)
    return y


@cuda.jit
def row_sum_kernel(x, y):
    """Block `row` sums x[row, :] in a shared-memory tree of 32 threads."""
    s = cuda.shared.array(32, float32)
    row, tx = cuda.blockIdx.x, cuda.threadIdx.x
    acc = float32(0)
    for col in range(tx, x.shape[1], 32):
        acc += float32(x[row, col])
    s[tx] = acc
    cuda.syncthreads()
    step = 16
    while step > 0:
        if tx < step:
            s[tx] += s[tx + step]
        cuda.syncthreads()
        step //= 2
    if tx == 0:
        y[row] = s[0]


def row_sum_right(x):
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    if y.numel():
        row_sum_kernel[x.shape[0], 32, lab.stream()](x, y)
    return y


RIGHT = [
    (blend_right, BLEND),
    (blend_refuses, BLEND),
    (blend_flagged, BLEND),
    (functools.partial(blend_right), BLEND),
    (blend_numba, BLEND),
    (lambda a, b: a + 2 * b, BLEND),
    (row_sum_right, ROW_SUM),
    (lambda x: x.float().sum(1).to(x.dtype), ROW_SUM),
]


# Wrong kernels --------------------------------------------------------------------------------


def writes_nothing(a, b):
    return torch.empty_like(a)


def zeros(a, b):
    return torch.zeros_like(a)


def echo(a, b):
    return a.clone()


KEPT = {}


def stale(a, b):
    key = (a.shape, a.dtype)
    if key not in KEPT:
        KEPT[key] = a + 2 * b
    return KEPT[key]


def nan(a, b):
    return (a + 2 * b) / 0 * 0


def transposed(a, b):
    return (a + 2 * b).T.contiguous().view(a.shape)


@cuda.jit
def short_kernel(a, b, y):
    """Thread i computes y[i], the last one excepted."""
    i = cuda.grid(1)
    if i < y.shape[0] - 1:
        y[i] = a[i] + 2 * b[i]


def off_by_one(a, b):
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel():
        flat = y.view(-1)
        blocks = triton.cdiv(a.numel(), 64)
        short_kernel[blocks, 64, lab.stream()](a.reshape(-1), b.reshape(-1), flat)
    return y


def store_past_the_end(a, b):
    return launch_blend(a.contiguous(), b.contiguous(), 1)


@cuda.jit
def unordered_kernel(x, y):
    """Block `row` sums x[row, :], with no barrier inside the tree."""
    s = cuda.shared.array(32, float32)
    row, tx = cuda.blockIdx.x, cuda.threadIdx.x
    acc = float32(0)
    for col in range(tx, x.shape[1], 32):
        acc += float32(x[row, col])
    s[tx] = acc
    cuda.syncthreads()
    step = 16
    while step > 0:
        if tx < step:
            s[tx] += s[tx + step]
        step //= 2
    if tx == 0:
        y[row] = s[0]


def unordered(x):
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    unordered_kernel[x.shape[0], 32, lab.stream()](x, y)
    return y


@cuda.jit
def divergent_kernel(x, y):
    """Block `row` sums x[row, :]; only the threads that still add wait for each other."""
    s = cuda.shared.array(32, float32)
    row, tx = cuda.blockIdx.x, cuda.threadIdx.x
    acc = float32(0)
    for col in range(tx, x.shape[1], 32):
        acc += float32(x[row, col])
    s[tx] = acc
    cuda.syncthreads()
    step = 16
    while step > 0:
        if tx < step:
            s[tx] += s[tx + step]
            cuda.syncthreads()
        step //= 2
    if tx == 0:
        y[row] = s[0]


def divergent(x):
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    divergent_kernel[x.shape[0], 32, lab.stream()](x, y)
    return y


def bf16_accumulator(x):
    acc = torch.zeros(x.shape[0], dtype=BF16, device=x.device)
    for col in range(x.shape[1]):
        acc += x[:, col].to(BF16)
    return acc.to(x.dtype)


def wrong_dtype(a, b):
    return (a + 2 * b).to(torch.float64)


def wrong_shape(a, b):
    return (a + 2 * b)[None]


def two_outputs(a, b):
    return a + 2 * b, a


def contiguous_only(a, b):
    """Reads the memory of `a` and `b` from front to back, whatever their strides."""
    return launch_blend(a, b, 0)


def one_seed(a, b):
    """Right for the first inputs it ever sees of a size."""
    known = BLEND.inputs(a.dtype, seed=0, M=a.shape[0], N=a.shape[1])
    same = torch.equal(a, known[0]) and torch.equal(b, known[1])
    return a + 2 * b if same else a - 3 * b


def forgets(a, b):
    return a + b


def in_place(a, b):
    return a.add_(b, alpha=2)


def raises(a, b):
    return a @ b


def three_arguments(a, b, c):
    return a


def forgets_to_return(a, b):
    launch_blend(a, b, 0)


WRONG = [
    (forgets_to_return, BLEND, "wrong type"),
    (writes_nothing, BLEND, "writes nothing"),
    (zeros, BLEND, "returns zeros"),
    (echo, BLEND, "returns its input"),
    (stale, BLEND, "stale output"),
    (nan, BLEND, "NaN"),
    (transposed, BLEND, "transposed"),
    (off_by_one, BLEND, "off by one"),
    (store_past_the_end, BLEND, "out-of-bounds store"),
    (unordered, ROW_SUM, "missing barrier"),
    (divergent, ROW_SUM, "barrier in a divergent branch"),
    (bf16_accumulator, ROW_SUM, "low-precision accumulator"),
    (wrong_dtype, BLEND, "wrong dtype"),
    (wrong_shape, BLEND, "wrong shape"),
    (two_outputs, BLEND, "wrong shape"),
    (contiguous_only, BLEND, "assumes contiguous input"),
    (one_seed, BLEND, "depends on the seed"),
    (forgets, BLEND, "forgets the factor"),
    (in_place, BLEND, "modifies its input"),
    (raises, BLEND, "raises"),
    (three_arguments, BLEND, "wrong signature"),
]


@pytest.mark.parametrize(("fn", "problem", "bug"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_wrong_kernel_is_rejected_with_its_class(fn, problem, bug):
    KEPT.clear()
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(fn, problem)
    assert caught.value.bug == bug, str(caught.value)
    assert fn.__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "problem"), RIGHT, ids=[getattr(r[0], "__name__", "partial") for r in RIGHT]
)
def test_right_kernel_is_accepted(fn, problem):
    verdict = lab.check(fn, problem)
    assert verdict.state == "🟢"
    assert 0 <= verdict.worst <= 1
    assert "right in float32" in repr(verdict)


@pytest.mark.parametrize(
    ("fn", "problem"), RIGHT, ids=[getattr(r[0], "__name__", "partial") for r in RIGHT]
)
def test_right_kernel_is_accepted_on_200_seeds(fn, problem):
    simulated = lab.SIMULATED and kernels_of(getattr(fn, "func", fn))
    dtypes = (F32,) if simulated else problem.dtypes
    for seed in range(200):
        dtype, size = dtypes[seed % len(dtypes)], {"M": 2, "N": 33 + seed % 7}
        ratio = error_over_allowed(fn, problem, dtype, seed, **size)
        assert ratio <= 1, (seed, dtype, ratio)


def test_a_kernel_behind_a_partial_is_seen():
    def run(x):
        return UNORDERED["kernel"]["launcher"](x)

    UNORDERED = {"kernel": {"launcher": unordered}}
    partial = functools.partial(unordered)
    for fn in (run, partial):
        if lab.SIMULATED or fn is run:
            with pytest.raises(lab.CheckFailed) as caught:
                lab.check(fn, ROW_SUM)
            assert caught.value.bug == "missing barrier"
        else:  # the simulators are in another process, where a partial cannot go
            assert any("races" in left for left in lab.check(fn, ROW_SUM).not_verified)


def test_an_exception_is_shown_at_the_readers_own_line():
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(blend_misspelt, BLEND)
    assert caught.value.bug == "raises"
    assert "tl.laod(a_ptr + offs" in str(caught.value)


def test_a_skipped_backend_is_never_reported_as_passed():
    verdict = lab.check(blend_right, BLEND)
    if lab.SIMULATED:
        assert verdict.verified == ("float32",)
        assert {"float16 and bfloat16", "a real GPU"} <= set(verdict.not_verified)
        assert "not verified here" in repr(verdict)
    else:
        assert verdict.verified == ("float32", "float16", "bfloat16")


@pytest.mark.skipif(not lab.SIMULATED, reason="a GPU has compiled what it ran")
def test_what_cannot_be_compiled_apart_is_not_claimed_to_compile():
    lock = threading.Lock()  # cannot travel to the compilers' process

    def locked(a, b):
        with lock:
            return blend_right(a, b)

    assert "whether it compiles" in lab.check(locked, BLEND).not_verified
    assert "whether it compiles" not in lab.check(blend_right, BLEND).not_verified


def test_strict_mode_takes_no_kernel_that_was_not_run(monkeypatch):
    ladder, _ = lab.find("vector_add")
    attempt = ladder.exercise("vector_add_coalesced")
    unseen = Verdict("⚪", "mine", note="an autotuned kernel needs a GPU")
    monkeypatch.setattr("labkit.exercise.check", lambda *_, **__: unseen)
    assert attempt.check(attempt.rung.fn) is unseen
    monkeypatch.setenv("LABKIT_MODE", "strict")
    with pytest.raises(lab.CheckFailed, match="not checked") as caught:
        attempt.check(attempt.rung.fn)
    assert "needs a GPU" in str(caught.value)


def test_a_skeleton_is_not_attempted():
    def mine(a, b):
        lab.todo("about 3 lines")

    assert lab.check(mine, BLEND).state == "⚪"


def test_the_report_shows_the_first_wrong_value():
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(forgets, BLEND)
    text = str(caught.value)
    for part in ("first at", "got", "wanted", "M=3, N=5", "float32"):
        assert part in text


@cuda.jit
def spot_kernel(a, b, y):
    """Thread (col, row) computes y[row, col], and one of them gets it wrong."""
    col, row = cuda.grid(2)
    if row < y.shape[0] and col < y.shape[1]:
        y[row, col] = a[row, col] + 2 * b[row, col] + (row == 1 and col == 3)


def spot(a, b):
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel():
        spot_kernel[(triton.cdiv(a.shape[1], 2), a.shape[0]), (2, 1), lab.stream()](a, b, y)
    return y


def test_the_report_says_who_wrote_the_first_wrong_value():
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(spot, BLEND)
    assert "first at (1, 3)" in str(caught.value)
    assert "written by thread 1 of block (1, 1)" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lab.check(forgets), "problem=None"),
        (lambda: lab.check(3, BLEND), "fn=3"),
        (lambda: lab.Rung(forgets, "rust"), "kind='rust'"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def cached_buffer(a, b):
    """Right each time, and each time in the same memory."""
    key = ("buffer", a.shape, a.dtype)
    if key not in KEPT:
        KEPT[key] = torch.empty_like(a, memory_format=torch.contiguous_format)
    return KEPT[key].copy_(a + 2 * b)


def exits(a, b):
    raise SystemExit(0)


@cuda.jit
def exchanged_kernel(a, b, y):
    """Thread (col, row) stores to y[col, row]."""
    col, row = cuda.grid(2)
    if row < y.shape[0] and col < y.shape[1]:
        y[col, row] = a[row, col] + 2 * b[row, col]


def exchanged(a, b):
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel():
        grid = (triton.cdiv(a.shape[1], 16), triton.cdiv(a.shape[0], 4))
        exchanged_kernel[grid, (16, 4), lab.stream()](a, b, y)
    return y


@triton.jit
def unfilled_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Program `row` sums row `row`, and what the lanes beyond it happen to hold."""
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N)
    tl.store(y_ptr + row, tl.sum(x))


def unfilled(x):
    M, N = x.shape
    y = torch.empty(M, dtype=x.dtype, device=x.device)
    if M:
        unfilled_kernel[(M,)](x.contiguous(), y, N, BLOCK=triton.next_power_of_2(N))
    return y


@triton.jit
def interpreted_kernel(a_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """The interpreter runs the loop; for the compiler, an index into a tuple is no variable."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    parts = (tl.load(a_ptr + offs, mask=mask), 2 * tl.load(b_ptr + offs, mask=mask))
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(2):
        total += parts[i]
    tl.store(y_ptr + offs, total, mask=mask)


def interpreted(a, b):
    y = torch.empty_like(a, memory_format=torch.contiguous_format)
    if a.numel():
        grid = (triton.cdiv(a.numel(), 64),)
        interpreted_kernel[grid](a.contiguous(), b.contiguous(), y, a.numel(), BLOCK=64)
    return y


@cuda.jit
def simulated_kernel(a, b, y):
    """Numba's simulator runs any Python, such as a dict; its compiler does not."""
    col, row = cuda.grid(2)
    if row < y.shape[0] and col < y.shape[1]:
        weight = {"a": 1, "b": 2}
        y[row, col] = weight["a"] * a[row, col] + weight["b"] * b[row, col]


def simulated(a, b):
    M, N = a.shape
    y = torch.empty_like(a, memory_format=torch.contiguous_format)
    if M:
        simulated_kernel[(triton.cdiv(N, 32), M), 32, lab.stream()](a, b, y)
    return y


@pytest.mark.parametrize(
    ("fn", "problem", "bug"),
    [
        (cached_buffer, BLEND, "overwrites an earlier result"),
        (exits, BLEND, "raises"),
        (exchanged, BLEND, "swapped indices"),
        (lambda a, b: torch.empty_like(a, device="meta"), BLEND, "wrong device"),
        pytest.param(
            unfilled,
            ROW_SUM,
            "wrong mask fill",
            marks=pytest.mark.skipif(not lab.SIMULATED, reason="a GPU may fill with zeros"),
        ),
        *(
            pytest.param(
                fn,
                BLEND,
                "does not compile",
                marks=pytest.mark.skipif(not lab.SIMULATED, reason="on a GPU it raises"),
            )
            for fn in (interpreted, simulated)
        ),
    ],
)
def test_more_wrong_kernels(fn, problem, bug):
    KEPT.clear()
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(fn, problem)
    assert caught.value.bug == bug, str(caught.value)


def test_a_property_runs_in_guarded_memory():
    """The sizes are right; what only a property sees writes past its output."""

    def twelve(fn):
        a = torch.ones((2, 12), device=lab.DEVICE.torch)
        return None if torch.equal(fn(a, a), blend_right(a, a)) else "it is not the blend"

    def stray(a, b):
        y = blend_right(a, b)
        if tuple(a.shape) == (2, 12):
            y.as_strided((5,), (1,), y.storage_offset() + y.numel() + 7).fill_(0)
        return y

    guarded = dataclasses.replace(
        BLEND, properties=(lab.Property("twelve are blended", "wrong sign", twelve),)
    )
    assert lab.check(blend_right, guarded).state == "🟢"
    with pytest.raises(lab.CheckFailed, match=r"5 item\(s\) after the end") as caught:
        lab.check(stray, guarded)
    assert caught.value.bug == "out-of-bounds store"
    assert "property: twelve are blended" in str(caught.value)


def test_kernels_are_found_wherever_the_launcher_keeps_them(tmp_path, monkeypatch):
    (tmp_path / "their_kernels.py").write_text(
        "import labkit as lab\nfrom numba import cuda\n\n\n"
        "@cuda.jit\ndef k(a, b, y):\n    i = cuda.grid(1)\n"
        "    if i < y.shape[0]:\n        y[i] = a[i] + 2 * b[i]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import their_kernels

    in_a_list = [their_kernels.k]

    def through_a_module(a, b):
        y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        if a.numel():
            flat = (a.reshape(-1), b.reshape(-1), y.view(-1))
            their_kernels.k[triton.cdiv(a.numel(), 64), 64, lab.stream()](*flat)
        return y

    class Launcher:
        def __call__(self, a, b):
            return through_a_module(a, b)

    assert [k.name for k in kernels_of(through_a_module)] == ["k"]
    assert [k.name for k in kernels_of(lambda a, b: in_a_list[0])] == ["k"]
    assert [k.name for k in kernels_of(Launcher())] == ["k"]
    assert lab.check(through_a_module, BLEND).state == "🟢"


def test_an_autotuned_kernel_is_not_claimed_to_be_verified():
    @triton.autotune([triton.Config({"BLOCK": 64})], key=["N"])
    @triton.jit
    def tuned_kernel(a_ptr, y_ptr, N, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(a_ptr + offs, mask=offs < N), mask=offs < N)

    def tuned(a, b):
        y = torch.empty_like(a)
        tuned_kernel[lambda meta: (triton.cdiv(a.numel(), meta["BLOCK"]),)](a, y, a.numel())
        return y

    if lab.SIMULATED:
        assert "autotune needs a GPU" in lab.check(tuned, BLEND).note


@pytest.mark.parametrize(
    "problem", [p for ladder in ladders() for p in ladder.problems], ids=lambda p: p.name
)
def test_each_suspect_is_named_by_its_own_class(problem):
    """A suspect's formula, run as a kernel, is found out; some show at other sizes only."""
    sizes = [s for s in problem.test_sizes if "M" not in s or s["M"] < 100]
    for bug, formula in problem.suspects.items():
        shows = False
        for size in sizes:
            inputs = problem.inputs(torch.float64, **size)
            try:
                wrong, truth = lab.outputs(formula(*cloned(inputs))), problem.truth(*inputs)
            except ValueError:  # an IndexError would stop a GPU
                continue
            shows |= any(
                w.shape == t.shape and (w - t).abs().max() > 1e-3
                for w, t in zip(wrong, truth, strict=True)
            )
        if not shows:
            continue

        def wrong(*args, formula=formula):
            dtype = next(a.dtype for a in args if is_float(a))
            exact = formula(*(a.double() if is_float(a) else a for a in args))
            return tuple(o.to(dtype) if is_float(o) else o for o in lab.outputs(exact))

        with pytest.raises(lab.CheckFailed) as caught:
            lab.check(wrong, problem)
        assert caught.value.bug == bug, str(caught.value)


def write_rows(x, slots, cache):
    """A cache that is written to: row i of x goes to row slots[i]."""
    cache[slots] = x
    return (cache,)


WRITE = dataclasses.replace(
    ROW_SUM,
    name="write_rows",
    inputs=lambda dtype, seed=0, *, M, N: (
        *lab.randn((M, N), dtype=dtype, seed=seed),
        torch.arange(M, device=lab.DEVICE.torch) * 2,
        *lab.randn((2 * M, N), dtype=dtype, seed=seed + 1),
    ),
    reference=write_rows,
    library=write_rows,
    mutates=("cache",),
)


def test_a_cache_may_be_written_and_nothing_else():
    assert lab.check(write_rows, WRITE).state == "🟢"

    def spoils_x(x, slots, cache):
        write_rows(x, slots, cache)
        x.zero_()
        return (cache,)

    def slot_off_by_one(x, slots, cache):
        return write_rows(x, slots + 1, cache)

    for wrong, words in ((spoils_x, "modifies its input"), (slot_off_by_one, "values are wrong")):
        with pytest.raises(lab.CheckFailed, match=words):
            lab.check(wrong, WRITE)


@pytest.mark.skipif(not lab.SIMULATED, reason="of Numba's simulator")
def test_threads_of_a_simulated_block_share_one_array(monkeypatch):
    """Also if all ask for it at the same time."""
    from numba.cuda.simulator import kernelapi

    empty, everybody = kernelapi.np.empty, threading.Barrier(8)

    def slowly(*args):
        time.sleep(0.02)
        return empty(*args)

    monkeypatch.setattr(kernelapi.np, "empty", slowly)
    memory, got = kernelapi.FakeCUDAShared(0), []

    def ask():
        everybody.wait()
        a = memory.array(4, float32)
        b = memory.array(2, float32)
        got.append((id(a), id(b), a.shape, b.shape))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(got)) == 1
    assert got[0][2:] == ((4,), (2,))


@pytest.mark.skipif(not lab.SIMULATED, reason="of Numba's simulator")
def test_a_device_function_of_another_module_is_simulated_until_the_launch_ends():
    here = {"cuda": cuda}
    text = "@cuda.jit(device=True)\ndef lane():\n    return cuda.threadIdx.x\n"
    exec(text, here)  # a module of its own
    lane = here["lane"]

    @cuda.jit
    def kernel(out, where):
        out[cuda.threadIdx.x] = lane() + lane()
        if here["cuda"] is where:
            out[cuda.threadIdx.x] = -1

    out = torch.zeros(4, dtype=torch.int32)
    for _ in range(2):
        kernel[1, 4](out, cuda)
        assert out.tolist() == [0, 2, 4, 6]
        assert here["cuda"] is cuda
    with pytest.raises(TypeError):
        kernel[1, 4](out, cuda, 1)
    assert here["cuda"] is cuda
