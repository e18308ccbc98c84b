"""A job of gloo ranks that all-reduce in turns: {"rounds": N, "die": rank or null}.

Rank `die` leaves without a word while the others wait for it, so that their connections break.
"""

import os
from pathlib import Path

from algorithms.common.files import read_json, write_json
from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Sum the ranks `rounds` times and write the last sum to sum_N.json."""
    import torch
    import torch.distributed as dist

    config = read_json(config_path)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(config["rounds"]):
        if step == 1 and rank == config["die"]:
            os._exit(9)
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        print(f"step {step}: {total.item()}")
    facts = {"sum": total.item(), "threads": torch.get_num_threads(), "cwd": os.getcwd()}
    write_json(config_path.parent / f"sum_{rank}.json", facts)
    dist.destroy_process_group()


if __name__ == "__main__":
    entry.main(run)
