import re
from pathlib import Path

import pytest

from algorithms.common.errors import InputError
from algorithms.common.files import read_json, replace_folder, retired, write_json, write_text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"b": [1.5, None], "a": "\u00e9"})
    assert read_json(path) == {"a": "\u00e9", "b": [1.5, None]}
    with path.open() as before:
        write_text(path, "r\u00e4ume\n")
        assert before.read().endswith("}\n"), "who has it open sees the old one to its end"
    assert path.read_bytes() == b"r\xc3\xa4ume\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe"])
def test_what_is_not_json_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "value.json"
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: no such file$"):
        read_json(path)
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: not JSON: .+$") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_a_folder_takes_the_whole_place_of_another(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "out" / "old"
    for name in ("first", "second"):
        new.mkdir()
        (new / name).touch()
        replace_folder(new, old)
    assert [path.name for path in old.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [old.parent]
    assert list(old.parent.iterdir()) == [old]
    # A kill between the two renames of an earlier attempt is no obstacle.
    old.rename(retired(old))
    new.mkdir()
    replace_folder(new, old)
    assert list(old.parent.iterdir()) == [old]
