"""Texts that run a command, or end a line or a word early, wherever something reads them as more than text."""

HOSTILE = [
    "$(touch x)",
    "`touch x`",
    "'; touch x; '",
    '"; touch x; "',
    "a b\tc",
    "-x --help",
    "\\",
    'back\\"slash\\',
    "# no comment",
    "%j %% $HOME ${HOME} $$ $(HOME) $$(HOME)",
    "*?[a]{b,c}~!&|<>()",
    "ünï ☃",
    "",
]
LINES = ["one\ntwo\n#SBATCH --nodes=5\n", "\n", "touch x\n"]
