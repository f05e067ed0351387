"""Updates out, layer by layer as averages arrive.

kinds         who makes a model's updates, as `distribute` is asked
patching      what all ways of updating patch on an optimizer
optimizer     by the workers: `step` takes the gradients and returns
partial       large updates as their averages come in
pieces        calls of an optimizer for pieces
joined        small updates in one call
separable     whether an optimizer can be split
shadow        an optimizer's step for other tensors
state         its state as the program sees it
whole         what a step has overwritten, until it is whole
zeroing       `zero_grad` where gradients may be in flight
owners        the owners update, and parameters come back
twins         which optimizers they can apply
in_backward   the same, ordered when backward begins
asynchronous  the same, without rounds
uneven        the same within `ps.join`
kept_pieces   what they keep of a model on an accelerator
"""
