"""The command line: instant help, one line and exit code 2 for bad input."""

import subprocess
import sys
import time

import pytest

from tasks.paths import PROJECT

HEAVY = "import sys; from flows.__main__ import parser; parser(); print(*sys.modules, sep='\\n')"


def flows(*arguments):
    return subprocess.run(
        [PROJECT / "run", "-m", "flows", *arguments], capture_output=True, text=True, timeout=120
    )


def test_help_imports_nothing_heavy():
    modules = subprocess.check_output([sys.executable, "-c", HEAVY], cwd=PROJECT, text=True).split()
    for name in ("torch", "transformers", "prefect", "mlflow", "dvc", "pydantic", "rich"):
        assert name not in modules


def test_help_answers_in_under_a_second_and_explains_each_flow():
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        done = flows("--help")
        seconds.append(time.perf_counter() - begun)
    assert done.returncode == 0
    assert min(seconds) < 1.0
    for name in ("prepare", "pretrain", "report", "experiment", "ui", "serve"):
        assert f"\n    {name} " in done.stdout or f"\n    {name}\n" in done.stdout
        assert flows(name, "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "--arm", "dpp"], "no arm 'dpp' in params.yaml; known arms: ddp, "),
        (["experiment", "--study", "ddp"], "no study 'ddp' in params.yaml; known studies: lordo"),
        (["report", "--study", "", "--plain"], "no study '' in params.yaml; known studies: lordo"),
        (["pretrain", "--arm", "ddp", "--set", "model.hiden_size=3"], "did you mean 'hidden_size'"),
        (["prepare", "--set", "tokens.vocab_size"], "--set tokens.vocab_size: must be key=value"),
        (["experiment", "--profile", "tpu"], "params.tpu.yaml: no such file"),
        (["report", "--plain", "--set", "tokens=3"], "with --set: tokens: input should be"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    done = flows(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("shoestring: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_an_unknown_flow_is_refused_by_the_parser():
    done = flows("experimental")
    assert done.returncode == 2
    assert "experimental" in done.stderr
