"""Updates out, layer by layer as averages arrive.

optimizer  `step` takes the gradients and returns      separable  whether an optimizer can be split
partial    large updates as their averages come in     pieces     calls of an optimizer for pieces
joined     small updates in one call                   shadow     an optimizer's step for other tensors
whole      what a step has overwritten, until it is whole
patching   what both ways of updating patch on an optimizer
owners     the owners update, and parameters come back     twins  which optimizers they can apply
zeroing    `zero_grad` where gradients may be in flight
"""
