"""Which slot a file belongs to. `PurePath.full_match` and its `**` exist from Python 3.13 on."""

from __future__ import annotations

import re

from algorithms.common.errors import InputError

MAGIC = re.compile(r"[*?\[]")
_TOKEN = re.compile(
    r"\[(?P<no>!?)(?P<set>\][^\]]*|[^\]]+)\]|(?P<any>\*+)|(?P<one>\?)|(?P<literal>.)", re.DOTALL
)


def compile_glob(glob: str) -> re.Pattern[str]:
    """Regular expression for a whole relative path, parts separated by `/`.

    `**` as a whole part is any number of folders, at the end also every file below; `*`, `?` and
    `[...]` stay within a part.
    """
    *folders, last = glob.split("/")
    parts = ["(?:[^/]+/)*" if part == "**" else f"{_part(part)}/" for part in folders]
    return re.compile("".join(parts) + (".+" if last == "**" else _part(last)), re.DOTALL)


def _part(part: str) -> str:
    return "".join(_token(match) for match in _TOKEN.finditer(part))


def _token(match: re.Match[str]) -> str:
    if match["any"]:
        return "[^/]*"
    if match["one"]:
        return "[^/]"
    if match["set"]:
        members = re.sub(r"([\[\]\\^&|~])", r"\\\1", match["set"])
        return f"[{'^/' if match['no'] else ''}{members}]"
    return re.escape(match["literal"])


class Slots:
    """The slots of one source. The first slot of params.yaml that matches a file takes it."""

    def __init__(self, origin: str, slots: dict[str, list[str]]) -> None:
        self.origin = origin
        self._globs = [
            (slot, glob, compile_glob(glob)) for slot, globs in slots.items() for glob in globs
        ]
        self._unmatched = {glob for _, glob, _ in self._globs}

    def slot(self, path: str) -> str | None:
        """Slot of the file at `path`, None when no glob matches."""
        matches = [(slot, glob) for slot, glob, regex in self._globs if regex.fullmatch(path)]
        self._unmatched.difference_update(glob for _, glob in matches)
        return matches[0][0] if matches else None

    def require_matches(self) -> None:
        """`InputError` for the first glob that no file has matched so far."""
        for _, glob, _ in self._globs:
            if glob in self._unmatched:
                raise InputError(f"{self.origin}: glob {glob!r} matches no file")
