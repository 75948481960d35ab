"""Every rung of the named chapters, every dtype, every test size once: to run under a sanitizer.

    compute-sanitizer --tool memcheck python solutions/_tuning/sanitize.py rope swiglu
"""

import labkit as lab

import sys

import torch

for slug in sys.argv[1:]:
    ladder, _ = lab.find(slug)
    for rung in ladder:
        problem = ladder.problem_of(rung)
        sizes = [*problem.test_sizes, *([problem.empty_size] if problem.empty_size else [])]
        for dtype in rung.dtypes or problem.dtypes:
            for size in sizes:
                rung.fn(*problem.inputs(dtype, **size))
        torch.cuda.synchronize()
        print(rung.name, "ran", flush=True)
