"""What is asked of the accelerator that a model or a tensor is on, all of it by torch's device-generic interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

__all__ = ["Accelerator", "pinned_memory", "supports"]


def supports(device: torch.device) -> bool:
    """Whether this torch has the streams and events of this device behind its generic interface."""
    here = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return here is not None and here.type == device.type and hasattr(torch.Stream, "__enter__")


def pinned_memory(nbytes: int) -> Tensor:
    """Host memory that the device's copies reach without the host: bytes, of any content."""
    with torch.inference_mode(False):  # whoever asks: it is written in any mode
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


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

    def mark(self) -> Any:
        """An event after all that the calling thread's stream has been given so far.

        Raises:
            ConfigError: It is being captured: what would be sent then would be sent once, and not with each replay.
        """
        stream = torch.accelerator.current_stream(self.device)
        if stream.is_capturing() if hasattr(stream, "is_capturing") else self._is_capturing():
            raise ConfigError(
                f"penstock: a stream of {self.device} is being captured into a graph, whose replays would send "
                "nothing. Leave calls of Penstock, and the backward pass of a distributed model, out of captured "
                "graphs"
            )
        return self.mark_in(stream)

    def mark_in(self, stream: Any) -> Any:
        """An event after all that this stream has been given so far."""
        event = torch.Event(device=self.device)
        event.record(stream)
        return event

    def go_on_after(self, event: Any) -> None:
        """What the calling thread's stream is given from now on runs after this event. The thread does not wait."""
        torch.accelerator.current_stream(self.device).wait_event(event)
