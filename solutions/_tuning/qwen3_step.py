"""Time candidates for the decode step on this GPU, combine those that help.

    PYTHONPATH=. python solutions/_tuning/qwen3_step.py             at most 110 s on an H200
    PYTHONPATH=. python solutions/_tuning/qwen3_step.py --compile   registers and loads; no GPU

Prints first what the chain's phases take alone, then a line for each candidate of
`qwen3_step_candidates.py`: µs a token at two contexts, the change against the chain as it is, and
whether 64 tokens are the same. Then candidates that help are added to one another, the best first,
and kept if the sum gains by it. The work is done in a process of its own: if a candidate hangs or
breaks the GPU, another process goes on with the next one.
"""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from solutions._qwen3_decode import reference, weights
from solutions._qwen3_decode.config import QWEN3_0_6B
from solutions._qwen3_decode.step import DecodeStep
from solutions._tuning.qwen3_step_candidates import CANDIDATES, LAYER, Candidate, plan, together

LIMIT, SINGLES_END, SILENCE = 108, 78, 30  # seconds; of a process that says nothing
CONTEXTS, TOKENS, RUNS = (512, 8192), 64, 9
BARS = (550, 800)  # µs: a candidate's score is the sum of its fractions of these
SLOTS = 80  # of the cache, beside the context
LEAST_GAIN = 0.001  # of the score, for a candidate to be kept
MOST_GAP = 0.1  # of the largest logit: more is no matter of last bits
AS_IT_IS = Candidate("as it is", "")


# Chains ----------------------------------------------------------------------------------------


class Chain:
    """A candidate at one context: its launches and a graph of them."""

    def __init__(self, step: DecodeStep, context: int, launches, dependent=True, tokens=1) -> None:
        self.step, self.context, self.tokens = step, context, tokens
        self.launches = launches  # the graph has the addresses of their memory
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
        """Back to the context's end."""
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
    """Print at once."""
    print(*words, flush=True)


def phases(made: list[DecodeStep], candidate: Candidate) -> None:
    """Each phase alone, and the chain without it, as the probe had them."""
    say("phase alone: 28 launches (head: 1), µs a token, dependent | not | chain without it")
    plans = [plan(step, candidate) for step in made]
    for names in (("first", "qkv"), *((p,) for p in (*LAYER[1:], "head"))):
        row = []
        for step, context, launches in zip(made, CONTEXTS, plans, strict=True):
            alone = [x for p, x in launches if p in names]
            rest = [x for p, x in launches if p not in names]
            # The head moves the position, and without it nothing else does.
            found = [Chain(step, context, alone, d).us(5) for d in (True, False)]
            found.append(Chain(step, context, rest).us(5))
            row.append(" | ".join(f"{us:6.1f}" for us in found))
        say(
            f"  {names[-1]:10s} "
            + "   ".join(f"{c}: {r}" for c, r in zip(CONTEXTS, row, strict=True))
        )


def agreement(base: list[Chain], chains: list[Chain]) -> tuple[str, bool]:
    """Where tokens part from those of the chain as it is, and whether the logits are near.

    Other orders of sums give other last bits. Then sooner or later another token is the largest.
    """
    words, good = [], True
    for one, other in zip(base, chains, strict=True):
        (want, _), (got, last) = one.decode(TOKENS), other.decode(TOKENS)
        same = next((i for i in range(TOKENS) if want[i] != got[i]), TOKENS)
        count = min(TOKENS, (same // other.tokens + 1) * other.tokens)
        a, b = (c.decode(count)[1].float() for c in (one, other))
        gap = (a - b).abs().max().item() / a.abs().max().item()
        again = other.decode(TOKENS)
        stable = again[0] == got and torch.equal(again[1], last)
        good = good and stable and gap < MOST_GAP  # not so if it is NaN
        off = f"{same} tokens, logits off by {gap:.1%}"
        words.append(("same" if same == TOKENS and not gap else off) + " NOT STABLE" * (not stable))
    return " | ".join(dict.fromkeys(words)), good


class Session:
    """What a process knows, and leaves behind in a file for the next one."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, {"times": {}, "now": None, "failed": []}
        if path.exists():
            self.done = json.loads(path.read_text())

    def save(self, **what) -> None:
        """Change entries of the file."""
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
            how, good = agreement(base, chains) if base else ("", True)
            found = [chain.us() for chain in chains]
        except Exception as why:
            self.save(failed=[*self.done["failed"], name])
            say(f"  {name}: {type(why).__name__}: {' | '.join(str(why).splitlines()[:3])[:300]}")
            torch.cuda.synchronize()  # raises if the GPU is lost, and ends this process
            return None
        first = self.done["times"].get(AS_IT_IS.name, found)
        change = ", ".join(f"{us - was:+6.1f}" for us, was in zip(found, first, strict=True))
        title = (
            f"{parts[0].name}  [{parts[0].expected}]" if len(parts) < 2 else f"+ {parts[-1].name}"
        )
        say(f"  {found[0]:6.1f} {found[1]:6.1f}  {change}  {title}  {how}")
        if not good:
            self.save(failed=[*self.done["failed"], name])
            return None
        self.save(times=self.done["times"] | {name: found})
        return found


def score(times: list[float]) -> float:
    """The less, the better; 2 where both bars are just met."""
    return sum(us / bar for us, bar in zip(times, BARS, strict=True))


def work(path: Path, begun: float) -> None:
    """Everything, as far as the time goes."""
    session, made = Session(path), steps()
    base = [
        Chain(step, context, [x for _, x in plan(step, AS_IT_IS)])
        for step, context in zip(made, CONTEXTS, strict=True)
    ]
    session.save()
    compile_all(made[0])
    session.save()
    say(f"µs at {CONTEXTS}, change, [expected], tokens; {time.time() - begun:.0f} s")
    base[0].us()  # the clocks rise
    as_it_is = session.time(made, [], (AS_IT_IS,))
    if not session.done.get("phases"):
        session.save(phases=True)
        phases(made, AS_IT_IS)

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
        if time.time() - begun > LIMIT - 12:
            break
        found = session.time(made, base, (*kept, candidate))
        if found and score(found) < score(best) - LEAST_GAIN * len(BARS):
            kept, best = (*kept, candidate), found
    baseline("at the end")
    say(f"best {best[0]:.1f} {best[1]:.1f}: {' + '.join(c.name for c in kept)}")
    for parts in ((AS_IT_IS,), kept):
        one = together(parts)
        plans = [[x for _, x in plan(step, one)] for step in made]
        found = [
            Chain(step, context, launches, dependent=False, tokens=one.tokens).us()
            for step, context, launches in zip(made, CONTEXTS, plans, strict=True)
        ]
        say(f"  {found[0]:6.1f} {found[1]:6.1f}  without dependent launch: {one.name}")
    phases(made, together(kept))
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


def compile_all(step: DecodeStep) -> None:
    """Every candidate's kernels, many at a time; errors show again where a kernel is used."""
    kernels = {launch.kernel for c in CANDIDATES for _, launch in plan(step, c)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernel in kernels:
            pool.submit(compile_cuda, kernel, "sm_90")


@cache
def code_of(kernel) -> dict[str, int]:
    """Registers, stack, wide loads before the wait and streamed ones after it, instructions."""
    dump = compile_worker._disassemble(compile_cuda(kernel, "sm_90").code)
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", dump, re.MULTILINE)
    wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
    registers, stack = (int(re.search(rf"{what}:(\d+)", dump)[1]) for what in ("REG", "STACK"))
    return {
        "registers": registers,
        "stack": stack,
        "early": sum("LDG" in x and ".128" in x for x in lines[:wait]),
        "late": sum("LDG" in x and ".NA" in x and ".128" in x for x in lines[wait:]),
        "trigger": next(i for i, line in enumerate(lines) if "PREEXIT" in line) - wait,
        "after": len(lines) - wait,
    }


def compile_card() -> None:
    """A line for each kernel that a candidate changes, and whether neighbours fit into an SM."""
    model = weights.random_model(replace(QWEN3_0_6B, num_hidden_layers=2))
    cache = reference.new_cache(model.config, CONTEXTS[1] + SLOTS, torch.bfloat16, "cpu")
    step, seen = DecodeStep(model, cache), set()
    for candidate in (AS_IT_IS, *CANDIDATES):
        say(candidate.name)
        launches, room = plan(step, candidate), []
        for phase, x in launches:
            if x.kernel not in seen:
                seen.add(x.kernel)
                say(f"  {phase:10s} {x.kernel.name:40s} {code_of(x.kernel)}")
        for (phase, x), (_, following) in pairwise(launches[1:7]):
            used = sum(
                k * launch.block * -(-code_of(launch.kernel)["registers"] // 8) * 8
                for k, launch in ((-(-prod(x.grid) // 132), x), (1, following))
            )
            if used > 65536:
                room.append(f"{phase} and the next: {used} registers")
        say("  no room:", *room) if room else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_card()
    elif sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        supervise()
