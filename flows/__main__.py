"""python -m flows NAME: run a flow from the command line.

Only argparse is imported before a flow starts, so help is instant. Bad input ends with one line and
exit code 2, a failed job with 1, a stopped one (start again to resume) with 75.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

EPILOG = """\
examples:
  ./run -m flows experiment                         everything that is not up to date
  ./run -m flows experiment --study lordo           the same, and the further arms of a study
  ./run -m flows pretrain --arm ddp                 one arm, after what it reads
  ./run -m flows post_train --arm exact             the same, by rewards
  ./run -m flows pretrain --arm ddp --set pretrain_lordo.training.steps=50
                                                    a try with other params: its outputs go to
                                                    runs/set/, what DVC tracks stays as it is
  ./run -m flows sweep pretrain --arm ddp --grid optimizer.lr=1e-3,3e-3 --seeds 3
                                                    six jobs, and which setting is the best
  ./run -m flows experiment --profile gpu           params.gpu.yaml over params.yaml
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m flows",
        description="Flows of shoestring: prepare data, train arms, report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flows = top.add_subparsers(dest="flow", required=True, metavar="FLOW")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one key of params.yaml, dotted; may be given several times",
    )
    shared.add_argument("--profile", help="merge params.PROFILE.yaml over params.yaml")
    bare = argparse.ArgumentParser(add_help=False)
    bare.add_argument(
        "--plain",
        action="store_true",
        help="run the stage itself, without Prefect and without asking DVC (dvc.yaml does this)",
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        parents = [shared] if name == "sweep" else [shared, bare]
        return flows.add_parser(name, help=text, description=text, parents=parents)

    prepare = add("prepare", "what arms read: text -> token shards; prompts -> a first policy")
    stages = ("corpus", "tokens", "prompts", "policy")
    prepare.add_argument("--only", choices=stages, help="one of the stages")
    trained = (
        add("pretrain", "train one arm of a pretraining stage, after what it reads"),
        add("post_train", "train one arm by rewards, after its prompts and first policy"),
    )
    for each, arm in zip(trained, ("ddp", "exact"), strict=True):
        known = f"name of an arm in params.yaml, such as {arm}"
        each.add_argument("--arm", required=True, help=known)
        each.add_argument(
            "--dry-run",
            action="store_true",
            help="write config.json and print the torchrun command",
        )
    sweep = add("sweep", "an arm over a grid of settings and seeds; a table with the best")
    flow = "the flow that trains the arm"
    sweep.add_argument("swept", choices=("pretrain", "post_train"), metavar="FLOW", help=flow)
    sweep.add_argument("--arm", required=True, help="name of an arm in params.yaml, such as ddp")
    sweep.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of a key of the arm; may be given several times",
    )
    sweep.add_argument("--seeds", type=int, default=1, help="seeds for each setting; 1 by default")
    report = add("report", "figures and tables over the arms -> reports/index.html")
    experiment = add("experiment", "everything: prepare, arms, report; skips what is up to date")
    for each in (report, experiment):
        each.add_argument("--study", help="with the further arms of a study: lordo or async")
    gc = flows.add_parser("gc", help="remove what runs/ holds beyond the limits of params.yaml")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    flows.add_parser("ui", help="serve the MLflow and Prefect pages on loopback until Ctrl-C")
    flows.add_parser("serve", help="the same, with a worker for the deployments of prefect.yaml")
    return top


def _exit_on_signals() -> None:
    """Leave in good order on SIGTERM and SIGHUP: a process that just dies leaves what it started,
    such as the temporary server of Prefect. A signal that is ignored (nohup) stays so."""

    def leave(signum: int, frame: FrameType | None) -> None:
        print("shoestring: stopped; start again to resume", file=sys.stderr)
        sys.exit(128 + signum)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    _exit_on_signals()
    from algorithms.common.errors import InputError, disk_error
    from flows import command
    from tasks.torchrun import JobFailed, JobStopped

    try:
        command.run(arguments)
    except InputError as error:
        print(f"shoestring: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if (known := disk_error(error, Path.cwd())) is None:
            raise
        print(f"shoestring: {known}", file=sys.stderr)
        return 2
    except JobStopped as error:
        print(f"shoestring: {error}", file=sys.stderr)
        return 75
    except JobFailed as error:
        print(f"shoestring: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shoestring: stopped; start again to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
