"""Flow `prepare`: packages and files -> corpus -> tokenizer and token shards."""

from __future__ import annotations

from prefect import flow

from flows import steps
from flows.stages import context


@flow(name="prepare", version="1", flow_run_name="prepare")
def prepare(
    only: str | None = None, overrides: list[str] | None = None, profile: str | None = None
) -> None:
    """Make `corpus` and `tokens`, or `only` one of them, where they are not up to date."""
    here = context(overrides or (), profile)
    if only in (None, "corpus"):
        steps.ensure(here, "corpus", lambda: steps.make_corpus(here))
    if only in (None, "tokens"):
        steps.ensure(here, "tokens", lambda: steps.make_tokens(here))
