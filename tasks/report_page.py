"""The report as one HTML file: styles and pictures inside, nothing loaded, no script.

It can be mailed, opened from disk or served; it fits a phone, and follows light and dark.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from tasks import completions
from tasks.arms import ArmRecord, by_stage, table
from tasks.measures import REWARD
from tasks.plots import Picture, charts
from tasks.units import prefixed

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The browser itself refuses to load anything."""

SCHEDULE = "schedule"
SCHEDULE_CAPTION = "What each rank did when, in a few updates near the end of the run."

TIMES = ("device-hours", "tokens/s")
"""Columns that say nothing about an oversubscribed arm."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --soft: #f5f7f9; --ink: #1d252d; --quiet: #5c6873;
  --line: #e1e6ea; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper: #161b22; --soft: #1d242d; --ink: #e6edf3;
  --quiet: #9aa6b2; --line: #2f3843; --accent: #4da6e0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 71rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; letter-spacing: -.02em; line-height: 1.2; }
h2 { margin: 2.75rem 0 .75rem; font-size: 1.35rem; }
h3 { margin: 2rem 0 .75rem; font-size: 1.05rem; }
p { margin: .5rem 0; } .quiet { color: var(--quiet); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.5rem 0 0; }
.facts div { background: var(--soft); border: 1px solid var(--line); border-radius: .6rem;
  padding: .7rem .9rem; min-width: 0; }
.facts dt { color: var(--quiet); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 650; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .6rem; text-align: right; white-space: nowrap; }
thead th { color: var(--quiet); font-weight: 550; background: var(--soft); }
tbody tr { border-top: 1px solid var(--line); }
tr > :first-child { position: sticky; left: 0; text-align: left; background: var(--paper);
  min-width: 8rem; overflow-wrap: anywhere; white-space: normal; }
thead tr > :first-child { background: var(--soft); }
table:not(.texts) tbody tr:first-child td:nth-child(2) { color: var(--accent); font-weight: 700; }
td.mute { color: var(--quiet); text-decoration: line-through; }
.texts td, .texts th { text-align: left; white-space: normal; vertical-align: top; }
.texts code { font: .82rem/1.45 ui-monospace, monospace; white-space: pre-wrap; }
details { margin: .6rem 0; } summary { cursor: pointer; padding: .25rem 0; }
sup { color: var(--quiet); line-height: 0; }
.notes { color: var(--quiet); font-size: .88rem; padding-left: 1.2rem; }
figure { margin: 0 0 2rem; } figcaption { color: var(--quiet); margin: .2rem 0 .6rem; }
img { display: block; width: 100%; height: auto; border: 1px solid var(--line);
  border-radius: .6rem; }
dl.words { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.2rem; margin: 0;
  font-size: .92rem; }
.words dt { font-weight: 600; } .words dd { margin: 0; color: var(--quiet); }
@media (max-width: 36rem) { body { padding-top: 1.5rem; } h1 { font-size: 1.5rem; }
  dl.words { grid-template-columns: 1fr; gap: 0; } .words dd { margin-bottom: .6rem; }
  tr > :first-child { min-width: 6.5rem; } }
"""

WORDS = {
    "loss": "mean cross-entropy of the held-out tokens, in nats; perplexity is its exponential",
    "bits/byte": "the same loss per byte of text, so that tokenizers can be compared",
    "device-hours": "ranks times wall time of training, over all attempts",
    "payload": "bytes of the buffers that one rank gave to communication, encoded as sent; of a "
    "pipeline the mean over ranks",
    "wire": "modelled traffic of one rank for these buffers: ring or point to point",
    "optimizer": "bytes of optimizer state on one rank",
}

REWARD_WORDS = {
    "reward": "mean over held-out prompts of answers sampled at temperature 1; greedy: of the "
    "likeliest ones",
    "mode": "which gradient of the prompt is taken; response_only leaves it out",
}

PIPELINE_WORDS = {
    "staleness": "updates by which the weights of gradients were older than those that they were "
    "applied to, mean over stages and microbatches",
    "utilisation": "compute of all stages over stages times wall time, at training",
}
MODELLED = {
    "modelled": "what a pipeline of this compute would take if messages took no time: computed, "
    "not measured, and in no curve",
}


def page(arms: Sequence[ArmRecord], pictures: Mapping[str, Mapping[str, Picture]]) -> str:
    """The whole file: a section a stage, its table in the order of `arms`. `pictures` by stage and
    figure."""
    stages = by_stage(arms)
    count = "1 arm" if len(arms) == 1 else f"{len(arms)} arms"
    of = ", ".join(stages)
    apart = "; a stage's arms are compared with each other alone" if len(stages) > 1 else ""
    sections = [_section(stage, own, pictures.get(stage, {})) for stage, own in stages.items()]
    words = dict(WORDS)
    if any(arm.measure is REWARD for arm in arms):
        words |= REWARD_WORDS
    if any(arm.pipeline for arm in arms):
        words |= PIPELINE_WORDS
    if any(arm.simulated for arm in arms):
        words |= MODELLED
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>shoestring: {escape(count)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Training on a shoestring</h1>
<p class="quiet">{escape(count)} of {escape(of)}, best first{apart}</p>
{"".join(sections)}
<h2>Words</h2>
<dl class="words">{_pairs(words)}</dl>
</body>
</html>
"""


def _section(stage: str, arms: Sequence[ArmRecord], pictures: Mapping[str, Picture]) -> str:
    rows = table(arms)
    best, measure = rows[0], arms[0].measure
    aside = "at start" if measure is REWARD else "bits/byte"
    facts = {
        f"{measure.best} held-out {measure.word}": best[measure.word],
        "reached by": best["arm"],
        aside.replace("/", " per "): best[aside],
        "training tokens": prefixed(arms[0].quality["tokens"]),
        "parameters": best["parameters"],
    }
    answers = completions.section([(arm.arm, arm.completions) for arm in arms])
    return f"""<section id="{escape(stage)}">
<h2>{escape(stage)}</h2>
<dl class="facts">{_pairs(facts, wrap=True)}</dl>
<h3>Arms</h3>
{_table(arms, rows)}
<h3>Curves</h3>
{_figures(arms, rows, pictures)}
{answers}</section>
"""


def _pairs(values: Mapping[str, str], wrap: bool = False) -> str:
    pairs = [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in values.items()]
    return "\n".join(f"<div>{pair}</div>" if wrap else pair for pair in pairs)


def _table(arms: Sequence[ArmRecord], rows: Sequence[Mapping[str, str]]) -> str:
    columns = [column for column in rows[0] if column != "note"]
    notes = sorted({arm.note for arm in arms if arm.note})
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = []
    for arm, row in zip(arms, rows, strict=True):
        mark = f" <sup>{notes.index(arm.note) + 1}</sup>" if arm.note else ""
        cells = [f'<th scope="row">{escape(row["arm"])}{mark}</th>']
        for column in columns[1:]:
            mute = ' class="mute"' if arm.oversubscribed and column in TIMES else ""
            cells.append(f"<td{mute}>{escape(row[column])}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    below = f'\n<ol class="notes">{items}</ol>' if notes else ""
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + f"\n</tbody></table></div>{below}"
    )


def _figures(
    arms: Sequence[ArmRecord], rows: Sequence[Mapping[str, str]], pictures: Mapping[str, Picture]
) -> str:
    parts = []
    for figure in charts(arms):
        caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
        missing = [row["arm"] for arm, row in zip(arms, rows, strict=True) if arm.note]
        if figure.timed and missing:
            names = escape(", ".join(missing))
            caption += f'<p class="quiet">Without {names}: see the notes under the table.</p>'
        if figure.name in pictures:
            caption += _shown(
                pictures[figure.name], f"{arms[0].measure.word.capitalize()} against {figure.label}"
            )
        else:
            caption += f'<p class="quiet">No arm has {escape(figure.label)} to draw.</p>'
        parts.append(f'<figure id="{arms[0].stage}_{figure.name}">{caption}</figure>')
    if SCHEDULE in pictures:
        caption = f"<figcaption>{SCHEDULE_CAPTION}</figcaption>"
        caption += _shown(pictures[SCHEDULE], "What each rank did when")
        parts.append(f'<figure id="{arms[0].stage}_{SCHEDULE}">{caption}</figure>')
    return "\n".join(parts)


def _shown(picture: Picture, text: str) -> str:
    return (
        "<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{_data(picture.dark)}">'
        f'<img src="{_data(picture.light)}" alt="{escape(text)}">'
        "</picture>"
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
