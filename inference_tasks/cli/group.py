"""The group of commands: loads a command when it is used, and turns errors into text and exit codes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from inference_tasks.cli.exit import INTERRUPTED, exit_code, next_step
from inference_tasks.errors import InferenceError, nearest

__all__ = ["CommandGroup"]


class CommandGroup(click.Group):
    """A click group whose commands are named as ``module:attribute``."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = dict(commands_by_name or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._places, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{place} is no command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was probably meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            guess = nearest(args[0], self.list_commands(ctx))
            if guess is None:
                raise
            raise click.UsageError(f"There is no command {args[0]!r}. Did you mean {guess!r}?", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of this package becomes its message, the next step and an exit code."""
        try:
            return super().invoke(ctx)
        except InferenceError as error:
            click.secho(f"Error: {error}", fg="red", err=True)
            if step := next_step(error):
                click.echo(step, err=True)
            ctx.exit(exit_code(error))
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
