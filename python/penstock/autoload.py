"""What ``import torch`` calls by itself, in every program of a Python that has Penstock: from torch 2.5 on.

The backend ``penstock`` of torch.distributed becomes known, so that ``init_process_group("penstock")`` needs no import.
Where `penstock run` has asked for it by a variable, it also puts ours in the place of `DistributedDataParallel`.
Nothing of either is imported before it is used. It never fails: whoever imports torch may know nothing of Penstock.
"""

from __future__ import annotations

import sys
from typing import Any

from penstock import config

__all__ = ["register"]


def register() -> None:
    """Register the backend, and replace `DistributedDataParallel` if that is asked for. Raises nothing."""
    try:
        import torch  # noqa: F401 - whoever calls this by itself: what follows imports torch, which would call this

        from penstock.torch.registration import register_backend

        register_backend(_create)
        if config.replaces_ddp(config.current_environment()):
            from penstock.torch.ddp.replacing import replace

            replace()
    except Exception as error:  # noqa: BLE001  nobody here could handle it, and the program shall go on
        sys.stderr.write(f"penstock: torch is left as it is: {error}\n")


def _create(options: Any, more: object = None) -> Any:
    """Make the backend of a process group; torch.distributed calls it."""
    from penstock.torch.backend import create

    return create(options, more)
