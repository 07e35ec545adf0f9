"""`hp-train completion bash|zsh|fish`: print the script that lets the shell complete hp-train by the tab key. No torch.

Installed by one line, which the head of each script names. The scripts ask `hp-train completion --candidates WORD...`
what may stand where the cursor is; they know nothing of verbs and keys themselves.
"""

from __future__ import annotations

import argparse
import sys

from hp_train.errors import ConfigError

_BASH = r"""# Completes hp-train in bash. To install: hp-train completion bash >> ~/.bash_completion
# For this shell only: eval "$(hp-train completion bash)"
_hp_train() {
    local line=${COMP_LINE:0:COMP_POINT} first=0 word kept="" quote="" candidate
    local -a words
    read -a words <<< "$line"  # without -r, which takes the backslash off a blank, and the two for one word
    [[ $line == *[[:space:]] && $line != *\\[[:space:]] ]] && words+=("")
    while [[ $first -lt ${#words[@]} && ${words[first]##*/} != hp-train ]]; do first=$((first + 1)); done
    word=${words[${#words[@]} - 1]}
    [[ $word == [\"\']* ]] && quote=${word:0:1} word=${word:1} && words[${#words[@]} - 1]=$word
    # readline replaces only what follows the last = or :, where bash breaks words
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && kept=${word%"${word##*=}"}
    [[ $COMP_WORDBREAKS == *:* && ${word#"$kept"} == *:* ]] && kept=${word%"${word##*:}"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        candidate=${candidate#"$kept"}
        [[ -z $quote && $candidate == *[[:space:]\"\'\$\&\;\|\<\>\`\(\)\\]* ]] && printf -v candidate %q "$candidate"
        COMPREPLY+=("$candidate")
    done < <("${words[first]/#\~/$HOME}" completion --candidates "${words[@]:first + 1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    return 0
}
complete -F _hp_train hp-train
"""

_ZSH = r"""#compdef hp-train
# Completes hp-train in zsh. To install:
#   hp-train completion zsh > ~/.hp-train.zsh && echo '. ~/.hp-train.zsh' >> ~/.zshrc
# For this shell only: eval "$(hp-train completion zsh)"
_hp_train() {
    local line text command=${(Q)words[1]}
    local -a whole whole_shown open open_shown
    for line in "${(@f)$("${command/#\~/$HOME}" completion --candidates "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" \
            2> /dev/null)}"; do
        text=${line%%$'\t'*}
        [[ -n $text ]] || continue
        if [[ $text == *[=./] ]]; then
            open+=("$text") open_shown+=("${line/$'\t'/  }")
        else
            whole+=("$text") whole_shown+=("${line/$'\t'/  }")
        fi
    done
    compadd -l -d open_shown -S '' -a open
    compadd -l -d whole_shown -a whole
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _hp_train hp-train
"""

_FISH = r"""# Completes hp-train in fish. To install:
#   hp-train completion fish > ~/.config/fish/completions/hp-train.fish
# For this shell only: hp-train completion fish | source
function __hp_train_candidates
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l current (string unescape -- $typed; or string replace -r '^["\']' '' -- $typed)
    set -l command (string replace -r '^~' $HOME -- $words[1])
    $command completion --candidates $words[2..-1] "$current" 2>/dev/null
end
complete -c hp-train -f -a '(__hp_train_candidates)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", nargs="?", metavar="|".join(SCRIPTS), help="the shell to print the script for")
    parser.add_argument(
        "--candidates", nargs=argparse.REMAINDER, metavar="WORD",
        help="print what may stand in place of the last of these words, which follow hp-train (asked by the scripts)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the script, or the candidates. Raises ConfigError for a shell without a script."""
    if args.candidates is not None:
        from hp_train.commands.candidates import candidates, lines

        words = args.candidates
        if sys.argv[-1] == "--":  # argparse takes it for the end of the options, and not for one that is being typed
            words = [*words, "--"]
        print(lines(candidates(words)), end="")
        return 0
    if args.shell not in SCRIPTS:
        what = f"completion: {args.shell} is no shell with a script" if args.shell else "completion: which shell?"
        raise ConfigError(f'{what}; use {", ".join(SCRIPTS)}: eval "$(hp-train completion bash)"')
    print(SCRIPTS[args.shell], end="")
    return 0
