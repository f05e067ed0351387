"""What programs find of the front end in `penstock`: the names, and that its models hear of the end of the job.

The package itself imports none of it: whoever imports one of its modules would wait for all.
"""

from __future__ import annotations

from penstock.attached import attach
from penstock.torch.access import no_sync, synchronize
from penstock.torch.checkpoints import checkpoint, resume
from penstock.torch.clipping import GradScaler, clip_grad_norm_
from penstock.torch.distribute import distribute
from penstock.torch.elastic_sampling import ElasticSampler
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.join import join
from penstock.torch.local.diloco import DiLoCo
from penstock.torch.local.elastic import ElasticAveraging
from penstock.torch.local.local_sgd import LocalSGD
from penstock.torch.local.local_steps import LocalUpdates
from penstock.torch.newcomers import Newcomers
from penstock.torch.release.of_job import Models
from penstock.torch.sampling import sampler

__all__ = [
    "DiLoCo",
    "ElasticAveraging",
    "ElasticSampler",
    "GradScaler",
    "LocalSGD",
    "Newcomers",
    "checkpoint",
    "clip_grad_norm_",
    "coordinator_of",
    "distribute",
    "explain",
    "join",
    "no_sync",
    "resume",
    "sampler",
    "synchronize",
]

attach(Models())
attach(LocalUpdates())
