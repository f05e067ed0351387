"""A worker's program: random calls on a key-value store, compared with a plain model of it; see `kvstore_model`."""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kvstore"))

from kvstore_model import random_program

import penstock as ps


def main(directory, *seeds):
    ps.init(slice_bytes=8192)
    values = b""
    for seed in seeds:
        values += b"".join(random_program(ps.rank(), ps.world_size(), int(seed)).values())
    told = {"bits": hashlib.sha256(values).hexdigest(), "owned": ps.report()["owned_bytes"]}
    (Path(directory) / f"result-{ps.rank()}").write_text(json.dumps(told))


main(*sys.argv[1:])
