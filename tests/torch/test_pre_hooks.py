"""Hooks before a forward are in one order, however it is looked at."""

from __future__ import annotations

import torch
from torch import nn

from penstock.torch.model.pre_hooks import register_first


def test_runs_before_those_that_are_there_in_the_order_of_the_dictionary_beneath():
    module, ran = nn.Linear(2, 2), []
    for name in "abc":
        module.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    handle = register_first(module, lambda module, args: ran.append("first"))
    module(torch.ones(1, 2))
    assert ran == ["first", "a", "b", "c"]
    hooks = module._forward_pre_hooks
    assert list(dict.keys(hooks)) == list(hooks)
    handle.remove()
    module(torch.ones(1, 2))
    assert ran[4:] == ["a", "b", "c"]
