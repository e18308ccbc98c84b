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


def make_pipeline(root: Path, arm: str, loss: float, *, simulated: bool = False) -> dict[str, Path]:
    """The same of an arm of two stages, which may have been simulated."""
    made = make_arm(root, arm, loss, stage="pretrain_async")
    [folder] = made.values()
    quality = json.loads((folder / "quality.json").read_text())
    (folder / "quality.json").write_text(json.dumps(quality | {"stages": 2, "staleness": 0.5}))
    times = json.loads((folder / "timing.json").read_text())
    prefix = "modelled_" if simulated else ""
    times |= {f"{prefix}utilisation": 0.89, f"{prefix}bubble_pct": 11.0, "trace": TRACE}
    if simulated:
        times |= {"simulated": True, "modelled_device_hours": times.pop("device_hours")}
        for name in ("gpu_hours", "tokens_per_s"):
            del times[name]
        for row in times["rows"]:
            row["modelled_device_hours"] = row.pop("device_hours")
    (folder / "timing.json").write_text(json.dumps(times))
    return made


TRACE = [
    [["forward", 0, 0.0, 0.1], ["wait", 0, 0.1, 0.4], ["backward", 0, 0.4, 0.6]],
    [["wait", 0, 0.0, 0.1], ["forward", 0, 0.1, 0.2], ["backward", 0, 0.2, 0.4]],
]
"""One microbatch through two stages."""


def make_rewarded(root: Path, arm: str, reward: float) -> dict[str, Path]:
    """The same of an arm of reinforcement learning that ended at `reward`."""
    made = make_arm(root, arm, 0.0, stage="post_train", tokens_per_s=2000.0)
    [folder] = made.values()
    quality = json.loads((folder / "quality.json").read_text())
    quality = {key: value for key, value in quality.items() if not key.startswith("val_")} | {
        "reward_heldout": reward,
        "reward_greedy": reward + 0.01,
        "reward_start": 0.25,
        "mode": "exact",
        "objective": "grpo",
    }
    (folder / "quality.json").write_text(json.dumps(quality))
    rows = json.loads((folder / "curve.json").read_text())["rows"]
    for row in rows:
        row["reward/mean"] = reward
        if row.pop("val/loss", None) is not None:
            row["reward/heldout"] = reward - 30 / row["step"]
    start = {"step": 0, "tokens": 0, "reward/heldout": 0.25}
    (folder / "curve.json").write_text(json.dumps({"rows": [start, *rows]}))
    shown = {"prompt_id": "a", "prompt": "? k1", "completion": "v1 v2", "reward": 1.0}
    answers = [shown | {"step": step, "decoding": "greedy"} for step in (0, 300)]
    (folder / "completions.json").write_text(json.dumps({"rows": answers}))
    return made
