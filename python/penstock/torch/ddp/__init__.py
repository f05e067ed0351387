"""Programs written for `DistributedDataParallel`, as they are: ours stands in its place under `penstock run`.

replacing  what the names of torch stand for, from ``import torch`` on
wrapper    the class that programs find under these names
reasons    why a model is left to torch's class
wrapped    what a model does there, in the place of torch's reducer
jobs       the job that models are distributed in
adoption   optimizers, found at their first step
joining    ranks that have no batch left
"""
