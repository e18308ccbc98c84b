"""env.json: what a run ran on, and whether its times may be compared."""

import json
import os
import platform
from unittest import mock

import torch
import transformers

from algorithms.common import environment


def describe(comm, per_node, threads):
    """What a rank says that torchrun has started with `per_node` ranks on its machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)):
            return environment.describe(comm)
    finally:
        torch.set_num_threads(before)


def test_it_names_versions_devices_and_ranks(ranks):
    everyone = ranks.run(describe, 4, 1)
    assert everyone == 4 * everyone[:1], "all ranks say the same"
    [facts] = everyone[:1]
    assert json.loads(json.dumps(facts)) == facts
    assert facts.pop("oversubscribed") in (True, False)
    assert facts == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu",
        "backend": "gloo",
        "world_size": 4,
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
    }


def test_ranks_times_threads_beyond_the_cores_is_oversubscribed(ranks):
    """Of one machine: four ranks on four machines have all its cores each."""
    cores = len(os.sched_getaffinity(0))
    for per_node, threads in ((1, cores), (1, cores + 1), (cores, 1), (cores + 1, 1), (4, 1)):
        said = [facts["oversubscribed"] for facts in ranks.run(describe, per_node, threads)]
        assert said == 4 * [per_node * threads > cores]


def test_bf16_is_no_question_on_the_cpu():
    environment.check_precision("bf16", torch.device("cpu"))
