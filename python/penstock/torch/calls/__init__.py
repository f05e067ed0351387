"""Calls on tensors of an accelerator: messages and collectives, whoever asks for them."""
