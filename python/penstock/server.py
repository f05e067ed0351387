"""A server: a rank that owns slices and trains nothing. ``penstock server`` runs `serve` and nothing else.

It meets the others as any rank does, measures the line with them, and then carries out what worker 0 says
(`penstock.control`) until that says that the job ends. The sums are the engine's, in threads of its own. No framework
is imported.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock import job, launchers
from penstock.account import Report
from penstock.control import Channel, EndServing
from penstock.errors import ConfigError, PenstockError
from penstock.server_parts import SERVED

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.config import OptionArguments

__all__ = ["serve"]

_log = logging.getLogger("penstock")


def serve(**options: Unpack[OptionArguments]) -> Report:
    """Be a server of a job until it ends in order.

    Args:
        **options: Fields of `penstock.Options`; ``rank`` is the server's number, from 0 to ``servers`` - 1.

    Returns:
        What was moved, as `penstock.report` gives it.

    Raises:
        ConfigError: An option is not accepted, or ranks disagree.
        PeerLost: A worker, or another server, was lost; the job is over.
        Timeout: Ranks did not arrive, or one that leaves took too long.

    Example:
        >>> serve(rank=0, world_size=4, servers=2, rendezvous="tcp://node1:29500")
    """
    options["role"] = "server"
    launch = launchers.discover_here(**options)
    running = job.start_server(launch)
    try:
        channel = Channel(running.engine, launch.options.engine_rank, running.world_size, launch.options.servers)
        SERVED.serve(launch.options.engine_rank, running.rank)
        _log.info("server %d of %d serves %d workers", running.rank, launch.options.servers, running.world_size)
        message = channel.next()
        while not isinstance(message, EndServing):
            try:
                value = message.carry_out(running.engine)
            except ConfigError as error:
                if not message.awaited:
                    raise
                channel.answer(error=str(error))
            else:
                if message.awaited:
                    channel.answer(value=value)
            message = channel.next()
        channel.answer(value=None)
    except PenstockError as error:
        if not running.engine.has_failed:  # it is this server that cannot go on
            running.abort(f"{type(error).__name__}: {error}")
        running.engine.shutdown()  # raises nothing: the failure has been raised
        raise
    except BaseException as error:
        running.abort(f"{type(error).__name__}: {error}")
        running.engine.shutdown()
        raise
    else:
        running.engine.shutdown()
    finally:
        running.end_what_is_seen("the job has ended")
    return Report(running.engine.report())
