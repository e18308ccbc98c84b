"""A job that does nothing: what is left is its launcher."""

from pathlib import Path

from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Return at once."""


if __name__ == "__main__":
    entry.main(run)
