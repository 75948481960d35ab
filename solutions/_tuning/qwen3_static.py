"""Why does the static cache in a CUDA graph write other tokens than the same launched by Python?

PYTHONPATH=. python solutions/_tuning/qwen3_static.py        about 40 s
"""

import labkit  # noqa: F401 (first: it starts the simulators)

import torch

from solutions.qwen3_decode import reference, weights
from solutions.qwen3_decode.config import QWEN3_0_6B
from solutions.qwen3_decode.gate import STALE, fill
from solutions.qwen3_decode.rungs import StaticStep

TOKENS = 160


@torch.no_grad()
def main() -> None:
    """Two launched by Python and two in graphs, fed with the same tokens, step by step."""
    model = weights.random_model(QWEN3_0_6B)
    for S in (584, 1281):
        first = reference.new_cache(QWEN3_0_6B, 300, torch.bfloat16, model.embed.device)
        first.k.normal_(), first.v.normal_()
        steps = {}
        for name in ("eager", "eager again", "graph", "graph again"):
            cache = reference.new_cache(QWEN3_0_6B, S, torch.bfloat16, model.embed.device)
            steps[name] = StaticStep(model, cache)
            if "graph" in name:
                steps[name].capture()
            fill(steps[name], first, 300)
            steps[name].start(1, 300)
        off = dict.fromkeys(steps, 0)
        for i in range(TOKENS):
            token = steps["eager"].tokens[300 + i].clone()
            logits = {}
            for name, step in steps.items():
                step.tokens[300 + i] = token
                step.decode_many(1)
                logits[name] = step.logits.float()
            for name, x in logits.items():
                if not torch.equal(x, logits["eager"]):
                    if not off[name]:
                        gap = (x - logits["eager"]).abs().max().item()
                        print(f"S={S}: {name} first differs at step {i}, by {gap:.3g}", flush=True)
                    off[name] += 1
        print(f"S={S}, {STALE=}: steps of {TOKENS} that differ from eager: {off}", flush=True)


if __name__ == "__main__":
    main()
