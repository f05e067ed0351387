"""Who reads which parameter, and how a read waits: see `penstock.torch.reads.safety`."""
