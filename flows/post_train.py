"""Flow `post_train`: one arm of reinforcement learning, after its prompts and the policy it starts
from. Rollouts, replay and held-out evaluation are one job."""

from __future__ import annotations

from prefect import flow

from flows.arm import make_arm

VERSION = "1"


@flow(name="post_train", version=VERSION, flow_run_name="post_train {arm}")
def post_train(arm: str, overrides: list[str] | None = None, profile: str | None = None) -> None:
    """Train `arm` and make what it reads, where they are not up to date."""
    make_arm("post_train", VERSION, arm, overrides, profile)
