"""Gradients in, averages back.

hooks    from autograd to the engine, and back into ``.grad``      bundle  small gradients, submitted in one call
landing  where a gradient leaves and its average lands
"""
