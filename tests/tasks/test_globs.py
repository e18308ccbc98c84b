import pytest

from algorithms.common.errors import InputError
from tasks.globs import Slots, compile_glob


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("docs/**/*.txt", "docs/a.txt", True),
        ("docs/**/*.txt", "docs/a/b/c.txt", True),
        ("docs/**/*.txt", "xdocs/a.txt", False),
        ("docs/**/*.txt", "docs/a.txt.gz", False),
        ("docs/**", "docs/a/b", True),
        ("docs/**", "docs.txt", False),
        ("**/*", "a", True),
        ("**/*", "a/b/c", True),
        ("**/test/**/*.py", "test/a.py", True),
        ("**/test/**/*.py", "a/test/b/c.py", True),
        ("**/test/**/*.py", "a/testing/c.py", False),
        ("*.txt", "a/b.txt", False),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[a-c].py", "b.py", True),
        ("[!a-c].py", "b.py", False),
        ("[!a-c].py", "d.py", True),
        ("[]].py", "].py", True),
        ("a.b", "axb", False),
        ("a**b", "a--b", True),
        ("a**b", "a/b", False),
        ("[", "[", True),
        ("**/*.txt", "line\nbreak.txt", True),
    ],
)
def test_glob_matches_a_whole_path(glob: str, path: str, matches: bool) -> None:
    assert (compile_glob(glob).fullmatch(path) is not None) is matches


def test_the_first_slot_takes_a_file() -> None:
    slots = Slots("origin", {"prose": ["docs/**"], "rest": ["**/*"]})
    assert [slots.slot(path) for path in ("docs/a", "b")] == ["prose", "rest"]
    assert Slots("origin", {"prose": ["docs/**"]}).slot("b") is None


def test_a_glob_that_matches_nothing_is_named() -> None:
    slots = Slots("pypi:x==1", {"prose": ["docs/**", "no/**"]})
    slots.slot("docs/a")
    with pytest.raises(InputError, match=r"^pypi:x==1: glob 'no/\*\*' matches no file$"):
        slots.require_matches()


def test_a_glob_behind_another_that_takes_its_files_has_matched() -> None:
    slots = Slots("origin", {"all": ["**/*"], "docs": ["docs/**"]})
    slots.slot("docs/a")
    slots.require_matches()
