"""Qwen3, decoded: configuration, weights, a reference in plain torch, greedy text, training.

config.py     what config.json says, checked
weights.py    weights from a folder or the hub, or random ones of the exact shape
reference.py  the forward pass in plain torch, with a static KV cache: prefill and decode
generate.py   prompt to tokens to text, and `lab generate`
train.py      how small/, the model that ships with the lab, was made
"""
