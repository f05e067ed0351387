"""What Penstock finds in its launcher: who started this process, its place, and where it meets the others.

    LAUNCHER facts.py DIRECTORY

Each process leaves it in ``DIRECTORY/RANK.json``.
"""

import json
import sys
from pathlib import Path

from penstock.launchers import discover_here

launch = discover_here()
place = launch.options.rank, launch.options.world_size
facts = {"launcher": launch.launcher, "place": place, "meet": str(launch.meeting_point)}
Path(sys.argv[1], f"{place[0]}.json").write_text(json.dumps(facts), encoding="utf-8")
