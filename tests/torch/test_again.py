"""Many jobs in one process, with the same model and optimizer."""

import json

import pytest
from processes import run_program


@pytest.mark.fake_only  # once is enough: the ranks are processes
def test_jobs_one_after_the_other_leave_no_descriptor_and_train_the_same_objects(tmp_path):
    results = [json.loads(text) for text in run_program("again_worker.py", tmp_path, "20")]
    assert results[0]["values"] == results[1]["values"]
    for found in results:
        assert len({tuple(count) for count in found["counts"][1:]}) == 1, found["counts"]
