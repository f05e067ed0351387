"""Emulated clusters, real peers, the distance to the limit."""
