"""Copies of buffers of which nothing comes, or not all, because rank 0 is lost: a rank keeps its own values there."""

from types import SimpleNamespace

import torch
from torch import nn

from penstock.torch.agreement import copies


def test_what_does_not_come_stays_as_it_is(monkeypatch):
    model = nn.BatchNorm1d(5)
    model.running_mean.fill_(3.0)
    engine = SimpleNamespace(open_book=lambda *_: 0, submit_absent=None, wait=lambda *_: None)
    copy = copies.BufferCopy(engine, "buffers", model, source=False, may_tear=True)
    nbytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    received = []
    monkeypatch.setattr(copy, "_submit", lambda _, staging, step: received.append(staging))
    monkeypatch.setattr(copies, "lent_to", lambda _: SimpleNamespace(landed=lambda *_: ([0], [nbytes])))
    copy.start(0)
    # The first sixteen bytes have come, which the widest type begins.
    received[0][:8] = torch.tensor([7]).view(torch.uint8)
    received[0][8:16] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    copy.finish()
    assert model.running_mean.tolist() == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert model.running_var.tolist() == [1.0] * 5 and model.num_batches_tracked == 7
