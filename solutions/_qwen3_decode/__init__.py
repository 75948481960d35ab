"""Qwen3, decoded: configuration, weights, a reference in plain torch, greedy text, training.

config.py     what config.json says, checked
weights.py    weights from a folder or the hub, or random ones of the exact shape
reference.py  the forward pass in plain torch, with a static KV cache: prefill and decode
generate.py   prompt to tokens to text, and `lab generate`
train.py      how small/, the model that ships with the lab, was made
step.py       one decode step as a chain of launches: the chapters' ops, and kernels.py's
kernels.py    the kernels of that chain
naive.py      the step from the chapters' first rungs
rungs.py      the step in plain torch
peers.py      Transformers on the same weights
measure.py    how a step is timed
prompts.py    what the gate lets the rungs read
gate.py       whether a rung still computes the model
ladder.py     all of these as one ladder
"""

from .ladder import LADDER

__all__ = ["LADDER"]
