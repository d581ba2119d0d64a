"""Cost models by themselves: how far they are from measured steps, and fits to logged ones."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from json import JSONDecodeError, loads
from pathlib import Path

from playground.model import ModelShape, shipped
from playground.sim.cost import report, tables
from playground.sim.cost.fitted import Fit, Fitted, Line
from playground.sim.cost.fitting import fit
from playground.sim.cost.logged import Logged, steps
from playground.sim.cost.model import CostModel
from playground.sim.cost.profiled import Profiled
from playground.sim.cost.roofline import Roofline
from playground.sim.cost.vidur import Vidur
from playground.sim.device import Device

HELP = """\
A cost model turns a step (chunks of prompts, decodes and their contexts) into seconds. Four of them:

  roofline   from the model's config and the device's sheet; nothing fitted. The simulator's default
  profiled   kernels from measured operator tables, the rest from the sheet
  vidur      a peer's tables and formula (CodeLlama-34B, two A100)
  fitted     a few coefficients, fitted to the steps of recorded runs by `fit`

See how good one is, fit another to your own machine, and simulate with it:

  python -m playground.sim.cost evaluate runs/MY_RUN --cost roofline
  python -m playground.sim.cost fit runs/MY_RUN runs/ANOTHER -o mine.json
  python -m playground.sim.cost evaluate runs/A_THIRD --cost roofline fitted --fit mine.json
  playground backend/cost=fitted backend.cost.path=mine.json ...
"""

EVALUATE = f"""\
Predicted against measured seconds of single steps: mean, median and 95th percentile of the absolute relative error,
and the bias (positive: predicted too slow), for each source and kind of step.

A SOURCE is one of
  a run's folder         what its steps took, on an engine or simulated
  a CSV file             columns prefills (start:length|...), decodes, context (keys of all decodes together), seconds;
                         and, if the steps say what they ran on: model, device, tp; source
  perf_model.csv         of splitwise-sim: batches of Llama-2-70B on A100 and H100 (--split test: its even rows)
  a profile              a folder tpN with dense.csv, attention.csv and per_sequence.csv, or a shipped one, NAME/tpN:
                         {", ".join(name for name in tables.shipped() if "/" in name)}
                         (of steps on the grid that `profiled` keeps the error is 0; others show its interpolation)
  kernel tables          of AIConfigurator: a system's folder with gemm and attention in it; --model --device --tp

Model and device are those of the source where it names them, else --model and --device.
"""

FIT = """\
Fits base + tokens + tokens beyond a knee + keys that decodes read + (query, key) pairs of prefills + sequences to what
the steps of recorded runs took, by least squares of relative errors without negative coefficients (NNLS), steps
that are far off counting less (Huber). A fifth of the steps, in blocks of neighbours, is held out and tells the error;
intervals are 95 % of bootstrap fits over such blocks.

Log runs whose batches differ: prompts short and long, several rates, up to the load you will simulate. Steps with
several lanes, ranks in lockstep or copies are left out. What cannot be told apart is refused, in one line.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done. 2: something that the user can mend, said in one line."""
    options = _parser().parse_args(arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        return int(options.command(options))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m playground.sim.cost", description=HELP, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add, name, help, description in (
        (_evaluate_options, "evaluate", "hold cost models against measured steps", EVALUATE),
        (_fit_options, "fit", "fit a cost model to the steps of recorded runs", FIT),
    ):
        add(commands.add_parser(name, help=help, description=description, formatter_class=raw))
    return parser


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_evaluate)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--cost", nargs="+", choices=COSTS, default=["roofline"], help="which models (roofline)")
    parser.add_argument(
        "--tables", metavar="PATH", help="of profiled and vidur, as backend.cost.path (what is shipped)"
    )
    parser.add_argument("--fit", metavar="FILE", help="of fitted, as backend.cost.path")
    parser.add_argument("--model", help="a shipped name, a checkpoint's folder or its config.json")
    parser.add_argument("--device", help=f"a sheet of conf/device: {', '.join(sorted(_sheets()))}")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree (1)")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages (1)")
    parser.add_argument(
        "--split", choices=("test", "fit", "all"), default="test", help="of sources that have one (test)"
    )
    parser.add_argument("--extrapolate", action="store_true", help="go on beyond tables and fits, with a warning")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N worst steps")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every step and its prediction")


def _fit_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_fit)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("fitted.json"), help="where to (fitted.json)")
    parser.add_argument("--held-out", type=float, default=0.2, help="share of steps that only tell the error (0.2)")
    parser.add_argument("--bootstrap", type=int, default=200, metavar="N", help="fits behind the intervals (200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is held out and drawn (0)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out each run's first N steps (0)")


# --- evaluate


def _evaluate(options: argparse.Namespace) -> int:
    tabled = _tabled(options)
    measured = [step for source in options.sources for step in report.read(source, options.split, tabled)]
    if not measured:
        raise ValueError(f"no step in {' '.join(options.sources)} (--split {options.split})")
    for name in options.cost:
        models = _models(name, options)
        compared = report.compare(measured, models, options.stages)
        print(f"\n{name}", *report.lines(compared), sep="\n")
        print(*report.worst(compared, options.worst), sep="\n", end="\n" if options.worst else "")
        if options.csv:
            report.write(_named(options.csv, name, len(options.cost)), compared)
    return 0


def _tabled(options: argparse.Namespace) -> Callable[[str], Profiled]:
    """The model of kernel tables, for the model and device that the command line names."""

    def model(place: str) -> Profiled:
        setup = _told(options)
        return Profiled(ModelShape.read(setup.model), _device(setup.device), setup.tp, path=place)

    return model


def _named(file: Path, cost: str, costs: int) -> Path:
    """One file a cost model, if there are several."""
    return file if costs == 1 else file.with_stem(f"{file.stem}-{cost}")


def _models(name: str, options: argparse.Namespace) -> Callable[[report.Setup | None], CostModel]:
    """The cost model of each setup, made once."""
    told = cache(lambda: _told(options))

    @cache
    def model_of(setup: report.Setup | None) -> CostModel:
        setup = setup or told()
        return COSTS[name](ModelShape.read(setup.model), _device(setup.device), setup.tp, options)

    return model_of


def _told(options: argparse.Namespace) -> report.Setup:
    """What the command line says, else the record of the first run."""
    record = Path(options.sources[0]) / "run.json"
    try:
        known = loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    except JSONDecodeError as error:
        raise ValueError(f"{record}: not valid JSON: {error}") from error
    model, device = options.model or known.get("model"), options.device or _sheet_named(known.get("device"))
    if not model:
        raise ValueError(f"--model is needed: the source does not say; shipped: {', '.join(shipped())}")
    if not device:
        raise ValueError(f"--device is needed: the source does not say; sheets: {', '.join(sorted(_sheets()))}")
    return report.Setup(model, device, options.tp)


def _roofline(model: ModelShape, device: Device, tp: int, options: argparse.Namespace) -> CostModel:
    return Roofline(model, device, tp, options.stages)


def _profiled(model: ModelShape, device: Device, tp: int, options: argparse.Namespace) -> CostModel:
    extrapolate: bool = options.extrapolate
    return Profiled(model, device, tp, options.stages, path=options.tables, extrapolate=extrapolate)


def _vidur(model: ModelShape, device: Device, tp: int, options: argparse.Namespace) -> CostModel:
    return Vidur(model, device, tp, options.stages, **({"path": options.tables} if options.tables else {}))


def _fitted(model: ModelShape, device: Device, tp: int, options: argparse.Namespace) -> CostModel:
    if not options.fit:
        raise ValueError("--fit is needed: the file that `fit` wrote")
    return Fitted(options.fit, model, device, tp, options.stages, extrapolate=options.extrapolate)


COSTS: dict[str, Callable[[ModelShape, Device, int, argparse.Namespace], CostModel]] = {
    "roofline": _roofline,
    "profiled": _profiled,
    "vidur": _vidur,
    "fitted": _fitted,
}


def _sheets() -> dict[str, str]:
    """Device sheets by name, as text."""
    folder = files("conf").joinpath("device")
    named = {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
    return {name: file.read_text(encoding="utf-8") for name, file in named.items()}


def _device(name: str) -> Device:
    """From a sheet, which is flat: names and numbers. No YAML reader, for the core depends on none."""
    if name not in (sheets := _sheets()):
        raise ValueError(f"--device {name}: no such sheet; there are {', '.join(sorted(sheets))}")
    values: dict[str, object] = {}
    for line in sheets[name].splitlines():
        key, _, value = line.partition("#")[0].partition(":")
        if value.strip() and not key.startswith("_"):
            values[key.strip()] = _number(value.strip())
    return Device(**values)  # type: ignore[arg-type]


def _number(text: str) -> object:
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        return text


def _sheet_named(device: str | None) -> str | None:
    """The sheet of a device as run.json names it."""
    return next((name for name in _sheets() if device and _device(name).name == device), None)


# --- fit


def _fit(options: argparse.Namespace) -> int:
    logged: list[Logged] = []
    for run in options.runs:
        logged += steps(run)[options.skip :]
    found = fit(logged, options.runs, options.held_out, options.bootstrap, options.seed)
    found.save(options.output)
    print(*_told_of(found, len(logged)), f"\nSaved: {options.output}", sep="\n")
    return 0


def _told_of(found: Fit, count: int) -> list[str]:
    lines = [f"{count:,} steps, knee at {found.knee} tokens. Microseconds a unit, with 95 % intervals:"]
    for number, stage in enumerate(found.stages):
        lines += [f"\nstage {number}" if len(found.stages) > 1 else "", *_coefficients(stage)]
    lines += ["\nhost, before a launch", *_coefficients(found.host), "\nOn steps that were held out"]
    return [*lines, *(f"  {kind:8}{error}" for kind, error in found.held_out.items())]


def _coefficients(line: Line) -> list[str]:
    return [
        f"  {name:16}{value * 1e6:14.6g}   [{line.low[name] * 1e6:.6g}, {line.high[name] * 1e6:.6g}]"
        for name, value in line.coefficients.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
