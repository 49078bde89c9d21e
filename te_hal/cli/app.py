"""The commands of `te-hal`."""

from __future__ import annotations

from typing import Annotated

import typer

import te_hal
from te_hal.cli.backends import backends
from te_hal.cli.bench import bench
from te_hal.cli.build_kernels import build_kernels
from te_hal.cli.compare import compare
from te_hal.cli.conformance import conformance_command
from te_hal.cli.doctor import doctor
from te_hal.cli.explain import explain_command
from te_hal.cli.inspect import inspect
from te_hal.cli.new_backend import new_backend
from te_hal.cli.replay import replay_command
from te_hal.cli.selftest import selftest

app = typer.Typer(
    name="te-hal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"te-hal {te_hal.__version__}")
        raise typer.Exit


@app.callback()
def te_hal_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Transformer-Engine modules and FP8 recipes on any device: try them, and see what is there."""


app.command()(compare)
app.command()(backends)
app.command()(build_kernels)
app.command()(selftest)
app.command()(inspect)
app.command()(bench)
app.command("conformance")(conformance_command)
app.command("explain")(explain_command)
app.command("new-backend")(new_backend)
app.command("replay")(replay_command)
app.command()(doctor)
