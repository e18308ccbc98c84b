"""Owns a job in a process of its own, for tests that kill the owner: python -m ... JOB_ID RUN_DIR.

Further arguments are the `on_orphaned` command.
"""

import sys
from pathlib import Path

from tasks.torchrun import run_job

if __name__ == "__main__":
    run_job(
        "tests.jobs.scripted",
        Path(sys.argv[2]),
        ranks=2,
        job_id=sys.argv[1],
        deadline_s=120,
        stop_s=5,
        on_orphaned=sys.argv[3:],
    )
