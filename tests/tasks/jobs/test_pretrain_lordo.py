"""The job as a process: on a bare node, in bad circumstances, and with what it leaves behind."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from algorithms.common.files import read_json
from algorithms.common.model import weights_sha256
from algorithms.lordo.config import ArmConfig, JobConfig
from tasks.paths import PROJECT
from tests import toys
from tests.privileges import needs_root

BARE = """
import runpy, sys
from importlib.machinery import PathFinder
MISSING = {"prefect", "mlflow", "dvc", "pydantic", "pyarrow"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in MISSING
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
sys.argv = ["pretrain_lordo", sys.argv[1]]
runpy.run_module("tasks.jobs.pretrain_lordo", run_name="__main__", alter_sys=True)
"""


def write_config(run_dir, tokens, **changes):
    config = JobConfig(
        stage="pretrain_lordo",
        arm_name="ddp",
        job_id="test",
        tokens_dir=str(tokens),
        model=toys.MODEL,
        training=toys.training(**changes),
        arm=ArmConfig(optimizer=toys.OPTIMIZER),
    )
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    return run_dir / "config.json"


def start(*arguments):
    """A job without torchrun is a world of one."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOESTRING")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_on_a_bare_node_it_leaves_an_ordinary_model(tmp_path):
    """prefect, mlflow, dvc, pydantic and pyarrow cannot be imported there."""
    tokens = toys.write_tokens(tmp_path / "tokens")
    config = write_config(tmp_path / "run", tokens)
    done = start("-c", BARE, str(config))
    assert done.returncode == 0, done.stderr
    result = read_json(tmp_path / "run" / "result.json")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert weights_sha256(model) == result["weights_sha256"]
    assert result["quality"]["tokens"] == 10 * 8 * 16
    assert result["timing"]["oversubscribed"] is False
    assert result["timing"]["optimizer_bytes"] > 8 * result["quality"]["parameters"]
    environment = read_json(tmp_path / "run" / "env.json")
    assert environment["world_size"] == 1
    assert environment["device"] == "cpu"


def overwrite(folder):
    """Damage that leaves the size as it was, and every id inside the vocabulary."""
    with (folder / "train" / "00000.bin").open("r+b") as file:
        file.write(bytes(100))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json: no such file"),
        (lambda folder: (folder / "val" / "00000.bin").write_bytes(b"1"), "00000.bin: has 1 bytes"),
        (overwrite, "train/00000.bin: is corrupted: its sha256 is"),
    ],
)
def test_damaged_tokens_are_one_line_and_exit_code_2(tmp_path, damage, message):
    tokens = toys.write_tokens(tmp_path / "tokens")
    damage(tokens)
    config = write_config(tmp_path / "run", tokens)
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "result.json").exists()


def test_less_data_than_a_batch_says_how_much_is_needed(tmp_path):
    tokens = toys.write_tokens(tmp_path / "tokens", train=100)
    config = write_config(tmp_path / "run", tokens)
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 2
    assert "split 'train' has 6 sequences of 16 tokens, 8 are needed" in done.stderr


def test_another_number_of_ranks_than_configured_is_refused(tmp_path):
    tokens = toys.write_tokens(tmp_path / "tokens")
    config = write_config(tmp_path / "run", tokens, ranks=2)
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 2
    assert "is for 2 ranks, torchrun started 1" in done.stderr


@pytest.fixture
def disk(tmp_path):
    """A disk of 700 kB, which holds two checkpoints; changed by `mount`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


@needs_root
@pytest.mark.slow
def test_a_full_disk_is_one_line_and_with_more_room_it_goes_on(tmp_path, disk):
    tokens = toys.write_tokens(tmp_path / "tokens")
    config = write_config(disk / "run", tokens)
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.endswith(".writing_step_00000009: No space left on device\n")
    assert "Traceback" not in done.stderr
    kept = {file.name for file in (disk / "run" / "checkpoints").iterdir()}
    assert kept == {"step_00000003", "step_00000006"}, "no half of a third"
    mount("-o", "remount,size=20m", str(disk))
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 0, done.stderr
    assert "training from step 6 of 10" in done.stdout
    assert read_json(disk / "run" / "result.json")["quality"]["steps"] == 10


@needs_root
@pytest.mark.slow
def test_a_read_only_folder_is_one_line(tmp_path, disk):
    tokens = toys.write_tokens(tmp_path / "tokens")
    config = write_config(disk / "run", tokens)
    mount("-o", "remount,ro", str(disk))
    done = start("-m", "tasks.jobs.pretrain_lordo", str(config))
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(disk / "run") in done.stderr
    assert done.stderr.endswith(": Read-only file system\n") and done.stderr.count("\n") == 1
