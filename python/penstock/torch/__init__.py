"""The PyTorch front end. See `penstock.torch.distribute`.

distribute   the entry
alone        a job of one process
access       what a program calls on all models
facts        what it may ask of one
join         uneven numbers of batches
sampling     which samples are this rank's
clipping     what is done to gradients before a step
checkpoints  of a training, written while it goes on
model        layers and parameters, patches
reads        who reads which parameter
gradients    gradients in, averages back
updates      updates out, layer by layer
schemes      averages that every rank makes
choice       schemes chosen while training
agreement    what is the same on all ranks
release      what becomes of models when the job is over
runtime      memory used again, threads, what is asked of an accelerator
calls        messages and collectives on tensors of an accelerator
backend      for torch.distributed
local        ranks that train by themselves, and meet now and then
"""

from penstock.attached import attach
from penstock.torch.access import no_sync, synchronize
from penstock.torch.checkpoints import Checkpoints
from penstock.torch.clipping import GradScaler, clip_grad_norm_
from penstock.torch.distribute import distribute
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.join import join
from penstock.torch.local.diloco import DiLoCo
from penstock.torch.local.elastic import ElasticAveraging
from penstock.torch.local.local_sgd import LocalSGD
from penstock.torch.local.local_steps import LocalUpdates
from penstock.torch.release.of_job import Models
from penstock.torch.sampling import sampler

__all__ = [
    "Checkpoints",
    "DiLoCo",
    "ElasticAveraging",
    "GradScaler",
    "LocalSGD",
    "clip_grad_norm_",
    "coordinator_of",
    "distribute",
    "explain",
    "join",
    "no_sync",
    "sampler",
    "synchronize",
]

attach(Models())
attach(LocalUpdates())
