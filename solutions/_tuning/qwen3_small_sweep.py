"""One GPU, several recipes at a time: python qm_sweep.py TEXT OUT [STEPS [WIDTH]]. Prints a line a recipe."""
import sys, subprocess, os, time, json
from pathlib import Path
RECIPES = [dict(vocab=v, dropout=d, lr=lr) for v, d, lr in (
    (1024, .2, 2e-3), (1024, .3, 2e-3), (1024, .4, 2e-3), (1024, .3, 1e-3), (1024, .3, 4e-3), (2048, .3, 2e-3), (2048, .4, 2e-3), (1024, .5, 3e-3))]
if sys.argv[1] == "--one":
    import labkit, torch
    from dataclasses import replace
    from solutions._qwen3_decode import train as t
    torch.set_num_threads(1)
    text, out, steps, r = Path(sys.argv[2]).read_text(), Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
    config = replace(t.SMALL, vocab_size=r["vocab"])
    if r.get("tiny"):
        config = replace(config, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=32)
        text = text[:60000]
    rec = t.train(text, out, config, replace(t.RECIPE, steps=steps, dropout=r["dropout"], learning_rate=r["lr"]), lambda s: None)
    last = rec["curve"][-1]
    print(r, f"per char {rec['held_out_loss_per_character']:.4f} per token {rec['held_out_loss']:.4f} best step {rec['best_step']} of {last['step']}; train {last['train_loss']:.3f} held out {last['held_out_loss']:.3f} at the end; {rec['seconds']} s", flush=True)
else:
    text, out, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "3000"
    tiny = os.environ.get("TINY")
    jobs = [subprocess.Popen([sys.executable, __file__, "--one", text, str(out / f"r{i}"), steps, json.dumps(r | ({"tiny": 1} if tiny else {}))], env={**os.environ, "PYTHONPATH": os.getcwd() + ":" + os.environ.get("PYTHONPATH", "")}) for i, r in enumerate(RECIPES[: 2 if tiny else None])]
    [j.wait() for j in jobs]
