"""Which operation of the static cache's step gives other bits when it runs again?

PYTHONPATH=. python solutions/_tuning/qwen3_static.py        about 20 s

Two steps on equal caches, launched by Python. Of each operation the result is kept; where results
part for the first time, the operation runs again many times on the same inputs.
"""

import labkit  # noqa: F401 (first: it starts the simulators)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from solutions._qwen3_decode import reference, weights
from solutions._qwen3_decode.config import QWEN3_0_6B
from solutions._qwen3_decode.gate import fill
from solutions._qwen3_decode.rungs import StaticStep

TOKENS, AGAIN = 160, 300
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def copied(x):
    """A copy with the same strides; what is no tensor as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


class Trace(TorchDispatchMode):
    """Keeps every operation with copies of what it took and gave."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it, keep it."""
        took = [copied(a) for a in args]
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        gave = first.clone() if isinstance(first, torch.Tensor) else None
        self.seen.append((func, args, took, kwargs or {}, gave))
        return out


def result(func, args, kwargs):
    """The first output."""
    out = func(*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def main(config=QWEN3_0_6B) -> None:
    """Step by step, for two sizes of the cache."""
    model = weights.random_model(config, device=DEVICE)
    for S in (584, 1281):
        first = reference.new_cache(config, 300, torch.bfloat16, model.embed.device)
        first.k.normal_(), first.v.normal_()
        steps = []
        for _ in range(2):
            cache = reference.new_cache(config, S, torch.bfloat16, model.embed.device)
            steps.append(StaticStep(model, cache))
            fill(steps[-1], first, 300)
            steps[-1].start(1, 300)
        for i in range(TOKENS):
            token, traces = steps[0].tokens[300 + i].clone(), []
            for step in steps:
                step.tokens[300 + i] = token
                with Trace() as trace:
                    step.decode_many(1)
                traces.append(trace.seen)
            found = None
            for n, (a, b) in enumerate(zip(*traces, strict=True)):
                if a[4] is not None and not torch.equal(a[4], b[4]):
                    found = n, a, b
                    break
            if not found:
                continue
            n, a, b = found
            func, args, took, kwargs, gave = a
            same = [torch.equal(x, y) for x, y in zip(took, b[2], strict=True)
                    if isinstance(x, torch.Tensor)]  # fmt: skip
            shapes = [(tuple(x.shape), x.stride(), hex(x.data_ptr())) for x in args
                      if isinstance(x, torch.Tensor)]  # fmt: skip
            gap = (gave.float() - b[4].float()).abs()
            print(f"S={S} step {i} op {n} of {len(traces[0])}: {func}; inputs equal {same}")
            print(f"   off in {int((gap > 0).sum())} of {gap.numel()}, by {gap.max():.3g}; {shapes}")
            for name, with_args in (("its own inputs", args), ("copies", took)):
                for whose, want in (("a", gave), ("b", b[4])):
                    off = sum(
                        not torch.equal(result(func, with_args, kwargs), want)
                        for _ in range(AGAIN)
                    )
                    print(f"   again on {name}: {off} of {AGAIN} differ from {whose}", flush=True)
            break
        else:
            print(f"S={S}: no difference in {TOKENS} steps", flush=True)


if __name__ == "__main__":
    main()
