"""Runs math-verify in a child process that can be killed: what a policy writes may take for ever to evaluate."""

from pathlib import Path

from lightning_megatron_rl.rewards.limited_child import LimitedChild, RequestError
from lightning_megatron_rl.utilities.notices import tell_loss

WORKER = Path(__file__).with_name("math_worker.py")


class MathVerifier(LimitedChild):
    """Compares answers by math-verify, from any thread, each comparison with a limit of CPU time and memory.

    math-verify limits its time by SIGALRM, which only the main thread can use and which cannot interrupt native code
    (``\\binom{100000000}{50000000}`` hangs it). Here the kernel ends the child instead, and the next comparison starts
    another one (2 s).

    Args:
        cpu_seconds: limit for one comparison.
        memory_bytes: limit of the child's address space.

    Example:
        ``MathVerifier().equal("1/2", r"so it is $\\frac{2}{4}$")`` is True.
    """

    def __init__(self, cpu_seconds: float = 5.0, memory_bytes: int = 2**30) -> None:
        super().__init__(WORKER, cpu_seconds, memory_bytes)

    def equal(self, reference: str, response: str) -> bool:
        """Whether the last expression in `response` equals `reference`; one over the limits is not, with a warning.

        Raises:
            RuntimeError: the child does not start.
        """
        try:
            return bool(self.ask([reference, response]))
        except RequestError as error:
            tell_loss(
                f"comparing the answer {reference!r} with the response {response[:200]!r} {error}: counted as wrong"
            )
            return False
