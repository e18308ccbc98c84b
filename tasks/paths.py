"""Where things lie. One `Workspace` is one set of the stages' outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Workspace:
    """Folders of the stages' outputs below `root`.

    The tracked one is the project itself (DVC knows its outputs); a run with `--set` gets one of
    its own below runs/set/, so that what DVC tracks always belongs to params.yaml.
    """

    root: Path = PROJECT

    @property
    def corpus(self) -> Path:
        return self.root / "data" / "corpus"

    @property
    def tokens(self) -> Path:
        return self.root / "data" / "tokens"

    @property
    def prompts(self) -> Path:
        return self.root / "data" / "prompts"

    @property
    def policy(self) -> Path:
        return self.root / "models" / "policy"

    def rollouts(self, stage: str, arm: str) -> Path:
        return self.root / "data" / "rollouts" / stage / f"{arm}.parquet"

    def model(self, stage: str, arm: str) -> Path:
        return self.root / "models" / stage / arm

    def metrics(self, stage: str, arm: str) -> Path:
        return self.root / "metrics" / stage / arm

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def study(self, name: str) -> Workspace:
        """Folders of what a study makes beside the arms that every experiment trains."""
        return Workspace(self.root / "studies" / name)


CACHE = PROJECT / "data" / "cache"
"""Downloaded archives by sha256; shared by all workspaces."""

RUNS = PROJECT / "runs"
LOCKS = PROJECT / ".locks"


def run_directory(stage: str, arm: str, job_id: str) -> Path:
    """Working folder of one job: config, logs, metrics.jsonl, checkpoints. Outlives a stop."""
    return RUNS / stage / arm / job_id
