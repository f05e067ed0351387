"""How a backend comes to be when torch.distributed asks for one: of which kind, in which job, for which devices."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from penstock import job
from penstock.boards import TorchBoard
from penstock.errors import ConfigError
from penstock.torch.backend.group import (
    ProcessGroup,
    _agree_on_number,
    _check_torch,
    _DeviceBackend,
    _engines,
    _ReconfigurableDeviceBackend,
)
from penstock.torch.backend.reconfiguring import ReconfigurableGroup

__all__ = ["create"]


def create(options: Any, _: object = None) -> ProcessGroup | _DeviceBackend:
    """Make the backend of a process group; torch.distributed calls it.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank and size in the group, timeout, members.

    Raises:
        ConfigError: The job runs already with another rank or size; or torch is too old.
        PenstockError: The job could not be started, as `penstock.init`.
    """
    _check_torch()
    if getattr(options, "enable_reconfigure", False):  # older versions have none
        return _create_reconfigurable(options)
    rank, size, store = options.group_rank, options.group_size, options.store
    members = list(options.global_ranks_in_group) or list(range(size))
    if not dist.is_initialized():  # the default group, of all ranks
        board = TorchBoard(store, "the program's store", "job")
        running = job.init_at_store(board, rank, size)
        members = list(range(size))
    else:
        running = job.current("new_group")
        if isinstance(dist.group.WORLD, ProcessGroup):
            store = dist.group.WORLD._meeting_store(members, store)
    _engines.of(running.engine)
    number = _agree_on_number(store, rank, size)
    running.engine.form_group(number, members)
    group = ProcessGroup(running.engine, number, rank, size, options.timeout)
    group.device_backend = _DeviceBackend(group)
    if not _is_alone(options):
        _behind[options.process_group] = group
        return group.device_backend
    _register_devices(group)
    return group


def _register_devices(group: ProcessGroup) -> None:
    """Let torch's dispatcher find the group on every device."""
    for device in dist.Backend.backend_capability["penstock"]:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, group.device_backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def _create_reconfigurable(options: Any) -> ProcessGroup:
    if dist.is_initialized() or not _is_alone(options):
        raise ConfigError(
            "enable_reconfigure: this backend has it for the default group alone, on all devices: give it to "
            'init_process_group("penstock", enable_reconfigure=True)'
        )
    group = ReconfigurableGroup(options.store, options.group_rank, options.group_size, options.timeout)
    group.device_backend = _ReconfigurableDeviceBackend(group)
    _register_devices(group)
    return group


_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
"""What torch's groups of several backends use, for as long as they live."""


def _is_alone(options: Any) -> bool:
    """Whether this backend is all of a group, rather than what it has for some devices (``cpu:gloo,cuda:penstock``)."""
    group, store = getattr(options, "process_group", None), options.store
    if group is None:  # older versions do not tell
        return True
    custom = group.name() == "custom" and not group._device_types
    # Backends are made in the order of devices, each with a store of its own. That of a group of this one alone is the
    # first device's.
    first = dist.Backend.backend_capability["penstock"][0]
    store.set("penstock/device", first)
    return custom and store.underlying_store.check([f"{first}//penstock/device"])
