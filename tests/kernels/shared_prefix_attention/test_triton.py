"""The Triton twin without a GPU: in the interpreter, and compiled for sm_80 and sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.shared_prefix_attention import Prefix
from kernels.shared_prefix_attention import triton as twin
from tests.kernels.shared_prefix_attention.cases import too_large
from tests.kernels.shared_prefix_attention.interpreted import RUNS

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have


@pytest.fixture(scope="module")
def interpreted():
    """The errors of all runs in the interpreter, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.shared_prefix_attention.interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", RUNS)
def test_values_and_gradients_in_the_interpreter(name, interpreted):
    assert not too_large(interpreted[name], RUNS[name][1])


@pytest.mark.parametrize("name", ["strided", "twice", "saved"])
def test_strided_inputs_second_passes_and_saved_forwards_in_the_interpreter(name, interpreted):
    assert not too_large(interpreted[name], torch.float32)


def test_the_interpreter_ran_the_triton_twin(interpreted):
    assert interpreted["calls"] == {"triton": len(RUNS) + 8, "reference": len(RUNS)}


class Driver:
    """Stands for a GPU that is not there: Triton asks it what to compile for."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # the compiled kernels of two targets are not mixed up

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """Runs the twin with launches replaced by compiling the very same launch for a GPU."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(twin, "precision", twin.gpu_precision)

    def compile_launches(capability, dtype, dim, tokens=64, **options):
        monkeypatch.setattr(triton.runtime.driver, "_active", Driver(capability))
        compiled = {}

        def launch(kernel, grid, args, **constants):
            compiled[kernel.__name__] = kernel.warmup(*args, grid=grid, **constants)

        monkeypatch.setattr(twin, "launch", launch)
        query = torch.zeros(2, 4, tokens, dim, dtype=dtype, requires_grad=True)
        own = torch.zeros(2, 2, tokens, dim, dtype=dtype)
        shared = torch.zeros(2, 128, dim, dtype=dtype)
        sums = torch.zeros(2, 2, 128, dim)
        out = twin.attention(query, own, own, Prefix(shared, shared, *sums), scale=1.0, **options)
        out.sum().backward()
        return compiled

    return compile_launches


def check(compiled, capability):
    assert set(compiled) == {"forward", "query_grad", "own_grads", "prefix_grads"}
    for name, kernel in compiled.items():
        assert kernel.metadata.target.arch == capability
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], name


SPECIAL = {"window": 100, "softcap": 2.0, "sinks": torch.zeros(4)}


@pytest.mark.parametrize("capability", [80, 90])
def test_the_launches_of_common_heads_compile(compile_for, capability):
    check(compile_for(capability, torch.bfloat16, 64), capability)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_every_tile_compiles_and_fits(compile_for, capability, dtype, dim, options):
    check(compile_for(capability, dtype, dim, **options), capability)


def test_there_is_a_tile_for_every_head_size_and_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for dim in range(1, twin.MAX_DIM + 1):
            wide = torch.zeros(1, 1, 1, dim, dtype=dtype)
            narrow = torch.zeros(1, 1, 1, 1, dtype=dtype)
            assert twin.tiles(wide, narrow) == twin.tiles(narrow, wide)


def test_what_the_twin_does_not_take(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    value = torch.zeros(1, 1, 1, 16)
    assert twin.refuses(value, value) is None
    assert twin.refuses(value.double(), value.double()) == "torch.float64 is not supported"
    wide = torch.zeros(1, 1, 1, 257)
    assert twin.refuses(value, wide) == "head sizes above 256 are not supported"
    monkeypatch.setattr(twin, "_installed", lambda: False)
    assert twin.refuses(value, value) == "triton is not installed"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert twin.refuses(value, value) == "tensors are on cpu"
