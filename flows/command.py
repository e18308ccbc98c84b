"""What `python -m flows NAME` does: a Prefect flow run, or the bare stages with `--plain`."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

from flows import make
from flows.stages import Context, context, stages
from tasks import lineage, servers


def run(arguments: argparse.Namespace) -> None:
    """Raises what the flow raises; see `flows.__main__` for the exit codes."""
    if arguments.flow in ("ui", "serve"):
        return _serve(deployments=arguments.flow == "serve")
    here = context(arguments.overrides, arguments.profile)
    where = servers.where_to_look()
    own = _own_stages(here, arguments)
    if arguments.flow == "pretrain" and arguments.dry_run:
        print(_dry_run(here, arguments.arm))
    elif arguments.plain:
        make.plainly(here, own, arguments.flow)
    else:
        wanted = ["corpus", "tokens", *own] if arguments.flow == "pretrain" else own
        if here.changed.isdisjoint(wanted) and not lineage.stale(*wanted):
            print(f"up to date: {', '.join(wanted)}")
        else:
            _run_flow(arguments)
        if arguments.flow in ("experiment", "report"):
            _show(here, arguments.study, where)


def _own_stages(here: Context, arguments: argparse.Namespace) -> list[str]:
    """Stages that a flow makes itself, in order; `InputError` for an unknown arm or study."""
    if arguments.flow == "prepare":
        return [arguments.only] if arguments.only else ["corpus", "tokens"]
    if arguments.flow == "pretrain":
        return [here.arm(arguments.arm).name]
    report = here.report(arguments.study)
    if arguments.flow == "report":
        return [report.name]
    known = (None, arguments.study)
    return [stage.name for stage in stages(here.params) if stage.study in known]


def _run_flow(arguments: argparse.Namespace) -> None:
    """Prefect takes seconds to import, so that is done here and only where it is needed."""
    servers.prefect_api()
    flow = getattr(import_module(f"flows.{arguments.flow}"), arguments.flow)
    own = {key: value for key, value in vars(arguments).items() if key in ("only", "arm", "study")}
    flow(**own, overrides=arguments.overrides or None, profile=arguments.profile)


def _dry_run(here: Context, arm: str) -> str:
    from tasks import train

    code = here.arm(arm).code
    return train.prepare(here.params, arm, here.place("tokens").tokens, code).command


def _show(here: Context, study: str | None, where: list[str]) -> None:
    """The table of arms, and where to look further."""
    from rich.console import Console
    from rich.table import Table

    from tasks import arms

    rows = arms.table(arms.read(make.metrics_folders(here, study)))
    table = Table(title="Arms")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "arm" else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(width=None if os.isatty(1) else 150)
    console.print(table)
    page = here.place(here.report(study).name).reports / "index.html"
    print(f"report:  {os.path.relpath(page, Path.cwd())}")
    print(*where, sep="\n")


def _serve(deployments: bool) -> None:
    """Both pages, and a worker if asked, until interrupted."""
    say = partial(print, flush=True)  # whoever started us in the background reads a file
    with ExitStack() as stack:
        processes = stack.enter_context(servers.pages(say))
        if deployments:
            processes.append(stack.enter_context(servers.worker(say)))
        servers.wait(processes)
