"""The torch.distributed backend: values as gloo's, DDP, FSDP, checkpoints, and a list of PyTorch's own tests."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIZE = 3
LIMIT_S = 480

PYTORCH_TESTS = """
test_Backend_enum_class test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
test_DistributedDataParallel_requires_grad test_all_gather test_all_gather_coalesced_complex
test_all_gather_coalesced_full_group test_all_gather_coalesced_group test_all_gather_coalesced_simple
test_all_gather_coalesced_with_empty test_all_gather_complex test_all_gather_full_group test_all_gather_group
test_all_gather_object_default_pg test_all_gather_object_subgroup test_all_reduce_coalesced_full_group_max
test_all_reduce_coalesced_full_group_min test_all_reduce_coalesced_full_group_product
test_all_reduce_coalesced_full_group_sum test_all_reduce_coalesced_group_max test_all_reduce_coalesced_group_min
test_all_reduce_coalesced_group_product test_all_reduce_coalesced_group_sum test_all_reduce_coalesced_max
test_all_reduce_coalesced_max_complex_unsupported test_all_reduce_coalesced_min test_all_reduce_coalesced_product
test_all_reduce_coalesced_sum test_all_reduce_complex_unsupported_ops test_all_reduce_full_group_max
test_all_reduce_full_group_min test_all_reduce_full_group_product test_all_reduce_full_group_sum
test_all_reduce_group_max test_all_reduce_group_min test_all_reduce_group_product test_all_reduce_group_sum
test_all_reduce_max test_all_reduce_min test_all_reduce_product test_all_reduce_sum test_all_reduce_sum_async
test_all_reduce_sum_complex test_all_to_all test_all_to_all_complex test_all_to_all_full_group test_all_to_all_group
test_all_to_all_single_equal_split test_all_to_all_single_equal_split_complex
test_all_to_all_single_equal_split_full_group test_all_to_all_single_equal_split_group
test_all_to_all_single_unequal_split test_all_to_all_single_unequal_split_complex
test_all_to_all_single_unequal_split_full_group test_all_to_all_single_unequal_split_group test_barrier
test_barrier_full_group test_barrier_group test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags test_broadcast
test_broadcast_full_group test_broadcast_group test_ddp_create_graph test_ddp_logging_data_cpu test_destroy_full_group
test_destroy_group test_dump_DDP_relevant_env_vars test_gather test_gather_checks test_gather_full_group
test_gather_group test_gather_object test_gather_object_subgroup test_get_backend test_get_future test_get_rank
test_get_rank_size_full_group test_get_rank_size_group test_grads_same_across_ranks_with_no_sync test_irecv test_isend
test_reduce_full_group_max test_reduce_full_group_min test_reduce_full_group_product test_reduce_full_group_sum
test_reduce_group_max test_reduce_group_min test_reduce_group_product test_reduce_group_sum test_reduce_max
test_reduce_min test_reduce_product test_reduce_sum test_reduce_sum_twice test_scatter test_scatter_checks
test_scatter_complex test_scatter_full_group test_scatter_group test_scatter_object_list test_send_recv
test_send_recv_any_source test_send_recv_with_tag test_static_graph_api_cpu
""".split()  # noqa: SIM905 - a list of a hundred lines would be harder to read
"""Of torch.testing._internal.distributed.distributed_test, those that three ranks can run in main memory."""

LEFT_OUT = {
    "for tensors on accelerators": ["*cuda*", "*gpu*", "*nccl*", "test_accumulate_gradients_no_sync*"],
    "of NCCL's way to batch messages": ["test_batch_isend_irecv_*_err"],
    "looks for gloo's events in the profile": ["test_*_profiler"],
    "monitored_barrier is gloo's own": ["test_monitored_barrier*"],
    "lets a barrier time out, which ends the job": ["test_barrier_timeout_*"],
    "sparse tensors are not offered": ["test_sparse_all_reduce_sum"],
    "takes four ranks or more": ["test_new_subgroups*"],
    "takes torchvision and accelerators": ["test_SyncBatchNorm_process_group"],
}
"""Why, and which. All others say themselves why they do not run on three ranks without accelerators."""


def run(script, directory, *arguments):
    """Run one script on every rank; its output by rank, all of it well."""
    ranks = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for rank in range(SIZE):
        place = [str(rank), str(SIZE), str(directory)]
        command = [sys.executable, str(HERE / script), *arguments[:1], *place, *arguments[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, **pipes))
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=LIMIT_S))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = [f"rank {rank}: {outputs[rank]}" for rank in range(SIZE) if ranks[rank].returncode != 0]
    if failed:
        pytest.fail("\n".join(failed)[-6000:], pytrace=False)
    return [output for output, _ in outputs]


def test_values_training_and_checkpoints_as_with_gloo(tmp_path):
    run("backend_rank.py", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="PyTorch's tests need expecttest")
def test_pytorchs_own_tests_pass(tmp_path):
    patterns = [f"-{pattern}" for patterns in LEFT_OUT.values() for pattern in patterns]
    outputs = run("pytorch_rank.py", tmp_path, "penstock", *PYTORCH_TESTS, *patterns)
    for rank, output in enumerate(outputs):
        results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        names = [result["name"] for result in results]
        assert names[: len(PYTORCH_TESTS)] == PYTORCH_TESTS and len(names) > len(PYTORCH_TESTS), f"rank {rank}"
        others = [result for result in results[: len(PYTORCH_TESTS)] if result["outcome"] != "passed"]
        # Whoever is neither listed nor left out must say why it does not run.
        others += [result for result in results if result["outcome"] == "failed" or not result.get("why", "passed")]
        assert not others, f"rank {rank}: {others}"
