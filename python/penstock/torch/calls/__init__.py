"""Calls on tensors of an accelerator: messages and collectives, whoever asks for them.

device_calls  all that are under way
passing       one call that passes through host memory
cutting       into which pieces it is cut; pure
"""
