"""Gradients in, averages back: see `penstock.torch.gradients.hooks`."""
