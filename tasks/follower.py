"""The lines of a file that another process writes, each given once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Follower:
    """Where in a growing file its reader is. A file that was cut or replaced is read afresh."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._last = b""

    def lines(self) -> Iterator[str]:
        """The whole lines that were not yet given, without their ends; none without a file."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            # What was cut may have grown past its old end, but with another line in this place.
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._offset, self._last = 0, b""
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line
                yield line[:-1].decode(errors="replace")
