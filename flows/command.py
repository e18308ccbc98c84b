"""What `python -m flows NAME` does: a Prefect flow run, or the bare stages with `--plain`."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError, one_line
from flows import make
from flows.stages import FLOWS, Context, context, stages
from tasks import lineage, servers, sweeps
from tasks.paths import PROJECT


def run(arguments: argparse.Namespace) -> None:
    """Raises what the flow raises; see `flows.__main__` for the exit codes."""
    if arguments.flow in ("ui", "serve"):
        return _serve(deployments=arguments.flow == "serve")
    if arguments.flow == "gc":
        return _collect_garbage(arguments.dry_run)
    here = context(arguments.overrides, arguments.profile)
    where = servers.where_to_look()
    if arguments.flow == "sweep":
        here.arm(arguments.arm, arguments.swept)
        for point in sweeps.points(here.params, arguments.arm, arguments.grid, arguments.seeds):
            context(arguments.overrides, arguments.profile, point.overrides)  # or `InputError`
        return _print("Sweep", _run_flow(arguments))
    own = _own_stages(here, arguments)
    trains = arguments.flow in FLOWS.values()
    if trains and arguments.dry_run:
        print(_dry_run(here, arguments.arm))
    elif arguments.plain:
        make.plainly(here, own, arguments.flow)
    else:
        wanted = [*here.read_by(arguments.arm), *own] if trains else own
        if here.changed.isdisjoint(wanted) and not lineage.stale(*wanted):
            print(f"up to date: {', '.join(wanted)}")
        else:
            _run_flow(arguments)
        if arguments.flow in ("experiment", "report"):
            _show(here, arguments.study, where)


def _own_stages(here: Context, arguments: argparse.Namespace) -> list[str]:
    """Stages that a flow makes itself, in order; `InputError` for an unknown arm or study."""
    if arguments.flow == "prepare":
        return here.prepared(arguments.only)
    if arguments.flow in FLOWS.values():
        return [here.arm(arguments.arm, arguments.flow).name]
    report = here.report(arguments.study)
    if arguments.flow == "report":
        return [report.name]
    known = (None, arguments.study)
    return [stage.name for stage in stages(here.params) if stage.study in known]


def _run_flow(arguments: argparse.Namespace) -> Any:
    """Prefect takes seconds to import, so that is done here and only where it is needed.

    Raises `InputError` when its server went away for longer than `environment` has patience.
    """
    servers.prefect_api()
    from httpx import HTTPError

    flow = getattr(import_module(f"flows.{arguments.flow}"), arguments.flow)
    known = ("only", "arm", "study", "grid", "seeds")
    own = {key: value for key, value in vars(arguments).items() if key in known}
    try:
        return flow(**own, overrides=arguments.overrides or None, profile=arguments.profile)
    except HTTPError as error:
        raise InputError(
            f"{servers.api_name()} does not answer any more: {one_line(error)}; what is done is"
            " kept, start again to go on"
        ) from None


def _dry_run(here: Context, arm: str) -> str:
    from tasks import train

    stage = here.arm(arm)
    return train.prepare(here.params, arm, here.inputs(stage.name), stage.code).command


def _show(here: Context, study: str | None, where: list[str]) -> None:
    """The tables of arms with their notes below, and where to look further."""
    from tasks import arms

    for stage, own in arms.by_stage(arms.read(make.metrics_folders(here, study))).items():
        notes = sorted({arm.note for arm in own if arm.note})
        numbers = {note: f"({number})" for number, note in enumerate(notes, start=1)}
        rows = arms.table(own)
        if notes:
            rows = [row | {"note": numbers.get(row["note"], "")} for row in rows]
        _print(f"Arms of {stage}", rows)
        for note, number in numbers.items():
            print(number, note)
    page = here.place(here.report(study).name).reports / "index.html"
    print(f"report:  {os.path.relpath(page, Path.cwd())}")
    print(*where, sep="\n")


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    """As a table whose first column is names."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if os.isatty(1) else 200).print(table)


def _collect_garbage(dry_run: bool) -> None:
    """Remove what is beyond the limits, or only say so, a line each."""
    from tasks import retention, units

    limits = context().params.retention
    total, said = 0, "would remove" if dry_run else "removed"
    for each in retention.expired(limits, retention.jobs_of_mlflow()):
        size = each.bytes
        if dry_run or retention.remove(each):
            total += size
            name = os.path.relpath(each.path, PROJECT)
            print(f"{said} {name}  {units.size(size)}  {each.why}")
    print(f"{said} {units.size(total)} in all")


def _serve(deployments: bool) -> None:
    """Both pages, and a worker if asked, until interrupted."""
    say = partial(print, flush=True)  # whoever started us in the background reads a file
    with ExitStack() as stack:
        processes = stack.enter_context(servers.pages(say))
        if deployments:
            processes.append(stack.enter_context(servers.worker(say)))
        servers.wait(processes)
