"""`ps.init(encrypt=True)`: the same results. What is noticed on the way: crates/net/tests/encrypted.rs."""

import numpy as np
import torch
from job_processes import run, run_well

import penstock as ps


def trained(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 300), float(rank + step))).square().mean().backward()
        optimizer.step()
    ps.synchronize()
    total = np.full(5, rank + 1.0)
    ps.allreduce(total)
    return [param.detach().numpy().tobytes() for param in model.parameters()], total.tolist()


def test_results_are_what_they_are_without(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "encrypted").mkdir()
    plain = run_well(2, trained, tmp_path / "plain", shared_memory=False)
    encrypted = run_well(2, trained, tmp_path / "encrypted", shared_memory=False, encrypt=True)
    assert plain == encrypted and plain[0][1] == [3.0] * 5


def test_a_secret_that_anybody_may_read_encrypts_nothing(tmp_path):
    for outcome in run(2, trained, tmp_path, encrypt=True, insecure=True):
        assert isinstance(outcome.error, ps.ConfigError)
        assert "option encrypt" in str(outcome.error) and "leave out insecure" in str(outcome.error)
