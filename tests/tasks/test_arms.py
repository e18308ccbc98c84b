import re
from pathlib import Path

from tasks import arms
from tests.tasks.trained import NASTY, make_arm


def test_the_table_has_units_and_markdown_escapes_names(tmp_path: Path) -> None:
    trained = arms.read(make_arm(tmp_path, NASTY, 3.1))
    assert arms.table(trained) == [
        {
            "arm": NASTY,
            "loss": "3.1000",
            "perplexity": "22.20",
            "bits/byte": "1.5500",
            "device-hours": "0.031 h",
            "payload": "1.20 GB",
            "wire": "1.20 GB",
            "tokens/s": "6.83 k",
            "peak memory": "412 MB",
            "optimizer": "8.43 MB",
            "parameters": "1.05 M",
        }
    ]
    lines = arms.markdown(trained).splitlines()
    assert "**3.1000**" in lines[0] and "614 k tokens" in lines[0]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}) == 1
    assert "\\<script\\>" in lines[-1]


def test_arms_of_two_stages_are_told_apart(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "a", 3.1) | make_arm(tmp_path, "a", 3.0, stage="pretrain_async")
    names = [row["arm"] for row in arms.table(arms.read(folders))]
    assert names == ["pretrain_async/a", "pretrain_lordo/a"]
