"""The PyTorch front end. See `penstock.torch.distribute`.

The code map:

layout     which tensors a model has         hooks      gradients in, averages back
copies     one rank's tensors to all         optimizer  updates out, layer by layer
safety     who reads which parameter         patches    what is changed on the user's objects
memory     what is lent to the engine        separable  whether an optimizer can be split
join       ranks with different numbers of batches
"""

from penstock.torch.distribute import distribute, finish_all, no_sync, synchronize
from penstock.torch.join import join

__all__ = ["distribute", "finish_all", "join", "no_sync", "synchronize"]
