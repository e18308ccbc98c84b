import re
from pathlib import Path

from tasks import arms
from tests.tasks.trained import NASTY, make_arm, make_rewarded


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
    assert names == ["pretrain_lordo/a", "pretrain_async/a"], "not by loss: they do not compare"
    lines = arms.markdown(arms.read(folders))
    assert lines.count("Lowest held-out loss") == 2 and "## pretrain\\_async" in lines


def test_arms_by_reward_are_ordered_from_the_highest(tmp_path: Path) -> None:
    folders = make_rewarded(tmp_path, "low", 0.5) | make_rewarded(tmp_path, "high", 0.75)
    trained = arms.read(folders)
    first, second = arms.table(trained)
    assert (first["arm"], second["arm"]) == ("high", "low")
    assert list(first)[1:8] == [
        "reward", "greedy", "at start", "mode", "objective", "updates", "tokens"
    ]  # fmt: skip
    assert (first["reward"], first["greedy"], first["at start"]) == ("0.7500", "0.7600", "0.2500")
    assert "Highest held-out reward: **0.7500** (high, from 0.2500" in arms.markdown(trained)
    both = arms.read(folders | make_arm(tmp_path, "ddp", 3.1))
    assert "Lowest held-out loss" in arms.markdown(both)
