"""What the parts share: figures, failures that do not end a part, the time that is left."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import torch

from algorithms.common.errors import one_line

T = TypeVar("T")


class Part:
    """What a part has found, and how much of its time is left."""

    def __init__(self, seconds: float, dry: bool) -> None:
        self.end = time.perf_counter() + seconds
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.failed: list[str] = []

    def describe(self) -> None:
        """What this runs on."""
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        device, versions = torch.cuda.get_device_name(), f"torch {torch.__version__}"
        for package in ("triton", "transformers"):
            versions += f", {package} {version(package)}"
        self.say(f"{device}, {free:.0f} of {total:.0f} GiB free, {versions}")

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def figure(self, name: str, value: float | None) -> None:
        """Print it, a float with four digits; an infinite or undefined one is a failure."""
        if value is not None and not math.isfinite(value):
            self.failed.append(name)
            self.say(f"{name}: is {value}")
            return
        shown = float(f"{value:.4g}") if isinstance(value, float) else value
        self.say(f"{name} = {json.dumps(shown)}")

    def attempt(self, what: str, call: Callable[[], T], expected: float = 0.0) -> T | None:
        """The result of `call`, or None with the reason in a line: no time, no memory, an error."""
        left = self.end - time.perf_counter()
        if left < expected:
            self.say(f"{what}: not run, {left:.0f} s left, {expected:.0f} s expected")
            return None
        try:
            return call()
        except torch.OutOfMemoryError as error:
            self.say(f"{what}: does not fit: {one_line(error)[:200]}")
        except Exception as error:  # whatever it is, what comes after it is still measured
            self.failed.append(what)
            self.say(f"{what}: {type(error).__name__}: {one_line(error)[:400]}")
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        return None

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()
