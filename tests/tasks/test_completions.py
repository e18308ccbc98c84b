from tasks.completions import HEAD, TAIL, clipped, section

ROW = {"prompt_id": "a", "prompt": "<b>\n? k1", "completion": "<i>v1", "reward": 0.5}


def test_a_table_for_each_evaluation_the_last_one_open():
    rows = [ROW | {"step": step, "decoding": kind} for step in (0, 5) for kind in ("g", "s")]
    html = section([("exact", rows), ("ddp", [])])
    assert html.count("<details>") == 1 and html.count("<details open>") == 1
    assert html.index("exact, update 0") < html.index("<details open>") < html.index("update 5")
    assert html.count("&lt;b&gt;\n? k1") == 4 and "<i>" not in html
    assert html.count("<td>0.5</td>") == 4
    assert section([("ddp", [])]) == ""


def test_a_long_prompt_keeps_its_question():
    text = "a" * 500 + "? k1"
    assert clipped(text).endswith("a? k1") and len(clipped(text)) == HEAD + TAIL + 3
    assert clipped("short") == "short"
