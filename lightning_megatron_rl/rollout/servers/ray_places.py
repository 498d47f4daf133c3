"""The engines that Ray has placed for a trainer, as the trainer knows them: where they are, and which have ended."""

import logging
import os
import threading
from collections.abc import Callable

from lightning_megatron_rl.rollout.servers.ray_messages import News, Order
from lightning_megatron_rl.rollout.vllm.process import (
    EngineCallError,
    EngineDiedError,
    EngineTimeoutError,
    WorkerProcess,
    child_environment,
)
from lightning_megatron_rl.utilities.notices import tell_loss

DRIVER_MODULE = "lightning_megatron_rl.rollout.servers.ray_driver"
JOIN_S = 120.0  # for the process to join the cluster; Ray itself gives up sooner
LOOK_S = 1.0  # between two looks
ANSWER_S = 30.0  # deadline of one, which waits for nothing
AGAIN_S = 10.0  # before another process tries, when one was lost
STOP_S = 30.0

log = logging.getLogger(__name__)


class RayPlaces:
    """Keeps a process that talks to Ray, and hears of engines from it; see `ray_driver`.

    Args:
        order: What is to be placed.
        hear: Takes the news, in a thread of its own.
    """

    def __init__(self, order: Order, hear: Callable[[News], None]) -> None:
        self._order = order
        self._hear = hear
        self._ended = threading.Event()
        self._process: WorkerProcess | None = None
        self._thread = threading.Thread(target=self._run, name="Ray engines", daemon=True)

    def begin(self) -> None:
        """Reserve what is ordered; the engines are then started, and started again, until `close`.

        Raises:
            ValueError: The cluster cannot be joined, or cannot give it: what is asked, and what is there.
            RuntimeError: Ray does not answer.
        """
        try:
            refused = self._place()
        except BaseException:
            self.close()
            raise
        if refused is not None:
            self.close()
            raise ValueError(refused)
        self._thread.start()

    def hear_no_more(self) -> None:
        """Give no news from now on; engines go on."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S + ANSWER_S)
        if self._thread.is_alive():  # it places engines anew, which may take longer
            assert self._process is not None
            self._process.kill()
            self._thread.join()

    def close(self) -> None:
        """End the engines and the process."""
        self.hear_no_more()
        process, self._process = self._process, None
        if process is None or process.is_gone:
            return
        try:
            process.request("the end of engines on Ray", ("stop",), STOP_S)
        except (EngineDiedError, EngineTimeoutError, EngineCallError) as error:
            log.warning("engines on Ray end with the process that placed them: %s", error)
        process.close()

    def _place(self) -> str | None:
        self._process = WorkerProcess(DRIVER_MODULE, child_environment(dict(os.environ), {}))
        deadline = JOIN_S + self._order.wait_s
        refused = self._process.request("placing engines on Ray", ("place", self._order), deadline)
        assert refused is None or isinstance(refused, str)
        return refused

    def _run(self) -> None:
        """Hear of engines; begin anew when Ray, or the process that talks to it, is lost."""
        while not self._ended.wait(LOOK_S):
            try:
                assert self._process is not None
                if self._process.is_gone:
                    refused = self._place()
                    if refused is not None:
                        log.warning("engines on Ray cannot be placed anew yet: %s", refused)
                        self._process.close()
                        self._ended.wait(AGAIN_S)
                    continue
                for news in self._process.request("a look at engines on Ray", ("look",), ANSWER_S):
                    self._hear(news)
            except (EngineDiedError, EngineTimeoutError, EngineCallError) as error:
                tell_loss(f"the process that talks to Ray is lost, and its engines with it: {error}")
                for number in range(self._order.count):
                    self._hear(News(number, ended="the process that talks to Ray was lost"))
                self._ended.wait(AGAIN_S)
