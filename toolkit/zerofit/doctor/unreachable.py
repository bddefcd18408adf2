"""Why a host does not answer over ssh, from what ssh and the remote shell have said."""

from __future__ import annotations

import re
import sys

SSH_FAILED = 255  # man ssh, EXIT STATUS
# what is said, which kind it is, how to mend it
SAID = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "host-key", "ssh-keygen -R {host}, if you know why its key is new"),
    (
        r"Host key verification failed",
        "host-key",
        "its key is not known here: run `ssh {host} true` once and accept it",
    ),
    (r"Permission denied|Too many authentication failures", "password", "give it your key: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known", "name", "correct the name, or add it to /etc/hosts"),
    (r"Connection refused", "refused", "start sshd there, or name its port with --ssh-port"),
    (
        r"timed out|No route to host|Network is unreachable",
        "unreachable",
        "is it up, and may this host reach its port 22?",
    ),
    (
        r"Connection closed by|Connection reset|kex_exchange_identification",
        "refused",
        "sshd ends it: see its log there",
    ),
    (r"No module named", "zerofit", "install the same zerofit there, in the same place ({python})"),
    (r"No such file or directory|not found|Permission denied.*python", "python", "{python} has to be there too"),
)


class Unreachable(Exception):
    """A host that cannot be asked: `kind` is a stable slug, `hint` says how to mend it."""

    def __init__(self, kind: str, message: str, hint: str):
        self.kind, self.message, self.hint = kind, message, hint
        super().__init__(message)


def why(host: str, code: int | None, said: str) -> Unreachable:
    """From the exit code of ssh (255: its own failure, else the remote command's) and its standard error."""
    kinds = SAID[:-2] if code == SSH_FAILED else SAID[-2:]
    for pattern, kind, hint in kinds:
        line = next((one.strip() for one in said.splitlines() if re.search(pattern, one)), None)
        if line is not None:
            return Unreachable(kind, line[:300], hint.format(host=host, python=sys.executable))
    last = [line.strip() for line in said.splitlines() if line.strip()][-1:]
    words = f"it ended with exit code {code}" + (f": {last[0][:300]}" if last else "")
    return Unreachable("ssh", words, f"try: ssh -o BatchMode=yes {host} true")
