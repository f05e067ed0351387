"""Ways of a layer's gradients other than the store's: every rank makes the averages from all ranks' contributions.

survey          which layers can, which shall, and why not      making  the gather that a scheme makes of a layer
contributions   what a rank sends, which describes itself      gather  what all of them share
device_gathers  the same for models on an accelerator: contributions to host memory, averages on the device
rows            layers that send what their gradients are made of; factors, pairs: linear layers, embeddings
adam            Project Adam's way for linear layers, for comparison, and its owners' duties
error_feedback  layers that send less than their gradients, and keep the rest; onebit, dgc: two ways to do so
residuals       what those keep, in checkpoints
rebuild         averages made while the program computes
"""
