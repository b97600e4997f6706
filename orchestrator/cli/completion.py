"""``dflashctl completion``: the scripts for bash, zsh and fish, and the table they draw on."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.complete import Command
from orchestrator.cli.options import JsonOption
from orchestrator.errors import UsageError

BASH = r"""# dflashctl completion for bash. Install (it needs the package bash-completion):
#   mkdir -p ~/.local/share/bash-completion/completions
#   dflashctl completion bash > ~/.local/share/bash-completion/completions/dflashctl
# or without that package, at the end of ~/.bashrc:
#   source <(dflashctl completion bash)
_dflashctl() {
    local line files=
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files* ]]; then files=1; continue; fi
        COMPREPLY+=("${line%%$'\t'*}")
    done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ -n $files ]]; then compopt -o default; else compopt +o default; fi 2>/dev/null
}
complete -o default -F _dflashctl dflashctl
"""

ZSH = r"""#compdef dflashctl
# dflashctl completion for zsh. Install into a folder of $fpath:
#   mkdir -p ~/.zfunc
#   dflashctl completion zsh > ~/.zfunc/_dflashctl      # with: fpath+=~/.zfunc; compinit
_dflashctl() {
    local -a found
    local line value files=
    while IFS= read -r line; do
        if [[ $line == :files* ]]; then files=1; continue; fi
        value=${line%%$'\t'*}
        if [[ $line == *$'\t'* ]]; then
            found+=("${value//:/\\:}:${line#*$'\t'}")
        else
            found+=("${value//:/\\:}")
        fi
    done < <(dflashctl __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#found )); then _describe -V dflashctl found; fi
    if [[ -n $files ]]; then _files; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _dflashctl "$@"
else
    compdef _dflashctl dflashctl
fi
"""

FISH = r"""# dflashctl completion for fish. Install:
#   mkdir -p ~/.config/fish/completions
#   dflashctl completion fish > ~/.config/fish/completions/dflashctl.fish
function __dflashctl_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in (dflashctl __complete $words[2..-1] 2>/dev/null)
        if string match -q ':files*' -- $line
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c dflashctl -f -k -a '(__dflashctl_complete)'
"""


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


SCRIPTS = {Shell.bash: BASH, Shell.zsh: ZSH, Shell.fish: FISH}


def completion(
    shell: Annotated[
        Shell | None, typer.Argument(help="Default: the one you use.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the completion script of a shell; its first lines say where to put it.

    It completes verbs, options, inventory names, runs launched from here, and playbooks.
    """
    chosen = shell or _own_shell()
    if as_json:
        output.emit({"shell": chosen.value, "script": SCRIPTS[chosen]})
    else:
        typer.echo(SCRIPTS[chosen], nl=False)


def _own_shell() -> Shell:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in {shell.value for shell in Shell}:
        raise UsageError(
            f"there is no completion for {name or 'an unknown shell'}",
            next_step="name one: dflashctl completion bash|zsh|fish",
        )
    return Shell(name)


def build_table() -> Command:
    """Every verb with its options, read from the verbs themselves (imports all of them)."""
    from orchestrator.cli.app import VERBS, load

    commands = {}
    for name, verb in VERBS.items():
        try:
            loaded = load(name, verb)
        except ImportError:
            # A part that is not installed here completes as a bare word.
            commands[name] = Command(verb.summary)
            continue
        commands[name] = _command(loaded, verb.summary)
    options = {"--help": ("Show help.", False), "--version": ("Show version and commit.", False)}
    return Command(options=options, commands=commands)


def _command(loaded: Any, summary: str) -> Command:
    options: dict[str, tuple[str, bool]] = {}
    arguments = []
    for param in loaded.params:
        if param.param_type_name == "argument":
            arguments.append(param.metavar or str(param.name).upper())
            continue
        takes = not (param.is_flag or param.count)
        for name in [*param.opts, *param.secondary_opts]:
            options[name] = (_short(param.help), takes)
    options["--help"] = ("Show help.", False)
    own = getattr(loaded, "commands", {})
    parts = {name: _command(part, _short(part.help)) for name, part in own.items()}
    return Command(summary, options, arguments, parts)


def _short(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n")[0].split())
