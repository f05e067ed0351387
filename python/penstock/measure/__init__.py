"""Measurements between the ranks of a job: what the links can do. The command is ``penstock measure``."""
