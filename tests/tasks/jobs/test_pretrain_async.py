"""The job as a process: every schedule under the launcher, killed and resumed; what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithms.async_pipeline.config import PRESETS, ArmConfig, JobConfig
from algorithms.common import data, model
from algorithms.common.files import read_json
from algorithms.common.loop import token_loss
from algorithms.common.metrics import read_rows
from tasks.paths import PROJECT
from tests import toys
from tests.tasks.runs import await_true

OURS = PRESETS["ours"]
DROPOUT = replace(toys.UNTIED, extra={"attention_dropout": 0.1})
SIMULATED = ArmConfig(stages=4, executor="simulator", optimizer=OURS)
ASYNC = ArmConfig(stages=2, optimizer=OURS)
FLUSHED = {
    name: ArmConfig(schedule=name, stages=2, microbatches=4, optimizer=OURS)
    for name in ("gpipe", "one_f_one_b", "zero_bubble")
}


def write_config(run_dir, tokens, arm, decoder=toys.UNTIED, **changes):
    config = JobConfig(
        stage="pretrain_async",
        arm_name="a",
        job_id="test",
        tokens_dir=str(tokens),
        model=decoder,
        training=toys.shared_training(**changes),
        arm=arm,
    )
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    return run_dir / "config.json"


def command(config, ranks):
    module = ["-m", "tasks.jobs.pretrain_async", str(config)]
    if ranks == 1:  # a job without torchrun is a world of one
        return [sys.executable, *module]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", *module]


def start(config, ranks=1):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOESTRING")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        command(config, ranks),
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(config, ranks=1):
    """Exit code and what was said on stderr."""
    process = start(config, ranks)
    _, said = process.communicate(timeout=400)
    return process.returncode, said


def held_out(folder, tokens):
    """Mean loss of a Hugging Face directory on the fixed held-out set of `toys.RUN`."""
    decoder = AutoModelForCausalLM.from_pretrained(folder)
    shards = data.TokenShards(tokens, "val")
    [batch] = data.evaluation_batches(
        shards, sequences=5, length=16, batch_size=5, rank=0, world_size=1
    )
    with torch.no_grad():
        return token_loss(model.logits(decoder, batch[:, :-1]), batch[:, 1:]).item()


def assert_ordinary(run_dir, tokens):
    """What a finished job leaves: an ordinary model with the loss that its result names."""
    result = read_json(run_dir / "result.json")
    decoder = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert model.weights_sha256(decoder) == result["weights_sha256"]
    expected = result["quality"]["val_loss"]
    assert held_out(run_dir / "model", tokens) == pytest.approx(expected, rel=1e-6)
    assert result["quality"]["parameters"] == model.parameter_count(decoder)
    assert result["quality"]["tokens"] == 10 * 8 * 16
    return result


def test_a_simulated_arm_leaves_an_ordinary_model(tmp_path, tokens):
    code, said = finish(write_config(tmp_path / "run", tokens, SIMULATED))
    assert code == 0, said
    result = assert_ordinary(tmp_path / "run", tokens)
    assert result["quality"]["stages"] == 4
    assert result["timing"]["modelled_device_hours"] > 0
    assert "device_hours" not in result["timing"]
    assert read_json(tmp_path / "run" / "env.json")["world_size"] == 1


@pytest.mark.parametrize(
    ("arm", "decoder", "message"),
    [
        (ASYNC, toys.UNTIED, "is for 2 ranks, torchrun started 1"),
        (SIMULATED, DROPOUT, "model.extra.attention_dropout: must be 0"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path, tokens, arm, decoder, message):
    code, said = finish(write_config(tmp_path / "run", tokens, arm, decoder))
    assert code == 2
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_stop_ends_with_a_checkpoint_and_code_75(tmp_path, tokens):
    config = write_config(tmp_path / "run", tokens, SIMULATED, steps=100_000)
    process = start(config)
    rows = tmp_path / "run" / "metrics.jsonl"
    await_true(lambda: len(read_rows(rows)) > 3, timeout_s=200)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 75, said
    last = read_rows(rows)[-1]["step"]
    assert f"stopped after step {last}; its checkpoint is written" in said
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08}" / "seal.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async", *FLUSHED])
def test_every_schedule_runs_under_the_launcher(tmp_path, tokens, name):
    arm = FLUSHED.get(name, ASYNC)
    code, said = finish(write_config(tmp_path / "run", tokens, arm), ranks=2)
    assert code == 0, said
    result = assert_ordinary(tmp_path / "run", tokens)
    timing = result["timing"]
    assert timing["device_hours"] == pytest.approx(2 * timing["seconds"] / 3600)
    assert 0 < timing["utilisation"] < 1
    assert len(timing["trace"]) == 2
    assert (result["quality"]["staleness"] > 0) is (name == "async")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert {
        "train/loss", "val/loss", "val/perplexity", "val/bits_per_byte", "tokens", "tokens_per_s",
        "lr", "grad_norm", "device_hours", "gpu_hours", "comm/payload_bytes", "comm/wire_bytes",
        "comm/activations/payload_bytes", "comm/gradients/payload_bytes", "memory/peak_bytes",
        "memory/optimizer_bytes", "staleness/mean", "pipeline/utilisation", "pipeline/bubble_pct",
    } <= set(rows[-1])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arm", [ASYNC, FLUSHED["zero_bubble"]], ids=["async", "zero_bubble"])
def test_killed_it_resumes_to_the_same_weights(tmp_path, tokens, arm):
    """In the middle of training, with microbatches under way."""
    steps = {"steps": 200, "checkpoint_every": 7, "log_every": 5, "eval_every": 500}
    whole = write_config(tmp_path / "whole", tokens, arm, **steps)
    assert finish(whole, ranks=2)[0] == 0
    killed = write_config(tmp_path / "killed", tokens, arm, **steps)
    process = start(killed, ranks=2)
    rows = tmp_path / "killed" / "metrics.jsonl"
    await_true(lambda: any(row["step"] > 20 for row in read_rows(rows)), timeout_s=200)
    process.kill()
    await_true(lambda: not _alive(str(killed)))
    process.communicate()  # the ranks hold the pipes too
    assert not (tmp_path / "killed" / "result.json").exists()
    assert finish(killed, ranks=2)[0] == 0
    one, two = (read_json(tmp_path / name / "result.json") for name in ("whole", "killed"))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["quality"] == two["quality"]


def _alive(config):
    """End the ranks that a killed launcher leaves; whether there were any."""
    found = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if config in process.cmdline():
                process.kill()
                found = True
    return found
