"""The child process of `text_rewards`: matches patterns and validates JSON, where a bad pattern may run for ever.

It is run by its path and imports nothing of this package. Requests are JSON lines, answered by one line each:
["fullmatch", pattern, text] by true or false, ["last_group", pattern, text] by the first group of the pattern's last
match (the match itself without groups) or null, ["schema", schema, text] by true or false, or by the text of an error
of the schema.
"""

import json
import os
import re
import resource
import signal
import sys
from typing import Any


def answer(kind: str, rule: Any, text: str) -> Any:
    """Answer one request."""
    if kind == "fullmatch":
        return re.fullmatch(rule, text) is not None
    if kind == "last_group":
        found = None
        for match in re.finditer(rule, text):
            found = match[1] if match.re.groups else match[0]
        return found
    from jsonschema import validators

    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    try:
        return validators.validator_for(rule, validators.Draft202012Validator)(rule).is_valid(value)
    except RecursionError:
        return False
    except Exception as error:  # others are of this text
        if any(kind.__module__ == "referencing.exceptions" for kind in type(error).__mro__):
            return str(error)
        raise


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def main(cpu_seconds: float, memory_bytes: int, replies_fd: int) -> None:
    """Serve until the standard input ends; a request over `cpu_seconds` ends the process by SIGPROF."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    replies = os.fdopen(replies_fd, "w")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        kind, rule, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = json.dumps(answer(kind, rule, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
