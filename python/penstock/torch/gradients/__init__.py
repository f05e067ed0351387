"""Gradients in, averages back.

hooks           from autograd to the engine, and back into ``.grad``
landing         where a gradient leaves and its average lands
device_landing  the same on an accelerator, through host memory
bundle          small gradients, submitted in one call
"""
