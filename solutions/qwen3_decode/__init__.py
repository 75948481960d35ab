"""Qwen3, decoded: configuration, weights, a reference in plain torch, greedy text, training.

config.py     what config.json says, checked
weights.py    weights from a folder or the hub, or random ones of the exact shape
reference.py  the forward pass in plain torch, with a static KV cache: prefill and decode
generate.py   prompt to tokens to text, and `lab generate`
train.py      how small/, the model that ships with the lab, was made

naive.py      one decode step from the chapters' first rungs
rungs.py      the step in plain torch
step.py       the step as a chain of launches: the chapters' ops, and kernels.py's
start.py      the kernel that starts a step: the exercise
kernels.py    the kernels of the chain
ladder.py     all of these as one ladder

measure.py    how a step is timed
ledger.py     where the bytes and the microseconds of a token go
prompts.py    what the gate lets the rungs read
gate.py       whether a rung still computes the model
swap.py       the reader's own op in place of ours, inside the model

prefill.py    a whole prompt at once, by a plan for its length
dispatch.py   how such a plan is made, and what was tried for it
peers.py      Transformers on the same weights
"""

from .ladder import DECODE, LADDER
from .start import embed_norm

__all__ = ["DECODE", "LADDER", "embed_norm"]
