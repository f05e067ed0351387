"""The PyTorch front end. See `penstock.torch.distribute`.

The code map:

layout     which tensors a model has         hooks      gradients in, averages back
copies     one rank's tensors to all         optimizer  updates out, layer by layer
safety     who reads which parameter         patches    what is changed on the user's objects
memory     what is lent to the engine        separable  whether an optimizer can be split
join       uneven numbers of batches         batchnorm  statistics over the samples of all ranks
whole      what a step has overwritten       release    what becomes of models when the job is over
gather, rows, factors, pairs       layers whose averages every rank makes from all ranks' contributions
lossy, onebit, dgc, residuals      those that send less than their gradients, and what they keep
choice     schemes chosen while training          description  a model as the coordinator sees it
facts      what a program may ask about all of this       data         which samples are this rank's
"""

from penstock.torch.access import finish_all, no_sync, synchronize
from penstock.torch.data import sampler
from penstock.torch.distribute import distribute
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.join import join
from penstock.torch.memory import lent_to
from penstock.torch.release import after_failure, let_go

__all__ = [
    "after_failure",
    "coordinator_of",
    "distribute",
    "explain",
    "finish_all",
    "join",
    "lent_to",
    "let_go",
    "no_sync",
    "sampler",
    "synchronize",
]
