"""Flow `pretrain`: one arm of a pretraining stage, after the data it reads."""

from __future__ import annotations

from prefect import flow

from flows.arm import make_arm

VERSION = "1"


@flow(name="pretrain", version=VERSION, flow_run_name="pretrain {arm}")
def pretrain(arm: str, overrides: list[str] | None = None, profile: str | None = None) -> None:
    """Train `arm` and make what it reads, where they are not up to date."""
    make_arm("pretrain", VERSION, arm, overrides, profile)
