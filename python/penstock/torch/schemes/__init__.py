"""Ways of a layer's gradients other than the store's: every rank makes the averages from all ranks' contributions.

survey          which layers can, which shall, and why not
making          the gather that a scheme makes of a layer
contributions   what a rank sends, which describes itself
gather          what all gathers share
device_gathers  the same on an accelerator: contributions to host memory, averages on the device
rebuild         averages made while the program computes
rows            layers that send what their gradients are made of
factors         of linear layers
pairs           of embeddings
adam            Project Adam's way for linear layers, for comparison, and its owners' duties
error_feedback  layers that send less than their gradients, and keep the rest
onebit          by a sign for each element
dgc             by the largest elements
residuals       what is kept, in checkpoints
"""
