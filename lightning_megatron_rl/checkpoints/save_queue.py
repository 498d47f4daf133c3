"""A queue of checkpoint work beside training, done in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class SaveQueue:
    """Jobs that one thread runs in order; none runs after one that failed.

    A thread, not a process: it copies nothing, starts nothing, and ends with its process however that is ended. The
    work is hashing and writing, which need not hold Python's lock.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._has_failed = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was asked for since the last `wait`."""
        return not self._jobs

    def submit(self, job: Callable[[], None], instead: Callable[[], None] | None = None) -> None:
        """Run `job` when what was asked for before is done; if that failed, run `instead`, such as to tidy up."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs.append(self._executor.submit(self._run, job, instead))

    def _run(self, job: Callable[[], None], instead: Callable[[], None] | None) -> None:
        if self._has_failed:
            if instead is not None:
                instead()
            return
        try:
            job()
        except BaseException:
            self._has_failed = True
            raise

    def wait(self) -> None:
        """Return when everything is done.

        Raises:
            BaseException: What the first job that failed raised; those after it were not run.
        """
        if self._executor is None:
            return
        jobs, self._jobs = self._jobs, []
        errors = [job.exception() for job in jobs]
        self._executor.shutdown()
        self._executor, self._has_failed = None, False
        for error in errors:
            if error is not None:
                raise error
