"""Softmax regression on a key-value store, with NumPy alone: the program says what is pushed and pulled, and when.

    torchrun --nproc-per-node 4 examples/kvstore.py
    python examples/kvstore.py

Both take the same samples in each step, so they end with the same loss but for rounding.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import penstock as ps

SAMPLES, FEATURES, CLASSES = 4096, 16, 4
BATCH = 64  # of all workers together


def forward_backward(weights: list[Any], x: Any, labels: Any) -> tuple[float, list[Any]]:
    """The summed loss of these samples, and its gradient by weight."""
    scores = x @ weights[0] + weights[1]
    scores -= scores.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(scores).sum(axis=1, keepdims=True))
    chosen = np.arange(len(labels)), labels
    error = np.exp(scores - log_sums)
    error[chosen] -= 1
    return float((log_sums[:, 0] - scores[chosen]).sum()), [x.T @ error, error.sum(axis=0)]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="Softmax regression on penstock.KVStore, with NumPy alone.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    arguments = parser.parse_args()

    ps.init()
    kv = ps.KVStore("sync")
    draw = np.random.default_rng(0)
    x = draw.standard_normal((SAMPLES, FEATURES))
    labels = (x @ draw.standard_normal((FEATURES, CLASSES))).argmax(axis=1)

    weights = [np.zeros((FEATURES, CLASSES)), np.zeros(CLASSES)]
    loss = np.zeros(1)
    for key, value in {"matrix": weights[0], "bias": weights[1], "loss": loss}.items():
        kv.init(key, value)  # rank 0's, if they differ
        kv.pull(key, out=value)
    kv.wait()

    share = BATCH // kv.num_workers
    for epoch in range(arguments.epochs):
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        total = 0.0
        for start in range(0, SAMPLES, BATCH):
            mine = order[start + kv.rank * share :][:share]
            total_here, gradients = forward_backward(weights, x[mine], labels[mine])
            total += total_here
            # A list of keys at once; what the next forward needs first is the most urgent.
            kv.push(["matrix", "bias"], gradients, priority=0)
            kv.pull(["matrix", "bias"], out=gradients).wait()
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= arguments.lr / (share * kv.num_workers) * gradient
        loss[0] = total
        kv.pushpull("loss", loss).wait()
        if kv.rank == 0:
            seen = SAMPLES // BATCH * share * kv.num_workers
            print(f"epoch {epoch}: loss {loss[0] / seen:.6f} on {kv.num_workers} worker(s)")
    ps.shutdown()


if __name__ == "__main__":
    main()
