"""One process that meets others, or runs a store as a launcher does; it tells what happens in JSON lines.

python meeting_process.py '{"rank": 1, "world_size": 2, "rendezvous": "tcp://127.0.0.1:5000"}' [ENVIRONMENT]
python meeting_process.py store [libuv]
"""

import json
import sys
import time

from meeting import SilentDoor

from penstock.launchers import discover
from penstock.rendezvous import exchange


def tell(**facts):
    print(json.dumps(facts), flush=True)


def run_a_store(use_libuv):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    tell(port=store.port)
    sys.stdin.read()  # until whoever started this process ends it


def meet(options, environ):
    launch = discover(environ, **options)
    if launch.meeting_point.kind == "launcher":
        import torch.distributed  # noqa: F401 - before the clock runs: it takes seconds
    begin = time.monotonic()
    try:
        tell(event="begin")
        door = SilentDoor(lambda agreement: ("127.0.0.1", 1000))
        agreement = exchange(launch, door, version="1.0", lanes=1)
        tell(event="met", job=agreement.job_id.hex(), table=door.table, torch="torch" in sys.modules)
    except BaseException as error:
        facts = {"kind": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
        tell(event="error", after_s=time.monotonic() - begin, **facts)
        raise


if __name__ == "__main__":
    if sys.argv[1] == "store":
        run_a_store("libuv" in sys.argv)
    else:
        meet(json.loads(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
