"""`penstock completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import click

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/penstock",
    "zsh": "a file _penstock in a folder of $fpath",
    "fish": "~/.config/fish/completions/penstock.fish",
}


@click.command(short_help="Print the script for completion in a shell.")
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def completion(shell: str, as_json: bool) -> None:
    """Print the script by which SHELL completes commands and options. Write it where the shell looks for such scripts:

    \b
    penstock completion bash > ~/.local/share/bash-completion/completions/penstock
    penstock completion zsh  > "${fpath[1]}/_penstock"
    penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    from click.shell_completion import get_completion_class

    from penstock.cli.client import print_json
    from penstock.cli.main import main
    from penstock.errors import UsageError

    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"no completion for {shell}", hint=f"There is one for {', '.join(_PLACES)}.")
    script = found(main, {}, "penstock", "_PENSTOCK_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script, "place": _PLACES[shell]})
    else:
        click.echo(script)
