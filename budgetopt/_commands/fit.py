"""``budgetopt fit``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt fit my_model:build --budget 8GB -o plan.json
  budgetopt fit my_model:build --budget 80% --allow keep recompute
  budgetopt fit my_model:build --budget 8GB --json | jq .measured.peak_bytes

The training script then neither measures nor solves:
  budgetopt.fit(model, sample, "8GB", plan="plan.json")

JSON: file, budget_bytes, headroom_bytes, predicted {peak_bytes,
plain_peak_bytes, overhead, ...}, measured {peak_bytes, step_ns, grad_error,
...} or null, solver, status, gap, allow, exclude, regions [{path, call,
decisions [{operator, nth, slot, layer, choice, bytes, ...}]}], calls,
environment. Bytes and nanoseconds are integers.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "fit",
        "plan a model's training step under a budget",
        "Build the model, measure a step of it, decide what to keep, recompute or store in fp16 so that a whole step "
        "fits the budget, and try that out. Prints the plan as a table. The model is not trained.",
        _EPILOG,
    )
    _options.model(parser)
    _options.budget(parser, also=", 80%% of the device, or free")
    _options.output(
        parser, "save the plan there, for budgetopt.fit(..., plan=FILE); one that is there is used if it holds"
    )
    _options.choices(parser, "all three")
    _options.headroom(parser)
    _options.optimizer(parser)
    _options.solver(parser)
    parser.add_argument("--no-verify", action="store_true", help="don't run the plan (default: run and measure it)")
    parser.add_argument(
        "--max-grad-error",
        type=float,
        default=1e-2,
        metavar="SHARE",
        help="of the gradients' norm, that fp16 may change (default: 0.01)",
    )
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The plan."""
    from budgetopt import _as_json, _given
    from budgetopt._progress import progress

    _options.check(options)
    _options.writable(options.output)
    if options.output is not None and options.output.exists():
        _given.plan(options.output)  # refused before a model is built, if it is another kind of file

    from budgetopt import fit, plan_of
    from budgetopt._entry import build

    built = build(options.model, options.optimizer)
    with progress(f"fitting to {options.budget}") as tell:
        fit(
            built.model,
            built.sample,
            options.budget,
            plan=options.output,
            verify=not options.no_verify,
            max_grad_error=options.max_grad_error,
            progress=tell,
            **_options.how(options),
            **built.options,
        )
    plan = plan_of(built.model)
    assert plan is not None
    print(_use(options, built.options), file=sys.stderr)
    return _as_json.plan(plan, options.output) if options.json else plan


def _use(options: argparse.Namespace, built: Iterable[str]) -> str:
    """The call that finds the same plan again: another question would be solved anew."""
    if options.output is None:
        return "Give -o plan.json to keep this plan for your training script."
    shown = [repr(options.budget), f"plan={str(options.output)!r}"]
    for name in ("allow", "exclude"):
        if getattr(options, name) is not None:
            shown.append(f"{name}={tuple(getattr(options, name))!r}")
    if options.headroom is not None:
        shown.append(f"headroom={options.headroom!r}")
    shown += [f"{name}={_value(name, options)}" for name in built]
    return f"In your training script: budgetopt.fit(model, sample, {', '.join(shown)})"


def _value(name: str, options: argparse.Namespace) -> str:
    if name != "optimizer" or options.optimizer is None:
        return name
    return "None" if options.optimizer == "none" else repr(options.optimizer)
