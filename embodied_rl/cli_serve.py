"""The commands that serve: envs to trainers, and policies to whoever has observations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from embodied_rl.cli_ends import interruptible, refuse


def add_serve_commands(app: typer.Typer) -> None:
    app.command("serve-env", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve_env)
    app.command("serve-policy")(serve_policy)


def serve_env(
    context: typer.Context,
    env: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|ENV",
            help="A recipe, for its env; an id of ManiSkill, LIBERO or gymnasium; or your own class as module:Class.",
        ),
    ],
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="ipc://PATH or tcp://HOST:PORT (* for any free port).")
    ] = "tcp://127.0.0.1:*",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A secret that trainers have to know; needed beyond this machine.", show_default=False),
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment to simulate in; default: this one.", show_default=False)
    ] = None,
) -> None:
    """Serve envs to trainers in other processes, virtual environments or machines (their `env.server`).

    Further options, such as --processes or --metrics-port, are those of `python -m envs.server --help`.
    For example: embodied-rl serve-env libero_spatial --bind tcp://127.0.0.1:5005 --venv ../libero-venv
    """
    from embodied_rl.serve_env import serve, served_env

    kind, env_id, faults = served_env(env, venv)
    if faults:
        refuse(faults, "the server")
    token = [f"--token-file={token_file}"] if token_file else []
    raise typer.Exit(serve([kind, env_id, f"--bind={bind}", *token, *context.args], venv))


def serve_policy(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run directory (its best checkpoint is taken) or a checkpoint."
        ),
    ],
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 or *: any free one.")] = "127.0.0.1:8000",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A secret that clients give as API key; needed beyond this machine.", show_default=False),
    ] = None,
) -> None:
    """Serve a trained policy over a websocket, to `embodied_rl.policy_client` or to clients of openpi.

    For example: embodied-rl serve-policy runs/maniskill_pushcube_ppo
    """
    with interruptible():
        import asyncio

        from embodied_rl.faults import Fault
        from embodied_rl.kinds import kind_of
        from embodied_rl.policy_server import ServedPolicy, run_policy_server
        from embodied_rl.runs import checkpoint_at
        from envs.address import require_safe
        from envs.wire import read_token

        faults = []
        address = re.fullmatch(r"(?P<host>[^/:]+|\[[^/\]]+\]):(?P<port>\d+|\*)", bind)
        if address is None or (address["port"] != "*" and int(address["port"]) >= 2**16):
            hint = "a name or number of this machine, such as 127.0.0.1:8000, [::1]:8000 or 127.0.0.1:*"
            faults.append(Fault("--bind", bind, "expected HOST:PORT", hint))
        if kind_of(str(run)) is not None:
            problem = "it trains a language model; served are policies that act in envs"
            faults.append(Fault("run", str(run), problem))
        else:
            checkpoint, _, found = checkpoint_at(run)
            faults += found
        if faults or address is None:
            refuse(faults, "the server")
        host, port = address["host"], 0 if address["port"] == "*" else int(address["port"])
        try:
            token = read_token(str(token_file)) if token_file else None
            require_safe(f"tcp://{bind}", token)
            policy = ServedPolicy(checkpoint)
            say = lambda port: typer.echo(f"serving {checkpoint} on ws://{host}:{port}")  # noqa: E731
            asyncio.run(run_policy_server(policy, host, port, token, say))
        except (ValueError, OSError) as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from None
