"""`penstock.report()`: a dictionary that can be read by people, too."""

import json

from penstock.account import Report, shortened, summary

BOOKS = [
    {
        "name": "model0.gradients",
        "layers": [{"name": "fc", "lossy": None, "bytes_sent": 2_500_000, "bytes_received": 1000, "stall_s": 0.25}],
    }
]


def report(**more):
    seconds = dict.fromkeys(("busy_backward_s", "busy_forward_s", "busy_stalled_s", "busy_other_s"), 1.0)
    counts = dict.fromkeys(("slices", "preemptions", "frames_sent", "frames_received", "pool_bytes"), 7)
    return Report(
        {
            **seconds,
            **counts,
            "rank": 1,
            "size": 2,
            "lanes": 1,
            "bytes_sent": 2_500_000,
            "bytes_received": 1000,
            "stall_s": 0.25,
            "owned_bytes": [4, 8],
            "books": BOOKS,
            "lossy": {},
            "line_bytes_per_s": 125e6,
            "line_rate_source": "as given",
            "through_memory": [],
            **more,
        }
    )


def test_it_renders_what_the_demo_shows_and_stays_a_dictionary():
    found = report()
    assert json.loads(json.dumps(found))["bytes_sent"] == 2_500_000
    text = found.render()
    (layer,) = (line.split() for line in text.splitlines() if line.strip().startswith("fc"))
    assert layer == ["fc", "2.5", "MB", "1.0", "KB", "250.0", "ms"]
    assert text.startswith("communication of rank 1 of 2 ") and "25.0%  was hidden under backward" in text
    assert "line rate 1,000 Mbit/s (as given)" in text and "LOSSY" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "LOSSY: fc 1bit" in report(lossy={"fc": "1bit"}).render()
    assert "not measured" in report(line_bytes_per_s=None).render()
    assert "through shared memory: 2 other ranks of this host" in report(through_memory=[0, 2]).render()


def test_it_says_what_a_device_copied():
    copies = {"bytes": 2_400_000_000, "seconds": 0.045, "hidden_share": 0.973}
    text = report(copies=copies).render()
    assert "  copied between device and host: 2.4 GB in 45.0 ms, 97% of it hidden" in text.splitlines()


def test_it_says_what_is_not_synchronous():
    (line,) = (line for line in report(local_updates=["DiLoCo"]).render().splitlines() if "NOT SYNCHRONOUS" in line)
    assert line == "  NOT SYNCHRONOUS: DiLoCo"
    late = {"bound": 4, "staleness": {"first": {0: 1, 3: 1}, "second": {6: 2}}}
    text = report(asynchronous={"model0": late, "model1": {"bound": None, "staleness": {}}}).render()
    assert "model0 is trained asynchronously; gradients were 3.8 updates late on average, 6 at most" in text
    assert "model1 is trained asynchronously; no gradient has been answered yet" in text


def test_it_says_for_whom_the_others_wait():
    causes = {"compute": 179.4, "input": 0.3, "network": 1.5, "processing": 0.0}
    one = {"rank": 3, "late_ms": 181.2, "step_ms": 293.0, "cause": "compute", "causes_ms": causes, "stands_out": True}
    one["from_layer"] = "transformer.encoder.layers.11.attention.self.query"
    late = {"ranks": [one], "judged_steps": 4, "until_step": 1234, "why": None}
    text = report(late=late).render()
    said = "rank 3 is late by 181.2 ms of 293.0 per step from transformer.encoder.layers.11.attention.self.query on"
    assert said in " ".join(text.split())
    words = "in compute (+179.4 ms; input +0.3, network +1.5, processing +0.0)"
    assert words in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80
    unclear = {**late, "ranks": [{**one, "cause": None, "from_layer": None}]}
    words = "for no one cause (compute +179.4, input +0.3, network +1.5, processing +0.0 ms)"
    assert words in " ".join(report(late=unclear).render().split())
    assert "nobody waits for one rank (steps until 1,234" in report(late={**late, "ranks": []}).render()
    nothing = {"ranks": [], "judged_steps": 0, "until_step": None, "why": "a job of one process"}
    assert report(late=nothing).render() == report().render()


def test_a_job_of_one_rank_renders(tmp_path):
    import penstock as ps

    ps.init()
    try:
        found = ps.report()
    finally:
        ps.shutdown()
    text = found.render()
    assert "rank 0 of 1" in text and "line rate" not in text
    assert found["late"]["ranks"] == [] and found["late"]["why"].startswith("a job of one process")


def test_all_ranks_add_up():
    assert summary([report(), report()])["bytes_sent"] == 5_000_000


def test_long_names_lose_their_middle():
    name = "transformer.encoder.layers.11.attention.self.query.weight"
    assert len(shortened(name, 30)) == 30
    assert shortened(name, 30).startswith("transformer.e") and shortened(name, 30).endswith("query.weight")
    assert shortened("short", 30) == "short"
