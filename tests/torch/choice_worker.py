"""One rank of test_choice_inputs.py: what this rank measured, and what the coordinator knows before and after it.

Run as ``python choice_worker.py DIRECTORY RANK WORLD_SIZE LINE_RATE_MBIT``.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import penstock as ps
from penstock.torch.choice import measuring
from penstock.torch.choice.probe import exchange_cost


def main(directory, rank, size, line_rate_mbit):
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/penstock", line_rate_mbit=line_rate_mbit)
    products = []
    product_rate = measuring._product_rate

    def kept():
        products.append(product_rate())
        return products[-1]

    measuring._product_rate = kept
    model = nn.Sequential(nn.Linear(32, 16))
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), schemes="auto")
    engine = ps.job.current().engine
    book = ps.coordinator_of(model)
    rates = [asdict(book.query("rates"))]
    for _ in range(2):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    rates.append(asdict(book.query("rates")))
    # What was found for this engine, and is not measured again.
    told = {"products": products, "gather_s": exchange_cost(engine, rank), "rates": rates}
    Path(directory, f"result-{rank}").write_text(json.dumps(told))
    ps.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
