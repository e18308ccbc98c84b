"""What trained arms leave in metrics/, for the tests of what is drawn and told of them."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

NASTY = "<script>alert(1)</script> | $x^2$ & 'co' \u00e9"


def make_arm(
    root: Path, arm: str, loss: float, *, stage: str = "pretrain_lordo", **timing: Any
) -> dict[str, Path]:
    """What `tasks/train.py` publishes of an arm that ended at `loss` after 300 steps."""
    folder = root / stage / f"arm-{zlib.crc32(arm.encode())}"
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = []
    for step in range(10, 301, 10):
        value = loss + 4 * math.exp(-step / 60)
        sent = {"comm/payload_bytes": 4_000_000 * step, "comm/wire_bytes": 4_000_000 * step}
        rows.append({"step": step, "tokens": 2048 * step, "train/loss": value - 0.05, **sent})
        if step % 50 == 0:
            rows[-1]["val/loss"] = value
    quality = {
        "val_loss": loss,
        "val_perplexity": math.exp(loss),
        "val_bits_per_byte": loss / 2,
        "train_loss": loss - 0.05,
        "tokens": 614_400,
        "steps": 300,
        "parameters": 1_053_824,
        "payload_bytes": 1_200_000_000,
        "wire_bytes": 1_200_000_000,
    }
    clock = [
        {"step": r["step"], "elapsed": r["step"] / 5, "device_hours": r["step"] / 9000}
        for r in rows
    ]
    times = {
        "seconds": 60.0,
        "device_hours": 0.0313,
        "gpu_hours": 0.0,
        "tokens_per_s": 6834.0,
        "peak_bytes": 412_000_000,
        "optimizer_bytes": 8_430_592,
        "oversubscribed": False,
        "rows": clock,
    }
    (folder / "quality.json").write_text(json.dumps(quality))
    (folder / "curve.json").write_text(json.dumps({"rows": rows}))
    (folder / "timing.json").write_text(json.dumps(times | timing))
    return {f"{stage}/{arm}": folder}
