"""The lens: its counts on kernels whose counts are known, and every bug that it can name."""

import labkit as lab
from labkit import tracing
from labkit.lens import LensUnavailable, NothingLaunched, _elsewhere, lens, trace

import pickle

import pytest
import torch
import triton
import triton.language as tl
from numba import cuda, float32, int32

pytestmark = pytest.mark.skipif(not lab.SIMULATED, reason="traces under the simulators")

TILE = 32


@cuda.jit
def copy_kernel(x, y, stride):
    """Thread i writes y[i]."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i * stride % x.shape[0]]


def copy(x, stride=1):
    """Read `stride` elements apart."""
    y = torch.empty(64, dtype=x.dtype)
    copy_kernel[2, 32](x, y, stride)
    return y


@cuda.jit
def transpose_kernel(x, y):
    """One block transposes a tile through unpadded shared memory."""
    t = cuda.shared.array((TILE, TILE), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    t[ty, tx] = x[ty, tx]
    cuda.syncthreads()
    y[ty, tx] = t[tx, ty]


@cuda.jit
def transpose_padded_kernel(x, y):
    """The same with a column of padding."""
    t = cuda.shared.array((TILE, TILE + 1), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    t[ty, tx] = x[ty, tx]
    cuda.syncthreads()
    y[ty, tx] = t[tx, ty]


def transposed(kernel):
    """A launcher of one of the two."""

    def transpose(x):
        y = torch.empty_like(x)
        kernel[1, (TILE, TILE)](x, y)
        return y

    return transpose


@cuda.jit
def sum_kernel(x, y):
    """Block b sums 64 elements in a tree."""
    s = cuda.shared.array(64, float32)
    tx = cuda.threadIdx.x
    s[tx] = x[cuda.blockIdx.x * 64 + tx]
    cuda.syncthreads()
    half = 32
    while half > 0:
        if tx < half:
            s[tx] += s[tx + half]
        cuda.syncthreads()
        half //= 2
    if tx == 0:
        y[cuda.blockIdx.x] = s[0]


@cuda.jit
def sum_race_kernel(x, y):
    """The tree with its barriers forgotten."""
    s = cuda.shared.array(64, float32)
    tx = cuda.threadIdx.x
    s[tx] = x[cuda.blockIdx.x * 64 + tx]
    half = 32
    while half > 0:
        if tx < half:
            s[tx] += s[tx + half]
        half //= 2
    if tx == 0:
        y[cuda.blockIdx.x] = s[0]


@cuda.jit
def divergent_kernel(x, y):
    """Half of the block meets the barrier."""
    s = cuda.shared.array(32, float32)
    tx = cuda.threadIdx.x
    s[tx] = x[tx]
    if tx < 16:
        cuda.syncthreads()
    y[tx] = s[tx]


@cuda.jit
def shift_kernel(x, y):
    """Off by one to the left: x[-1] wraps."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i - 1]


@cuda.jit
def unguarded_kernel(x, y):
    """No tail guard."""
    i = cuda.grid(1)
    y[i] = x[i] + 1


@cuda.jit
def histogram_kernel(x, y):
    """Counts without atomics."""
    i = cuda.grid(1)
    y[x[i]] += 1


@cuda.jit
def histogram_atomic_kernel(x, y):
    """Counts with atomics."""
    i = cuda.grid(1)
    cuda.atomic.add(y, x[i], 1)


@cuda.jit
def neighbour_kernel(x, y):
    """Reads what the next block writes."""
    i = cuda.grid(1)
    y[i] = x[i] + 1
    if cuda.threadIdx.x == 31 and i + 1 < x.shape[0]:
        y[i] += y[i + 1]


@cuda.jit
def last_block_kernel(x, part, count, y):
    """The last block to arrive, told by an atomic, adds the parts."""
    i, b = cuda.grid(1), cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        part[b] = x[i]
        cuda.threadfence()
        if cuda.atomic.add(count, 0, 1) == cuda.gridDim.x - 1:
            y[0] = part[0] + part[1]


@cuda.jit
def uninitialised_kernel(x, y):
    """Half of the shared array is never written."""
    s, k = cuda.shared.array(32, float32), cuda.shared.array(32, int32)
    tx = cuda.threadIdx.x
    k[tx] = tx
    if tx < 16:
        s[tx] = x[tx]
    cuda.syncthreads()
    y[tx] = s[k[31 - tx]]


def launcher(kernel, grid, block, out=None):
    """A launcher with one output, like x unless `out` is given."""

    def launch(x, *rest):
        y = torch.zeros_like(x) if out is None else torch.zeros(out, dtype=x.dtype)
        kernel[grid, block](x, *rest, y)
        return y

    return launch


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Program m normalises row m in two passes over it."""
    row = tl.program_id(0) * N
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0.0)
        total += x * x
    rstd = 1 / tl.sqrt(tl.sum(total) / N + 1e-6)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0.0)
        w = tl.load(w_ptr + offs, mask=offs < N, other=0.0)
        tl.store(y_ptr + row + offs, x * rstd * w, mask=offs < N)


def rms_norm(x, w):
    """Two passes."""
    y = torch.empty_like(x)
    rms_norm_kernel[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=64)
    return y


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Neither the load nor the store is masked."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)


@triton.jit
def same_cell_kernel(x_ptr, y_ptr, ATOMIC: tl.constexpr):
    """Every program adds to y[0]."""
    x = tl.load(x_ptr + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(y_ptr, x)
    else:
        tl.store(y_ptr, tl.load(y_ptr) + x)


@triton.jit
def columns_kernel(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    """Copies a tile whose first dimension is contiguous."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + i + j * stride, tl.load(x_ptr + i + j * stride))


def bugs(report):
    """Names of the findings."""
    return [f.bug for f in report.findings]


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (32, 32)])
def test_sectors_of_strided_reads(stride, sectors):
    report = lens(copy, inputs=(torch.arange(2048.0), stride))
    assert report.sectors("x") == sectors
    assert report.sectors("y", "write") == 4
    assert not report.findings


def test_sectors_depend_on_the_element_size():
    report = lens(copy, inputs=(torch.arange(64, dtype=torch.float64),))
    assert report.sectors("x") == 8
    assert report.bytes == 64 * 8 * 2


def test_addresses_of_views_count_from_the_allocation():
    x = torch.arange(1024.0)
    assert lens(copy, inputs=(x[::8][:64],)).sectors("x") == 32
    assert lens(copy, inputs=(x[1:65],)).sectors("x") == 5  # straddles a boundary
    pattern = lens(copy, inputs=(x[1:],)).pattern("x", warp=1)
    assert pattern == {lane: 4 * (1 + 32 + lane) for lane in range(32)}


def test_bank_conflicts_of_a_transpose():
    x = torch.randn(TILE, TILE)
    plain, padded = (
        lens(transposed(k), inputs=(x,)) for k in (transpose_kernel, transpose_padded_kernel)
    )
    assert (plain.ways("t"), padded.ways("t")) == (32, 1)
    assert plain.ways("t", "write") == 1
    assert not plain.findings
    assert not padded.findings
    assert plain.use("x").reads_per_element == 1


def test_right_reduction_has_no_findings():
    with trace() as t:
        y = launcher(sum_kernel, 2, 64, out=2)(torch.ones(128))
    assert y.tolist() == [64, 64]
    assert not t.report().findings


def test_missing_barrier_names_both_lines():
    report = lens(launcher(sum_race_kernel, 2, 64, out=2), inputs=(torch.ones(128),))
    assert set(bugs(report)) == {"missing barrier"}
    texts = {(f.text, f.other_text) for f in report.findings}
    first, tree = "s[tx] = x[cuda.blockIdx.x * 64 + tx]", "s[tx] += s[tx + half]"
    assert {frozenset(pair) for pair in texts} >= {frozenset((first, tree)), frozenset((tree,))}
    assert "thread 1 of block 0 writes s[1], thread 0 of block 0 reads it" in str(report)


def test_barrier_in_a_divergent_branch():
    report = lens(launcher(divergent_kernel, 1, 32), inputs=(torch.ones(32),))
    (finding,) = report.findings
    assert finding.bug == "barrier in a divergent branch"
    assert (finding.text, finding.count) == ("cuda.syncthreads()", 16)
    assert finding.example == (
        "thread 0 of block 0 meets 1 barrier, thread 16 of block 0 meets 0 barriers"
    )


def test_negative_index():
    report = lens(launcher(shift_kernel, 1, 32), inputs=(torch.ones(32),))
    (finding,) = report.findings
    assert (finding.bug, finding.arg, finding.count) == ("negative index", "x", 1)
    assert finding.example == "thread 0 of block 0 reads x[-1]; its shape is (32)"


def test_out_of_bounds_in_numba():
    report = lens(launcher(unguarded_kernel, 2, 32), inputs=(torch.ones(40),))
    assert bugs(report) == ["out-of-bounds store", "out-of-bounds read"]
    store = report.findings[0]
    assert (store.arg, store.text, store.count) == ("y", "y[i] = x[i] + 1", 24)
    assert store.example == "thread 8 of block 1 writes y[40]; its shape is (40)"
    assert report.findings[0].bug == "out-of-bounds store"


def test_out_of_bounds_in_triton_corrupts_nothing():
    memory = torch.zeros(64)
    x, y = torch.ones(24), memory[8:32]

    def launch(x):
        unmasked_kernel[(2,)](x, y, BLOCK=16)

    report = lens(launch, inputs=(x,))
    assert bugs(report) == ["out-of-bounds store", "out-of-bounds read"]
    assert [f.count for f in report.findings] == [8, 8]
    assert report.findings[0].example == "program 1 writes element 24 of y_ptr; it has 24"
    assert memory.tolist() == [0] * 8 + [2] * 24 + [0] * 32


def test_lost_update_and_atomics():
    x = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    report = lens(launcher(histogram_kernel, 2, 32), inputs=(x,))
    assert bugs(report) == ["lost update"]
    assert report.findings[0].text == "y[x[i]] += 1"
    with trace() as t:
        y = launcher(histogram_atomic_kernel, 2, 32)(x)
    assert torch.equal(y[:4], torch.bincount(x, minlength=4).int())
    assert not t.report().findings
    use = t.report().use("y")
    assert (use.reads, use.writes) == (64, 64)


def test_race_between_blocks():
    report = lens(launcher(neighbour_kernel, 2, 32), inputs=(torch.ones(64),))
    (finding,) = report.findings
    assert finding.bug == "race between blocks"
    assert {finding.text, finding.other_text} == {"y[i] = x[i] + 1", "y[i] += y[i + 1]"}
    assert "thread 0 of block 1 writes y[32]" in finding.example


def test_an_atomic_orders_blocks():
    inputs = torch.ones(64), torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    report = lens(launcher(last_block_kernel, 2, 32), inputs=inputs)
    assert not report.findings


def test_uninitialised_shared_memory():
    with trace() as t:
        y = launcher(uninitialised_kernel, 1, 32)(torch.ones(32))
    assert y[:16].isnan().all()
    assert (y[16:] == 1).all()
    (finding,) = t.report().findings
    assert (finding.bug, finding.arg) == ("uninitialised shared memory", "s")
    assert (finding.text, finding.count) == ("y[tx] = s[k[31 - tx]]", 16)


def test_triton_reads_per_element_and_masks():
    report = lens(rms_norm, inputs=(torch.randn(4, 100), torch.randn(100)))
    each = {u.arg: (u.reads_per_element, u.writes_per_element) for u in report.args}
    assert each == {"x_ptr": (2, 0), "w_ptr": (4, 0), "y_ptr": (0, 1)}
    assert not report.findings
    assert report.bytes == 4 * (2 * 400 + 400 + 400)


def test_triton_requests_run_along_the_contiguous_dimension():
    def launch(x):
        y = torch.empty_like(x)
        columns_kernel[(1,)](x, y, 32, BLOCK=32)
        return y

    assert lens(launch, inputs=(torch.randn(32, 32),)).sectors("x_ptr") == 4


@pytest.mark.parametrize(("atomic", "found"), [(True, []), (False, ["lost update"])])
def test_triton_race_between_programs(atomic, found):
    def launch(x):
        y = torch.zeros(1)
        same_cell_kernel[(4,)](x, y, ATOMIC=atomic)
        return y

    report = lens(launch, inputs=(torch.ones(4),))
    assert bugs(report) == found


def test_inputs_are_not_changed_and_may_share_memory():
    pair = torch.zeros(2, 64)

    def launch(x, y):
        copy_kernel[2, 32](x, y, 2)
        copy_kernel[2, 32](x, x, 2)

    pair[0] = torch.arange(64.0)
    report = lens(launch, inputs=(pair[0], pair[1]))
    assert pair[1].eq(0).all()
    assert report.pattern("y", "write", warp=0)[0] == 256
    assert {"race between threads", "race between blocks"} >= set(bugs(report)) != set()


def test_launches_of_one_kernel_are_added_up():
    def launch(x):
        for _ in range(3):
            y = copy(x)
        return rms_norm(y[None], y)

    report = lens(launch, inputs=(torch.arange(64.0),))
    assert report.launches == (
        "3 × copy_kernel: 2 blocks of 32 threads",
        "rms_norm_kernel: 1 program",
    )
    assert report.use("x").reads_per_element == 3


PROBLEM = lab.Problem(
    name="rms_norm",
    inputs=lambda dtype, seed=0, *, M, N: (
        *lab.randn((M, N), dtype=dtype, seed=seed),
        *lab.randn((N,), dtype=dtype, seed=seed + 1),
    ),
    reference=lambda x, w: x * w,
    library=lambda x, w: x * w,
    work=lambda dtype, M, N: lab.Work(bytes=(2 * M * N + N) * dtype.itemsize, flops=4 * M * N),
    terms=lambda M, N: N,
    dtypes=(torch.float32,),
    test_sizes=({"M": 4, "N": 64}, {"M": 1, "N": 1}),
    bench_size={"M": 4, "N": 64},
    sweep=(),
    target=(),
)


def test_report_against_the_ledger_is_the_same_every_time():
    first, again = (lens(lab.Rung(rms_norm, "triton"), PROBLEM) for _ in range(2))
    assert first.setting == "float32, M=4, N=64"
    assert first.ledger_bytes == (2 * 4 * 64 + 64) * 4
    assert first.ratio == (2 * 256 + 256 + 256) / (2 * 256 + 64)
    assert str(first) == str(again)
    assert first == again
    assert "2.00" in first._repr_html_()
    assert "/" not in str(first).replace("sectors/request", "").replace("1 / tl", "")


def test_another_process_gives_the_same_report():
    """What happens on a GPU: source, inputs and strides travel, the report comes back."""
    inputs = (torch.arange(4096.0)[1::2], 4)
    assert str(_elsewhere(copy, inputs)) == str(lens(copy, inputs=inputs)).partition(": ")[2]


def test_picture():
    report = pickle.loads(pickle.dumps(lens(copy, inputs=(torch.arange(2048.0), 32))))
    picture = report.plot("x")
    assert picture.title == "One warp's load touches 32 sectors; 4 would do"
    assert picture.png().startswith(b"\x89PNG")
    banks = lens(transposed(transpose_kernel), inputs=(torch.randn(TILE, TILE),)).plot("t")
    assert banks.title == "One warp's load is a 32-way bank conflict"


def doubled(x):
    return 2 * x


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="needs Numba or Triton"):
        lens(lab.Rung(lambda x: x, "cuda"), inputs=(torch.ones(1),))
    with pytest.raises(ValueError, match="launched no Numba or Triton kernel"):
        lens(torch.neg, inputs=(torch.ones(1),))
    with pytest.raises(NothingLaunched):
        _elsewhere(doubled, (torch.ones(1),))
    with pytest.raises(ValueError, match="needs a problem or inputs"):
        lens(copy)
    with pytest.raises(ValueError, match="no read of 'z'"):
        lens(copy, inputs=(torch.arange(64.0),)).sectors("z")
    monkeypatch.setattr(tracing, "_NUMBA", ("numba.cuda.simulator.kernel", "gone"))
    monkeypatch.setattr(tracing, "_TRITON", ("gone",))
    with pytest.raises(LensUnavailable, match="does not know these versions: numba "):
        lens(copy, inputs=(torch.arange(64.0),))
