"""What is asked of the accelerator that a model or a tensor is on, all of it by torch's device-generic interface."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

__all__ = ["LOOK_S", "Accelerator", "described", "fastest", "look", "pinned_memory", "supports"]

LOOK_S = 1e-4
"""Between two looks whether the device has passed an event."""


def supports(device: torch.device) -> bool:
    """Whether this torch has the streams and events of this device behind its generic interface."""
    here = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return here is not None and here.type == device.type and hasattr(torch.Stream, "__enter__")


def pinned_memory(nbytes: int) -> Tensor:
    """Host memory that the device's copies reach without the host: bytes, of any content."""
    with torch.inference_mode(False):  # whoever asks: it is written in any mode
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def look(event: Any, at_most_s: float) -> bool:
    """Wait until the device has passed an event, for a bounded time. Nothing but the calling thread waits.

    If the device has failed, this returns: whoever asks for the event next is told, and can tell others.
    """
    deadline = time.monotonic() + at_most_s
    with contextlib.suppress(RuntimeError):
        while not event.query() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    return True


def described(device: torch.device) -> str:
    """Which device it is, without its number: of two that are described alike a product has the same bits."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", lambda _: device.type)(device)
    return f"{name}, fp32 products {torch.get_float32_matmul_precision()}"


def fastest(device: torch.device, work: Callable[[], object], tries: int) -> float:
    """Seconds that the device takes for what `work` gives it, the shortest of some tries. Waits for it."""
    stream = torch.Stream(device=device)
    events = [torch.Event(device=device, enable_timing=True) for _ in range(tries + 1)]
    stream.wait_stream(torch.accelerator.current_stream(device))  # where its operands are made
    with stream:
        work()  # once to warm up
        for event in events:
            event.record(stream)
            if event is not events[-1]:
                work()
    events[-1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in itertools.pairwise(events)) / 1000


class Accelerator:
    """One device. Everything here orders streams, and nothing waits.

    Args:
        device: With its number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module = torch.get_device_module(device)
        # Older torch asks the device's module, not the stream; a device without graphs has neither.
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)

    def stream(self) -> Any:
        """A stream of one's own."""
        return torch.Stream(device=self.device)

    def current(self) -> Any:
        """The calling thread's stream."""
        return torch.accelerator.current_stream(self.device)

    def refuse_capture(self, stream: Any) -> None:
        """See that a stream is not being captured into a graph.

        Raises:
            ConfigError: It is: what would be sent then would be sent once, and not with each replay.
        """
        if stream.is_capturing() if hasattr(stream, "is_capturing") else self._is_capturing():
            raise ConfigError(
                f"penstock: a stream of {self.device} is being captured into a graph, whose replays would send "
                "nothing. Leave calls of Penstock, and the backward pass of a distributed model, out of captured "
                "graphs"
            )

    def mark(self) -> Any:
        """An event after all that the calling thread's stream has been given so far.

        Raises:
            ConfigError: It is being captured.
        """
        stream = torch.accelerator.current_stream(self.device)
        self.refuse_capture(stream)
        return self.mark_in(stream)

    def mark_in(self, stream: Any, *, timed: bool = False) -> Any:
        """An event after all that this stream has been given so far, perhaps with the time of it."""
        event = torch.Event(device=self.device, enable_timing=timed)
        event.record(stream)
        return event

    def go_on_after(self, event: Any) -> None:
        """What the calling thread's stream is given from now on runs after this event. The thread does not wait."""
        torch.accelerator.current_stream(self.device).wait_event(event)
