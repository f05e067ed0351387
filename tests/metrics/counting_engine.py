"""The engine as far as metrics ask it: counts that a test sets, and somebody to wait for until they are asked for."""

from __future__ import annotations

import copy
import threading


def counts(**more):
    """A report of rank 0 of two."""
    return {
        "rank": 0,
        "size": 2,
        "lanes": 1,
        "slices": 70,
        "preemptions": 3,
        "frames_sent": 30,
        "frames_received": 31,
        "bytes_sent": 1000,
        "bytes_received": 2000,
        "call_bytes_sent": 10,
        "call_bytes_received": 20,
        "tensors_in_flight": 4,
        "busy_backward_s": 1.5,
        "busy_forward_s": 0.25,
        "busy_stalled_s": 0.125,
        "busy_other_s": 2.0,
        "stall_s": 0.125,
        "pool_bytes": 4096,
        "line_bytes_per_s": 125e6,
        "through_memory": [],
        "owned_bytes": [600, 500],
        "peers": [peer(1, 1010, 2020, 5, 640, 7)],
        "books": [],
        **more,
    }


def peer(rank, sent, received, queued_frames=0, queued_bytes=0, retransmitted=0):
    return {
        "rank": rank,
        "bytes_sent": sent,
        "bytes_received": received,
        "queued_frames": queued_frames,
        "queued_bytes": queued_bytes,
        "retransmitted_segments": retransmitted,
    }


class CountingEngine:
    """Stands where `penstock._native.Engine` does."""

    def __init__(self, **more):
        self.counts = counts(**more)
        self.epoch = 0
        self.log = [([0, 1], 1, [])]
        self.asked = threading.Semaphore(0)
        self.fails_with = None

    def report(self):
        self.asked.release()
        if self.fails_with is not None:
            raise self.fails_with
        return copy.deepcopy(self.counts)

    def members(self):
        return self.log[-1][0]

    def membership_log(self):
        return self.log
