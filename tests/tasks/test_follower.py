from pathlib import Path

from tasks.follower import Follower


def test_each_whole_line_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = Follower(path)
    assert list(follower.lines()) == []
    path.write_bytes(b"one\n\ntwo \xff\nhal")
    assert list(follower.lines()) == ["one", "", "two \ufffd"]
    assert list(follower.lines()) == []
    with path.open("a") as file:
        file.write("f\nthree\nfour\n")
    lines = follower.lines()
    assert [next(lines), next(lines)] == ["half", "three"]
    assert list(follower.lines()) == ["four"], "what was not taken comes again"


def test_a_file_that_was_cut_or_replaced_is_read_afresh(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    follower = Follower(path)
    assert list(follower.lines()) == ["one", "two", "three"]
    path.write_text("one\n2\n3\nfour, past the old end\n")
    assert list(follower.lines()) == ["one", "2", "3", "four, past the old end"]
    path.write_text("one\n")
    assert list(follower.lines()) == ["one"]
    path.write_text("one\ntwo\n")
    assert list(follower.lines()) == ["two"]
