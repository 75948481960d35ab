"""Time candidates for the decode step on this GPU, combine those that help.

    PYTHONPATH=. python solutions/_tuning/qwen3_step.py             at most 110 s on an H200
    PYTHONPATH=. python solutions/_tuning/qwen3_step.py --compile   registers and loads; no GPU

Prints first what the chain's phases take alone, then a line for each candidate of
`qwen3_step_candidates.py`: µs a token at two contexts, the change against the chain as it is, and
whether 64 tokens are the same. Then candidates that help are added to one another, the best first,
and kept if the sum gains by it. The work is done in a process of its own: if a candidate hangs or
breaks the GPU, another process goes on with the next one.
"""

import labkit as lab
from labkit import compile_worker
from labkit.compile import compile_cuda

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch

from solutions._qwen3_decode import kernels, reference, weights
from solutions._qwen3_decode.config import QWEN3_0_6B
from solutions._qwen3_decode.step import DecodeStep
from solutions._tuning.qwen3_step_candidates import CANDIDATES, LAYER, PHASES, Candidate, together
from solutions._tuning.qwen3_step_texts import text_of

LIMIT, SINGLES_END, SILENCE = 108, 80, 25  # seconds; of a process that says nothing
CONTEXTS, TOKENS, RUNS = (512, 8192), 64, 9
BARS = (550, 800)  # µs: a candidate's score is the sum of its fractions of these
SLOTS = 80  # of the cache, beside the context
LEAST_GAIN = 0.001  # of the score, for a candidate to be kept
AS_IT_IS = Candidate("as it is", "")
FUNCTIONS = {  # of kernels.py -> the phase, which may depend on the keywords
    "norm_gemv": lambda how: "first" if how["first"] else "qkv",
    "attention": lambda how: "attention",
    "new_partials": lambda how: "attention",
    "gemv_residual": lambda how: "down" if how["name"] == "intermediate_size" else "o",
    "norm_gate_up": lambda how: "gate_up",
    "norm_head": lambda how: "head",
}
WEIGHTS_OF = {"o": 1, "down": 1}  # which argument they are; else the third


# Chains ----------------------------------------------------------------------------------------


@cache
def kernel_of(text: str, name: str, **options):
    return lab.cuda_kernel(text, name, options=options)


@contextmanager
def patched(values: dict[str, object]):
    """Names of kernels.py with other values."""
    before = {name: getattr(kernels, name) for name in values}
    try:
        for name, value in values.items():
            setattr(kernels, name, value)
        yield
    finally:
        for name, value in before.items():
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
                constants | {"cuda_kernel": lambda name, **options: kernel_of(text, name, **options)}
            ):
                return function(*args, **how)

        return call

    with patched({name: changed(name) for name in FUNCTIONS}):
        launches = list(step._plan(132))
    phases = [*LAYER] * (len(launches) // len(LAYER))
    phases = ["first", *phases[1:], "head"]
    for i, (phase, launch) in enumerate(zip(phases, launches, strict=True)):
        if phase == "attention" and candidate.splits:
            launches[i] = launch = launch._replace(grid=(launch.grid[0], candidate.splits))
        if phase in candidate.ahead:
            distance, share = candidate.ahead[phase]
            j = i + distance
            last = j >= len(launches) - 1
            w = launches[i if last else j].args[WEIGHTS_OF.get(phases[j], 2)] if not last else None
            count = 0 if last else int(w.numel() * w.element_size() * share) // 16 * 16
            more = (launch.args[0] if last else w, np.uint32(count))
            launches[i] = launch._replace(args=(*launch.args, *more))
    return list(zip(phases, launches, strict=True))


class Chain:
    """A candidate at one context: its launches and a graph of them."""

    def __init__(self, step: DecodeStep, context: int, launches, dependent=True, tokens=1) -> None:
        self.step, self.context, self.tokens = step, context, tokens
        self.start()
        for launch in launches:  # compiles, and an error shows here
            launch(programmatic=dependent)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(tokens):
                for launch in launches:
                    launch(programmatic=dependent)

    def start(self) -> None:
        self.step.start(1, self.context)

    def decode(self, count: int) -> tuple[list[int], torch.Tensor]:
        """Tokens, at least so many, and the logits of the last."""
        self.start()
        for _ in range(-(-count // self.tokens)):
            self.graph.replay()
        first = self.context + 1
        return self.step.tokens[first : first + count].tolist(), self.step.logits.clone()

    def us(self, runs: int = RUNS) -> float:
        """Median µs a token of device loops of 64 tokens."""
        times = []
        for _ in range(runs):
            self.start()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self.graph.replay()  # the clocks and the queue are busy when the time begins
            begin.record()
            for _ in range(TOKENS // self.tokens):
                self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / TOKENS * 1e3)
        return statistics.median(times)


def steps() -> list[DecodeStep]:
    """A step for each context, of the real shape with random weights, keys and values."""
    model, made = weights.random_model(QWEN3_0_6B), []
    for context in CONTEXTS:
        cache = reference.new_cache(
            model.config, context + SLOTS, torch.bfloat16, model.embed.device
        )
        cache.k.normal_()
        cache.v.normal_()
        made.append(DecodeStep(model, cache, dependent=True))
    return made


# What is printed --------------------------------------------------------------------------------


def say(*words) -> None:
    print(*words, flush=True)


def phases(made: list[DecodeStep]) -> None:
    """Each phase alone, and the chain without it, as the probe had them."""
    say("phase alone: 28 launches (head: 1), µs a token, dependent | not | chain without it")
    plans = [plan(step, AS_IT_IS) for step in made]
    for names in (("first", "qkv"), *((p,) for p in (*LAYER[1:], "head"))):
        row = []
        for step, context, launches in zip(made, CONTEXTS, plans, strict=True):
            alone = [x for p, x in launches if p in names]
            rest = [x for p, x in launches if p not in names]
            # The head moves the position, and without it nothing else does.
            found = [Chain(step, context, alone, d).us(5) for d in (True, False)]
            found.append(Chain(step, context, rest).us(5))
            row.append(" | ".join(f"{us:6.1f}" for us in found))
        say(f"  {names[-1]:10s} " + "   ".join(f"{c}: {r}" for c, r in zip(CONTEXTS, row, strict=True)))


def agreement(base: list[Chain], chains: list[Chain]) -> str:
    """Where tokens part from those of the chain as it is, and how far logits are from its."""
    words = []
    for one, other in zip(base, chains, strict=True):
        (want, _), (got, last) = one.decode(TOKENS), other.decode(TOKENS)
        same = next((i for i in range(TOKENS) if want[i] != got[i]), TOKENS)
        count = min(TOKENS, (same // other.tokens + 1) * other.tokens)
        a, b = (c.decode(count)[1].float() for c in (one, other))
        gap = (a - b).abs().max().item()
        word = "same" if same == TOKENS and gap == 0 else f"{same} tokens, logits {gap:.3g}"
        again = other.decode(TOKENS)
        if again[0] != got or not torch.equal(again[1], last):
            word += " NOT THE SAME TWICE"
        if not bool(torch.isfinite(last).all()):
            word += " NOT FINITE"
        words.append(word)
    return words[0] if len(set(words)) == 1 else " | ".join(words)


class Session:
    """What a process knows, and leaves behind in a file for the next one."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, {"times": {}, "now": None, "failed": [], "kept": []}
        if path.exists():
            self.done = json.loads(path.read_text())

    def save(self, **what) -> None:
        self.done |= what
        self.path.write_text(json.dumps(self.done))

    def time(self, made, base, parts: tuple[Candidate, ...]) -> list[float] | None:
        """µs at each context, measured once; None if it does not work."""
        name = " + ".join(c.name for c in parts) or AS_IT_IS.name
        if name in self.done["failed"]:
            return None
        if name in self.done["times"]:
            return self.done["times"][name]
        self.save(now=name)
        try:
            candidate = together(parts)
            chains = [
                Chain(step, context, [x for _, x in plan(step, candidate)], tokens=candidate.tokens)
                for step, context in zip(made, CONTEXTS, strict=True)
            ]
            how = agreement(base, chains) if base else ""
            found = [chain.us() for chain in chains]
        except Exception as why:
            self.save(failed=[*self.done["failed"], name])
            say(f"  {name}: {type(why).__name__}: {' | '.join(str(why).splitlines()[:3])[:300]}")
            torch.cuda.synchronize()  # raises if the GPU is lost, and ends this process
            return None
        first = self.done["times"].get(AS_IT_IS.name, found)
        change = ", ".join(f"{us - was:+6.1f}" for us, was in zip(found, first, strict=True))
        say(f"  {found[0]:6.1f} {found[1]:6.1f}  {change}  {name}  [{candidate.expected}]  {how}")
        self.save(times=self.done["times"] | {name: found})
        return found


def score(times: list[float]) -> float:
    return sum(us / bar for us, bar in zip(times, BARS, strict=True))


def work(path: Path, begun: float) -> None:
    """Everything, as far as the time goes."""
    session, made = Session(path), steps()
    base = [
        Chain(step, context, [x for _, x in plan(step, AS_IT_IS)])
        for step, context in zip(made, CONTEXTS, strict=True)
    ]
    compile_all([x for c in CANDIDATES for x in plans_of(made[0], c)], "sm_90")
    say(f"µs at {CONTEXTS[0]} and {CONTEXTS[1]}, change, [expected], tokens; {time.time() - begun:.0f} s")
    as_it_is = session.time(made, [], (AS_IT_IS,))
    if not session.done.get("phases"):
        session.save(phases=True)
        phases(made)

    def baseline(when: str) -> None:
        say(f"  {base[0].us():6.1f} {base[1].us():6.1f}  {AS_IT_IS.name}, {when}")

    for i, candidate in enumerate(CANDIDATES):
        if time.time() - begun > SINGLES_END:
            say(f"  no time for {len(CANDIDATES) - i} more")
            break
        if i == len(CANDIDATES) // 2:
            baseline("in the middle")
        session.time(made, base, (candidate,))
    baseline("after all singles")

    known = session.done["times"]
    helpful = [c for c in CANDIDATES if c.name in known and score(known[c.name]) < score(as_it_is)]
    helpful.sort(key=lambda c: score(known[c.name]))
    kept, best = (), as_it_is
    say("together:")
    for candidate in helpful:
        if time.time() - begun > LIMIT - 8:
            break
        found = session.time(made, base, (*kept, candidate))
        if found and score(found) < score(best) - LEAST_GAIN * len(BARS):
            kept, best = (*kept, candidate), found
    baseline("at the end")
    say(f"best {best[0]:.1f} {best[1]:.1f}: {' + '.join(c.name for c in kept)}")
    session.save(now=None, finished=True)


def supervise() -> None:
    """Start `work` again and again, without what hung or died, until it has finished."""
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "session.json")
        while time.time() - begun < LIMIT - 20:
            process = subprocess.Popen([sys.executable, __file__, "--work", path, str(begun)])
            seen = time.time()
            while process.poll() is None and time.time() - begun < LIMIT:
                if path.exists():
                    seen = max(seen, path.stat().st_mtime)
                if time.time() - seen > SILENCE + (0 if path.exists() else 30):
                    say(f"  nothing for {SILENCE} s")
                    break
                time.sleep(0.2)
            process.kill()
            process.wait()
            session = Session(path)
            if session.done.get("finished") or time.time() - begun >= LIMIT:
                break
            now = session.done["now"]
            say(f"  the process ended during {now!r}; {time.time() - begun:.0f} s")
            session.save(failed=[*session.done["failed"], now])
    say(f"{time.time() - begun:.0f} s")


# Without a GPU ----------------------------------------------------------------------------------


def plans_of(step: DecodeStep, candidate: Candidate) -> list[kernels.Launch]:
    """Launches of a candidate, or none where it cannot be planned."""
    try:
        return [x for _, x in plan(step, candidate)]
    except Exception:
        say(f"  {candidate.name}:", traceback.format_exc().splitlines()[-1])
        return []


def compile_all(launches: list[kernels.Launch], arch: str) -> None:
    """Many at a time; errors show again where a kernel is used."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(compile_cuda, k, arch) for k in {x.kernel for x in launches}]:
            future.exception()


def code_of(kernel, arch: str = "sm_90") -> dict[str, int]:
    """Registers, stack, loads under way at the wait, where the trigger is, what follows."""
    dump = compile_worker._disassemble(compile_cuda(kernel, arch).code)
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", dump, re.MULTILINE)
    wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
    registers, stack = (int(re.search(rf"{what}:(\d+)", dump)[1]) for what in ("REG", "STACK"))
    return {
        "registers": registers,
        "stack": stack,
        "early": sum("LDG" in x and ".128" in x for x in lines[:wait]),
        "trigger": next(i for i, line in enumerate(lines) if "PREEXIT" in line) - wait,
        "after": len(lines) - wait,
    }


def compile_card() -> None:
    """A line for each kernel that a candidate changes, and whether neighbours fit into an SM."""
    model = weights.random_model(reduced(QWEN3_0_6B))
    cache = reference.new_cache(model.config, CONTEXTS[1] + SLOTS, torch.bfloat16, "cpu")
    step, seen = DecodeStep(model, cache), set()
    for candidate in (AS_IT_IS, *CANDIDATES):
        say(candidate.name)
        launches = plan(step, candidate)
        room = []
        for (phase, x), (_, following) in zip(launches[1:6], launches[2:7], strict=True):
            used = sum(
                k * launch.block * -(-code_of(launch.kernel)["registers"] // 8) * 8
                for k, launch in ((-(-prod(x.grid) // 132), x), (1, following))
            )
            if used > 65536:
                room.append(f"{phase} and the next: {used} registers")
            if x.kernel not in seen:
                seen.add(x.kernel)
                say(f"  {phase:10s} {x.kernel.name:40s} {code_of(x.kernel)}")
        say("  no room:", *room) if room else None


def reduced(config):
    from dataclasses import replace

    return replace(config, num_hidden_layers=2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_card()
    elif sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        supervise()
