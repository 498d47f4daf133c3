"""When a run of failing rewards ends: nothing is learnt from samples that nobody could judge."""

from collections.abc import Sequence

from lightning_megatron_rl.sample import Sample

SETTING = "max_failed_rollouts"


class FailureWatch:
    """Counts the rollouts, and the validations of each set, in which a reward failed on every sample.

    Args:
        limit: So many of them in a row end the run; None never does.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._worked: set[tuple[str, str]] = set()
        self._said: dict[tuple[str, str], str] = {}

    def add(self, what: str, who: str, *, failed: bool, errors: Sequence[str], at_once: bool = False) -> None:
        """Take note of one rollout or validation; every rank says the same of it.

        Args:
            what: What is counted, such as "rollouts".
            who: What failed or worked, such as "the reward 'judge'".
            failed: Whether it failed on all samples of all replicas.
            errors: What went wrong on this replica.
            at_once: The first failure ends the run.

        Raises:
            RuntimeError: It failed on all samples `limit` times in a row; with what went wrong last.
        """
        key = what, who
        if not failed:
            self._in_a_row[key] = 0
            self._worked.add(key)
            return
        self._in_a_row[key] = count = self._in_a_row.get(key, 0) + 1
        last = errors[0] if errors else "another replica's warning says why"
        self._said[key] = (
            f"{who} failed on all samples of {count} {what} in a row, the last time with {last}. Nothing is learnt from"
            f" that: mend it, or set {SETTING}=null to go on all the same."
        )
        if self.limit is not None and (at_once or count >= self.limit):
            raise RuntimeError(self._said[key])

    def add_evaluation(
        self, stage: str, metrics: dict[str, float], samples: Sequence[Sample], *, at_once: bool
    ) -> None:
        """Take note of each set of a validation, given its metrics of all replicas and this replica's samples."""
        prefix, suffix = f"{stage}/", "/failed_frac"
        for name in (name for name in metrics if name.startswith(prefix) and name.endswith(suffix)):
            dataset = name.removeprefix(prefix).removesuffix(suffix)
            own = [sample for sample in samples if sample.prompt.dataset == dataset]
            errors = [error for sample in own for error in sample.reward_errors.values()]
            what = f"validations of {dataset!r}"
            self.add(what, "a reward", failed=metrics[name] == 1, errors=errors, at_once=at_once)

    def finish(self, what: str) -> None:
        """Refuse to call a run a success in which a reward failed on all samples from the first to the last.

        Raises:
            RuntimeError: One did.
        """
        for key, message in self._said.items():
            if self.limit is not None and key[0] == what and key not in self._worked:
                raise RuntimeError(message)
