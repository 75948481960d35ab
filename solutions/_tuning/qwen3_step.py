"""ms/token of the step's variants on a GPU: python bench_step.py [contexts...]. 0.6B shape, random weights."""
import labkit as lab
import sys, torch
from solutions._qwen3_decode import reference, weights
from solutions._qwen3_decode.config import QWEN3_0_6B as C
from solutions._qwen3_decode.step import DecodeStep, OpsStep, count_kernels
contexts = [int(a) for a in sys.argv[1:]] or [1, 512, 2048, 8192]
model = weights.random_model(C)
WEIGHTS = 2 * sum(w.numel() for w in {id(w): w for l in model.layers for w in vars(l).values()}.values()) + 2 * model.head.numel()
def cache_of(S):
    c = reference.new_cache(C, S, torch.bfloat16, model.embed.device); c.k.normal_(); c.v.normal_(); return c
for ctx in contexts:
    cache = cache_of(ctx + 80)
    for name, make, how, graph in (("ops eager", OpsStep, {}, 0), ("ops graph", OpsStep, {}, 1), ("kernels eager", DecodeStep, {}, 0),
                                   ("kernels graph", DecodeStep, {}, 1), ("dependent graph", DecodeStep, {"dependent": True}, 1)):
        step = make(model, cache, **how); step.start(1, ctx)
        if graph: step.capture()
        times = []
        for _ in range(9):
            step.start(1, ctx); step.decode_many(2); torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); step.decode_many(64); b.record(); torch.cuda.synchronize(); times.append(a.elapsed_time(b) / 64)
        ms = sorted(times)[4]; size = WEIGHTS + 4 * ctx * C.num_hidden_layers * C.num_key_value_heads * C.head_dim
        n = getattr(step, "launches", None) or (count_kernels(step.run) if ctx == contexts[0] else "")
        print(f"ctx {ctx:5d} {name:16s} {ms*1e3:8.1f} us/token {1e3/ms:6.0f} tok/s {size/ms/1e9:5.2f} TB/s launches {n}", flush=True)
        del step
