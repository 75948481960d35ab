"""Every rung, op, mutant and exercise of every chapter; ids start with the chapter's slug."""

import labkit as lab
from labkit import pages
from labkit.check import error_over_allowed
from labkit.exercise import define, definition, skeleton
from labkit.ladder import ladders
from labkit.launch import kernels_of
from labkit.problem import cloned

import importlib
import inspect

import pytest
import torch

from solutions.softmax import CLUSTERS, cluster_refusal, softmax_masked

LADDERS = ladders()
EVERY = [(ladder, rung) for ladder in LADDERS for rung in ladder]
# Whole models take no part in most tests below: they have their own, test_qwen3_decode*.py.
RUNGS = [(ladder, rung) for ladder, rung in EVERY if ladder.problem_of(rung).measure is None]
PROBLEMS = [(ladder, p) for ladder in LADDERS for p in ladder.problems if p.measure is None]
CHECKED = RUNGS if lab.SIMULATED else EVERY  # under a simulator, a model takes minutes
EXERCISES = [(ladder, exercise) for ladder in LADDERS for exercise in ladder.exercises]
GALLERY = pages.comparable((pages.BOOK / "bug_gallery.md").read_text())
MUTANTS = [(ladder, e, m) for ladder, e in EXERCISES for m in e.mutants]


def ids(items):
    """`rms_norm-rms_norm_fused`, `rms_norm-rms_norm_tiled-no_barrier`, …"""
    return ["-".join(getattr(p, "slug", None) or name(p) for p in item) for item in items]


def name(part):
    return getattr(part, "rung_name", None) or part.name


@pytest.mark.parametrize(("ladder", "rung"), CHECKED, ids=ids(CHECKED))
def test_rung_is_right(ladder, rung):
    verdict = lab.check(rung, ladder.problem_of(rung))
    if lab.SIMULATED and not rung.simulates:
        assert verdict.state == "⚪"
        assert "sm_120" in verdict.note
    else:
        assert verdict.state == "🟢"
        assert verdict.worst <= 1


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_rung_is_right_on_many_seeds(ladder, rung):
    if lab.SIMULATED and not rung.simulates:
        pytest.skip("needs a CUDA GPU")
    problem = ladder.problem_of(rung)
    dtypes = (torch.float32,) if lab.SIMULATED else rung.dtypes or problem.dtypes
    sizes = (problem.test_sizes[1], problem.test_sizes[len(problem.test_sizes) // 2])
    sizes += (problem.test_sizes[-1],)
    for seed in range(20 if lab.SIMULATED else 200):  # a simulator takes its time
        dtype, size = dtypes[seed % len(dtypes)], sizes[seed % len(sizes)]
        ratio = error_over_allowed(rung.fn, problem, dtype, seed, **size)
        assert ratio <= 1, (seed, dtype, size, ratio)


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_rung_compiles_for_every_architecture(ladder, rung):
    from labkit.compile import ALL_ARCHS, compiles

    assert tuple(compiles(rung, ladder.problem_of(rung))) == tuple(ALL_ARCHS)


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_rung_compiles_in_its_other_dtypes_at_an_edge_size(ladder, rung):
    from labkit.compile import compiles

    problem, archs = ladder.problem_of(rung), ("sm_80", "sm_90")
    for dtype in rung.dtypes or problem.dtypes:
        if dtype != torch.bfloat16:
            good = compiles(rung, problem, archs, dtype=dtype, **problem.test_sizes[-1])
            assert tuple(good) == archs, dtype


@pytest.mark.parametrize(("ladder", "exercise", "mutant"), MUTANTS, ids=ids(MUTANTS))
def test_mutant_is_rejected_with_its_class(ladder, exercise, mutant):
    rung = ladder.rung(exercise.rung_name)
    if mutant.bug == "int32 overflow" and not lab.SIMULATED and lab.DEVICE.memory_bytes < 2**34:
        pytest.skip("a cache of 2^31 numbers, and as many in front of it, do not fit")
    with pytest.raises(lab.CheckFailed) as caught:
        lab.check(exercise.mutant(mutant.name, rung), ladder.problem_of(rung), gates=exercise.gates)
    assert caught.value.bug == mutant.bug, str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) < 500, "a report is for people"
    if lab.SIMULATED:
        entry = pages.gallery_entry(mutant, str(caught.value))
        assert pages.comparable(entry) in GALLERY, "`lab scorecard` writes the bug gallery"


# What a property asks for, and these rungs do not have: a workspace, templates, chapter 10's bits.
NOT_OF_THIS_RUNG = {
    "decode_attention_grouped": {"a workspace can be used again", "every template is right"},
    "decode_attention_split": {"a workspace can be used again", "every template is right"},
    "paged_kv_gathered": {"a workspace can be used again", "the bits are those of chapter 10"},
}


@pytest.mark.parametrize(("ladder", "exercise"), EXERCISES, ids=ids(EXERCISES))
def test_properties_reach_the_kernel_that_the_reader_writes(ladder, exercise):
    """And not another one, to which the launcher sends other sizes."""
    rung = ladder.rung(exercise.rung_name)
    module, problem = inspect.getmodule(rung.fn), ladder.problem_of(rung)
    names = [exercise.function] + [rung.name] * (rung.name != exercise.function)
    source = "\n\n".join(
        [skeleton(module, exercise.function), *(definition(module, n) for n in names[1:])]
    )
    launcher = define(source, dict(vars(module)), f"{module.__name__}.bare")[rung.name]
    missed = set()
    for prop in problem.properties:
        try:
            prop.holds(launcher)
        except Exception:  # the skeleton's
            continue
        missed.add(prop.text)
    assert missed == NOT_OF_THIS_RUNG.get(rung.name, set())


@pytest.mark.parametrize(("ladder", "exercise"), EXERCISES, ids=ids(EXERCISES))
def test_exercise_has_hints_and_mutants_of_known_classes(ladder, exercise):
    problem = ladder.problem_of(ladder.rung(exercise.rung_name))
    known = set(lab.BUGS) | set(problem.suspects) | {p.bug for p in problem.properties}
    assert len(exercise.hints) >= 2
    assert all(hint.strip() for hint in exercise.hints)
    assert len(exercise.mutants) >= 4
    assert {m.bug for m in exercise.mutants} <= known


@pytest.mark.parametrize(("ladder", "exercise"), EXERCISES, ids=ids(EXERCISES))
def test_skeleton_is_the_solution_without_its_body(ladder, exercise):
    module = importlib.import_module(f"solutions.{ladder.slug}")
    whole, bare = definition(module, exercise.function), skeleton(module, exercise.function)
    head, _, marker = bare.rpartition("\n")
    assert whole.startswith(head)
    assert "lab.todo(" in marker
    assert len(bare) < len(whole)


@pytest.mark.parametrize(("ladder", "exercise"), EXERCISES, ids=ids(EXERCISES))
def test_attempt_goes_through_its_three_states(ladder, exercise, monkeypatch):
    rung = ladder.rung(exercise.rung_name)
    monkeypatch.setenv("LABKIT_MODE", "learner")
    attempt = ladder.exercise(exercise.rung_name)

    def untouched(*args):
        lab.todo("about 5 lines")

    assert attempt.check(untouched).state == "⚪"
    assert attempt.kernel is rung.fn
    with pytest.raises(lab.CheckFailed):
        attempt.check(exercise.mutant(exercise.mutants[0].name, rung))
    assert attempt.state == "🔴"
    if not lab.SIMULATED or rung.simulates:
        assert attempt.check(rung.fn).state == "🟢"
        assert attempt.whose == "yours"
    monkeypatch.setenv("LABKIT_MODE", "strict")
    with pytest.raises(lab.CheckFailed, match="not attempted"):
        attempt.check(untouched)
    monkeypatch.setenv("LABKIT_MODE", f"mutant:{exercise.mutants[0].name}")
    with pytest.raises(lab.CheckFailed):
        attempt.check(untouched)


def registered_outputs(op, problem, inputs):
    """What an op computes, then the inputs that it writes to (registered, it returns no input)."""
    inputs = cloned(inputs)
    names = list(inspect.signature(problem.library).parameters)
    result = op(*inputs)
    written = tuple(inputs[names.index(m)] for m in problem.mutates)
    return (() if result is None else lab.outputs(result)) + written


@pytest.mark.parametrize(("ladder", "problem"), PROBLEMS, ids=ids(PROBLEMS))
def test_op_is_exported_and_registered(ladder, problem):
    module = importlib.import_module(f"solutions.{ladder.slug}")
    op = getattr(module, problem.name)
    last = [r for r in ladder if ladder.problem_of(r) is problem][-1]
    assert op is last.fn
    registered = getattr(torch.ops.kernel_ladder, problem.name).default
    inputs = problem.inputs(torch.float32, **problem.test_sizes[-1])
    tests = ("test_schema", "test_faketensor")
    if lab.SIMULATED and not last.simulates:
        inputs, tests = problem.inputs(torch.float32, **problem.empty_size), tests[1:]
    with torch.no_grad():
        torch.library.opcheck(registered, inputs, test_utils=tests)
    got = registered_outputs(registered, problem, inputs)
    wanted = lab.outputs(op(*cloned(inputs)))
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_bad_input_is_named(ladder, rung):
    problem = ladder.problem_of(rung)
    good = problem.inputs(torch.float32, **problem.test_sizes[-1])
    names = list(inspect.signature(rung.fn).parameters)
    for i, value in enumerate(good):
        if not isinstance(value, torch.Tensor):
            continue
        bad_values = [
            (value.to(torch.float64), names[i]),  # wrong dtype
            (value[None], "shape|dim|rank"),  # wrong rank
            (value.tolist(), names[i]),  # not a tensor
        ]
        if value.shape[-1] > 1:
            bad_values.append((value[..., :-1].contiguous(), "shape"))  # mismatched size
        if not lab.SIMULATED:
            bad_values.append((value.cpu(), names[i]))  # mixed devices
        for bad, words in bad_values:
            args = [*good[:i], bad, *good[i + 1 :]]
            if isinstance(bad, torch.Tensor) and len(good) == 1:
                continue
            with pytest.raises((TypeError, ValueError), match=words):
                rung.fn(*args)
    if "eps" in names:
        for eps in (0.0, -1e-6):
            with pytest.raises(ValueError, match=f"eps.*{eps}"):
                rung.fn(*good, eps)


def test_a_pair_of_outputs_is_a_pair():
    from solutions.rms_norm import RMS_NORM_RESIDUAL, rms_norm_residual

    x, residual, w = RMS_NORM_RESIDUAL.inputs(torch.float32, M=2, N=8)
    y, new = torch.empty_like(x), torch.empty_like(x)
    got = rms_norm_residual(x, residual, w, out=(y, new))
    assert got[0] is y
    assert got[1] is new
    assert torch.equal(new, x + residual)
    for out in (y, (y,), (y, new, w)):
        with pytest.raises(TypeError, match=r"out is a .*, must be a pair"):
            rms_norm_residual(x, residual, w, out=out)
    with pytest.raises(ValueError, match=r"out_residual has shape \(8,\)"):
        rms_norm_residual(x, residual, w, out=(y, w))


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_rung_states_its_idea_in_one_line(ladder, rung):
    assert 20 <= len(rung.idea) <= 95
    kinds = {k.kind for k in kernels_of(rung.fn)}
    assert rung.kind in kinds


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("ladder", "problem"), PROBLEMS, ids=ids(PROBLEMS))
def test_op_survives_compile_and_graph_capture(ladder, problem):
    op = getattr(torch.ops.kernel_ladder, problem.name)
    inputs = problem.inputs(torch.bfloat16, **problem.test_sizes[-1])
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True)
    got, want = (registered_outputs(fn, problem, inputs) for fn in (compiled, op))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    plain = getattr(importlib.import_module(f"solutions.{ladder.slug}"), problem.name)
    plain(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = lab.outputs(plain(*inputs))
    fresh = problem.inputs(torch.bfloat16, seed=7, **problem.test_sizes[-1])
    for old, new in zip(inputs, fresh, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(recorded, lab.outputs(plain(*fresh)), strict=True):
        assert torch.equal(got, want)


def captured_sizes(problem):
    """The last test size, and all that are swept; with contexts of all lengths, too."""
    sizes = [problem.test_sizes[-1], *problem.sweep]
    if "ragged" in inspect.signature(problem.inputs).parameters:
        sizes += [size | {"ragged": 1} for size in sizes]
    return sizes


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("ladder", "problem"), PROBLEMS, ids=ids(PROBLEMS))
def test_op_given_its_memory_allocates_nothing_in_a_graph(ladder, problem):
    if "out" not in inspect.signature(problem_op(ladder, problem)).parameters:
        pytest.skip("the op takes no output")
    for size in captured_sizes(problem):
        replays_without_allocating(ladder, problem, size)


def problem_op(ladder, problem):
    return getattr(importlib.import_module(f"solutions.{ladder.slug}"), problem.name)


def replays_without_allocating(ladder, problem, size):
    """Capture the op with memory of ours, then replay it on other inputs."""
    module = importlib.import_module(f"solutions.{ladder.slug}")
    op = problem_op(ladder, problem)
    names = inspect.signature(op).parameters
    inputs = problem.inputs(torch.bfloat16, **size)
    wanted = lab.outputs(op(*cloned(inputs)))
    whole = len(wanted) > 1 and not problem.mutates
    out = tuple(map(torch.empty_like, wanted)) if whole else torch.empty_like(wanted[0])
    given = {"out": out}
    if "workspace" in names:
        make = getattr(module, f"{problem.name}_workspace")
        args = inspect.signature(op).bind(*inputs).arguments
        needs = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty]
        given["workspace"] = make(**{n: args[n] for n in needs})
    op(*inputs, **given)
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), "allocation.all.allocated"
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()[count]
        captured = lab.outputs(op(*inputs, **given))
        assert torch.cuda.memory_stats()[count] == before
    assert captured[0] is lab.outputs(out)[0]
    for seed in (7, 8):
        fresh = problem.inputs(torch.bfloat16, seed=seed, **size)
        for old, new in zip(inputs, fresh, strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        graph.replay()
        for g, w in zip(captured, lab.outputs(op(*fresh)), strict=True):
            assert torch.equal(g, w), (size, seed)


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
@pytest.mark.xdist_group("memory")  # `pytest -n 14 --dist loadgroup` runs them one after another
@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=ids(RUNGS))
def test_offsets_do_not_wrap_past_2_to_31_elements(ladder, rung):
    problem, dtype = ladder.problem_of(rung), torch.bfloat16
    if problem.huge_size is None:
        pytest.skip("the problem has no huge size")
    if lab.DEVICE.memory_bytes < 5 * problem.work(dtype, **problem.huge_size).bytes:
        pytest.skip("needs more memory")
    inputs = problem.inputs(dtype, **problem.huge_size)
    again = cloned(inputs) if problem.mutates else inputs  # a copy may be gigabytes
    got, want = lab.outputs(rung.fn(*inputs)), lab.outputs(problem.library(*again))
    for g, w in zip(got, want, strict=True):
        for part in (slice(0, 1 << 20), slice(-(1 << 20), None)):
            near, far = g.view(-1)[part].float(), w.view(-1)[part].float()
            assert (near - far).abs().max() <= 2**-6 * far.abs().max()


@pytest.mark.parametrize("slug", ["decode_attention", "paged_kv"])
def test_the_rings_of_many_sequences_fit_into_smaller_gpus(slug):
    rung = next(rung for ladder, rung in EVERY if rung.name == f"{slug}_pipelined")
    problem = lab.find(slug)[1]
    card = lab.compile_card(rung, problem, archs=("sm_86", "sm_120"), **problem.bench_size)
    for arch in card.kernels[0].archs.values():
        assert arch.dynamic_shared == 96 * 1024
        assert arch.occupancy.blocks == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N", [151936, 151937])
def test_softmax_of_long_masked_rows_compiles_to_a_cluster(dtype, N):
    ladder, problem = lab.find("softmax_masked")
    rung, archs = ladder.rung("softmax_masked_fused"), ("sm_90", "sm_100")
    card = lab.compile_card(rung, problem, dtype=dtype, archs=archs, M=64, N=N)
    (kernel,) = card.kernels
    ragged = str(N % 2 == 1).lower()
    assert kernel.name.startswith("softmax_cluster_kernel<")
    assert kernel.name.endswith(f", {ragged}, true>")
    for arch, c in kernel.archs.items():
        assert not c.error, arch
        assert c.stack_bytes == 0, arch
        assert c.occupancy.blocks >= 2, arch


@pytest.mark.skipif(CLUSTERS, reason="a GPU with clusters takes such rows another way")
def test_softmax_of_long_masked_rows_needs_no_cluster():
    problem = lab.find("softmax_masked")[1]
    x, mask = problem.inputs(torch.float32, M=2, N=2**15 + 3)
    mask[1] = False
    want = problem.reference(x.double(), mask)
    assert softmax_masked(x, mask, out=x) is x
    assert (x - want).abs().max() <= 1e-6 * want.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_softmax_cluster_says_what_stands_in_the_way(dtype):
    N, pack = 151936, 16 // dtype.itemsize
    x, mask = torch.empty((1, N), dtype=dtype), torch.empty((1, N), dtype=torch.bool)
    assert cluster_refusal(x, x) == cluster_refusal(x, x, mask) == ""
    # A mask has one byte where x has two or four: its packs are 8 or 4 bytes.
    late = torch.empty(N + 1, dtype=torch.bool)[1:].view(1, N)
    assert cluster_refusal(x, x, late).startswith(f"mask starts 1 bytes after a multiple of {pack}")
    late = torch.empty(N + 1, dtype=dtype)[1:].view(1, N)
    words = f"starts {dtype.itemsize} bytes after a multiple of 16: clone it"
    assert cluster_refusal(late, x, mask) == f"x {words}"
    assert cluster_refusal(x, late, mask) == f"out {words}"
    for most, ragged in ((2**19, False), (2**19 - pack, True)):
        if dtype == torch.float32:
            most -= 2**16
        if lab.SIMULATED:  # else a block may have less shared memory
            fits = torch.empty((1, most - ragged), dtype=dtype)
            assert cluster_refusal(fits, fits) == ""
        wide = torch.empty((1, most + (1 if ragged else pack)), dtype=dtype)
        assert "a cluster holds a whole row" in cluster_refusal(wide, wide)


@pytest.mark.skipif(not CLUSTERS, reason="needs a GPU with clusters")
@pytest.mark.parametrize("late", ["x", "mask", "out"])
def test_softmax_of_long_masked_rows_may_begin_anywhere(late):
    problem = lab.find("softmax_masked")[1]
    x, mask = problem.inputs(torch.bfloat16, M=2, N=151936)
    args = {"x": x, "mask": mask, "out": torch.empty_like(x)}
    shifted = torch.empty(x.numel() + 1, dtype=args[late].dtype, device=x.device)[1:]
    args[late] = shifted.view(x.shape).copy_(args[late])
    want = softmax_masked(x, mask)
    assert (softmax_masked(**args) - want).abs().max() <= 2**-7 * want.max()
