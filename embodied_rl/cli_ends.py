"""How commands end before their work is done: with faults, or by Ctrl-C or SIGTERM. Exit codes are those of `cli`."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from embodied_rl.faults import Fault


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command that the block runs, and so does SIGTERM (a job's time limit, `timeout`)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse(faults: Sequence[Fault], action: str) -> NoReturn:
    """Show all faults; `action` is what did not start because of them."""
    from embodied_rl.faults import print_faults

    print_faults(faults, action)
    raise typer.Exit(2)
