"""The last rung of qwen3_decode on this GPU, with other bounds on registers and another head.

    PYTHONPATH=. python solutions/_tuning/qwen3_step.py        about 90 s

`down` has two blocks an SM, and beside one of `gate_up` there are registers for one: 56 a thread
where 48 would do. The bounds 5 and 6 make it 48 and 40, and nothing spills.
"""

import labkit as lab
from labkit.exercise import patched

import random
import statistics
from contextlib import ExitStack
from unittest.mock import patch

import torch

from solutions.qwen3_decode import kernels, ladder, measure

OLD = "__launch_bounds__(32 * WARPS, 2) gemv_residual_kernel"
BOUNDS = {n: {OLD: OLD.replace(", 2)", f", {n})")} for n in (5, 6)}
VARIANTS = {  # name -> patches of the text, constants of kernels.py
    "as it is": ({}, {}),
    "bounds 5": (BOUNDS[5], {}),
    "bounds 6": (BOUNDS[6], {}),
    "bounds 6, head of 8 warps": (BOUNDS[6], {"HEAD_WARPS": 8}),
    "bounds 6, head of 8 warps, 3 rows": (BOUNDS[6], {"HEAD_WARPS": 8, "HEAD_ROWS": 3}),
}
ROUNDS = 30


def built(model, cache, dependent, patches, constants):
    """A captured step from a patched text, with other constants."""
    text = patched(kernels.SOURCE, patches, "variant") if patches else kernels.SOURCE

    def cuda_kernel(name, **options):
        return lab.cuda_kernel(text, name, options=options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(kernels, "cuda_kernel", cuda_kernel))
        for name, value in constants.items():
            stack.enter_context(patch.object(kernels, name, value))
        return ladder.captured(ladder.DecodeStep(model, cache, dependent=dependent))


def main() -> None:
    """Medians of interleaved loops, dependent and not."""
    for context in (512, 8192):
        for dependent in (True, False):
            steps, first = {}, None
            for name, how in VARIANTS.items():
                model, token, position, k, v = ladder.inputs(torch.bfloat16, context=context)
                try:
                    step = built(model, measure.cache_over(model, k, v), dependent, *how)
                except Exception as why:
                    print(f"{name}: {type(why).__name__}: {str(why)[:100]}", flush=True)
                    continue
                step.start(token, position)
                text = step.decode_many(32).tolist()
                first = first or text
                same = sum(a == b for a, b in zip(text, first, strict=True))
                steps[name] = step
                if same < 32:
                    print(f"{name}: {same} of 32 tokens as the first", flush=True)
            took, order = {name: [] for name in steps}, list(steps)
            for _ in range(ROUNDS):
                random.shuffle(order)
                for name in order:
                    took[name].append(measure.loop(steps[name], token, position, 64))
            print(f"-- {context}, {'dependent' if dependent else 'one after the other'}")
            for name, times in took.items():
                print(f"  {name:36} {statistics.median(times) * 1e6:7.1f} µs", flush=True)


if __name__ == "__main__":
    main()
