"""README, "Several nodes": torchrun on each node, here two agents on loopback, one rank each."""

import shlex
import socket
from pathlib import Path

import pytest

from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from tasks.paths import PROJECT
from tests.project import Project


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def outcome(run_dir: Path) -> tuple[str, list[tuple[float, ...]]]:
    rows = read_rows(run_dir / "metrics.jsonl")
    repeats = [(row["step"], row["tokens"], row["train/loss"], row["grad_norm"]) for row in rows]
    return read_json(run_dir / "result.json")["weights_sha256"], repeats


def as_in_readme(config: Path, **options: str) -> list[str]:
    """The command for a node, with options of its own: `node_rank="1"`."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in readme.splitlines() if "torchrun --nnodes 2" in line]
    words = shlex.split(line)
    for name, value in options.items():
        words[words.index("--" + name.replace("_", "-")) + 1] = value
    words[words.index("CONFIG.json")] = str(config)
    return words


@pytest.mark.slow
def test_two_agents_train_to_the_weights_of_one(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    assert project.flows("prepare", "--plain").returncode == 0
    dry = project.flows("pretrain", "--arm", "ddp", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    threads, *_, name = shlex.split(dry.stdout)  # OMP_NUM_THREADS=1 on two cores
    config = Path(name)
    alone = project.root / "runs" / "alone" / "config.json"
    alone.parent.mkdir()
    alone.write_text(config.read_text())
    command = dry.stdout.replace(shlex.quote(str(config)), shlex.quote(str(alone)))
    done = project.execute("bash", "-c", command)
    assert done.returncode == 0, done.stderr

    here = {"nproc_per_node": "1", "master_addr": "127.0.0.1", "master_port": str(free_port())}
    agents = [
        project.start("env", threads, *as_in_readme(config, node_rank=node, **here))
        for node in ("0", "1")
    ]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "step 12/12" in said[0] and "step 12/12" not in said[1], "rank 0 speaks"
    assert outcome(config.parent) == outcome(alone.parent)
    facts = read_json(config.parent / "env.json")
    assert (facts["world_size"], facts["backend"], facts["oversubscribed"]) == (2, "gloo", False)

    publish = project.flows("pretrain", "--arm", "ddp", "--plain")
    assert publish.returncode == 0, publish.stderr
    assert not (config.parent / "logs").exists(), "nothing was trained again"
    assert (project.root / "models" / "pretrain_lordo" / "ddp" / "model.safetensors").is_file()
    quality = read_json(project.root / "metrics" / "pretrain_lordo" / "ddp" / "quality.json")
    assert quality == read_json(alone.parent / "result.json")["quality"]
