"""`peerllm completion SHELL`: the shell's completion of commands and of a room code's words."""

from __future__ import annotations

import argparse

_BASH = """\
_peerllm() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [[ "${COMP_WORDS[1]}" =~ ^(join|doctor)$ && "$COMP_CWORD" -eq 2 ]]; then
        COMPREPLY=($(peerllm completion --code "$word"))
        compopt -o nospace 2>/dev/null
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -F _peerllm peerllm
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
complete -c peerllm -n __fish_use_subcommand -f -a "@COMMANDS@"
complete -c peerllm -n "__fish_seen_subcommand_from join doctor" -f -a "(peerllm completion --code (commandline -ct))"
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("shell", nargs="?", choices=sorted(SCRIPTS), help='for bash: eval "$(peerllm completion bash)"')
    what.add_argument("--code", metavar="TYPED", help="print what a room code that begins so can go on with")


def run(args: argparse.Namespace) -> int:
    if args.code is not None:
        from peerllm.rooms.codes import complete_words

        for code in complete_words(args.code):
            print(code)
        return 0
    from peerllm.cli.main import COMMANDS

    print(SCRIPTS[args.shell].replace("@COMMANDS@", " ".join(COMMANDS)), end="")
    return 0
