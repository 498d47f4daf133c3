"""A worker for `WorkerProcess` that needs no model: each message names what it should do."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            name, value = connection.recv()
        except EOFError:
            return
        match name:
            case "echo":
                connection.send(("ok", value))
            case "news":
                connection.send(("ok", None, value))
            case "environment":
                connection.send(("ok", dict(os.environ)))
            case "fail":
                connection.send(("error", f"ValueError: {value}"))
            case "print":
                print(value)
                connection.send(("ok", None))
            case "exit":
                print("about to end")
                os._exit(value)
            case "sleep":
                time.sleep(value)
                connection.send(("ok", None))
            case "share":
                memory = SharedMemory(create=True, size=value)
                connection.send(("ok", memory.name))
            case "spawn":
                connection.send(("ok", subprocess.Popen(["sleep", "300"]).pid))
            case "ignore_sigterm":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                connection.send(("ok", None))
                time.sleep(value)


if __name__ == "__main__":
    main()
