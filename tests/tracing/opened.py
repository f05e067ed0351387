"""Opens a merged trace as Perfetto's importer of Chrome's JSON does, and refuses what that would drop or misplace.

Perfetto's own trace processor is a binary that its package fetches when it is first used, so tests cannot have it.
What they check is the format's description ("Trace Event Format") and what the importer makes of it: spans of a thread
that overlap without one lying in the other are dropped; a flow event belongs to the span that is open at its time, and
is dropped if its id is no number. Tried with Perfetto 52, which found as many spans, counters and flows.
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from numbers import Real

EPSILON_US = 0.0005
"""Times are microseconds with three decimals."""


@dataclass
class Open:
    """A trace: names of processes and threads, spans by both, in the order of time, counters, arrows."""

    about: dict
    processes: dict = field(default_factory=dict)
    spans: dict = field(default_factory=lambda: defaultdict(list))
    counters: dict = field(default_factory=lambda: defaultdict(list))
    arrows: list = field(default_factory=list)

    def of(self, process, thread=None, kind=None):
        """Spans of a process, of its threads of one name, of one category."""
        return [
            span
            for (of_process, of_thread), spans in self.spans.items()
            if of_process == process and thread in (None, of_thread)
            for span in spans
            if kind in (None, span["cat"])
        ]


def opened(path):
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        trace = json.load(file)
    found = Open(trace["otherData"])
    threads, by_thread, flows = {}, defaultdict(list), defaultdict(list)
    for event in trace["traceEvents"]:
        phase, pid, tid = event["ph"], event["pid"], event["tid"]
        if phase == "M":
            if event["name"] == "process_name":
                assert found.processes.setdefault(pid, event["args"]["name"]) == event["args"]["name"]
            elif event["name"] == "thread_name":
                threads[pid, tid] = event["args"]["name"]
            continue
        assert type(pid) is int and isinstance(event["ts"], Real) and event["ts"] > -EPSILON_US, event
        if phase == "X":
            assert event["dur"] >= 0 and event["name"], event
            by_thread[pid, tid].append(event)
        elif phase in "sf":
            assert phase == "s" or event["bp"] == "e", event  # of the span that it lies in, not of the next
            assert type(event["id"]) is int, event  # any other text than a number is dropped
            flows[event["name"], event["id"]].append(event)
        elif phase == "C":
            (value,) = event["args"].values()
            found.counters[found.processes[pid], event["name"]].append((event["ts"], value))
        else:
            assert phase in "iIbeBEnt", event  # Kineto's
    for name, spans in by_thread.items():
        in_order = check_that_they_nest(spans)
        found.spans[found.processes[name[0]], threads.get(name, name[1])] += in_order
    for (name, _), events in flows.items():
        found.arrows += arrows(name, events, by_thread)
    return found


def check_that_they_nest(spans):
    in_order = sorted(spans, key=lambda span: (span["ts"], -span["dur"]))
    open_ends = []
    for span in in_order:
        end = span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= span["ts"] + EPSILON_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + EPSILON_US, f"{span} reaches beyond what it begins in"
        open_ends.append(end)
    return in_order


def arrows(name, events, by_thread):
    """From which span to which; none may hang in the air."""

    def within(event):
        spans = by_thread[event["pid"], event["tid"]]
        found = [s for s in spans if s["ts"] - EPSILON_US <= event["ts"] <= s["ts"] + s["dur"] + EPSILON_US]
        assert found, event
        return found[-1]

    starts = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    return [(name, within(start), within(end)) for start in starts for end in ends]
