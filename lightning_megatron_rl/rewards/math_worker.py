"""The child process of `math_verifier`: reads JSON lines [reference, response], answers each with true or false.

It is run by its path and imports nothing of this package, so that it starts with little but math-verify in memory.
"""

import json
import logging
import os
import resource
import signal
import sys


def main(cpu_seconds: float, memory_bytes: int, replies_fd: int) -> None:
    """Serve until the standard input ends, which it also does when the parent dies.

    A pair that takes more than `cpu_seconds` ends the process by SIGPROF, whose default action works inside native code
    as well, where a Python signal handler (math-verify's own timeout) would wait for the end of it.
    """
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # math-verify warns that its own timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    replies = os.fdopen(replies_fd, "w")  # not the standard output, where libraries print (ANTLR its version)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        reference, response = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        # a bare `x+1` is no mathematics to the parser, between dollars it is
        golds = parse(reference, parsing_timeout=None) or parse(f"${reference}$", parsing_timeout=None)
        equal = verify(golds, parse(response, parsing_timeout=None), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(equal)), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
