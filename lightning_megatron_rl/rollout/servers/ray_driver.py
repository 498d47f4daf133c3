"""The process that talks to Ray for one trainer (`python -m`): it places engines and places those anew that end.

Ray is not in the trainer's process, where it would take signals over, and whose end would be the run's.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lightning_megatron_rl.parallel.ray_cluster import check_parts, connect, living_nodes, reserve
from lightning_megatron_rl.rollout.servers.ray_actor import END_S, EngineActor
from lightning_megatron_rl.rollout.servers.ray_messages import News, Order
from lightning_megatron_rl.rollout.vllm.worker import die_with_parent, serve

AGAIN_S = 2.0  # before an engine is placed anew, twice as long each time that it did not run for some time
MOST_AGAIN_S = 60.0
LONG_S = 300.0  # that an engine ran well


@dataclass
class Place:
    """An engine's place, and the actor that is there at the moment."""

    number: int
    actor: Any = None
    answer: Any = None  # that is waited for
    has_server: bool = False
    begun: float = 0.0
    again_at: float = 0.0
    again_s: float = AGAIN_S  # to be waited next


class RayDriver:
    """Engines on a Ray cluster, each an actor in its bundle of a placement group; no call waits for them.

    Ray itself finds another node for a bundle whose node has gone.
    """

    def __init__(self) -> None:
        self._ray: Any = None
        self._order: Order | None = None
        self._group: Any = None
        self._places: list[Place] = []

    def place(self, order: Order) -> str | None:
        """Reserve the engines' resources; returns why that cannot be, or None."""
        self._order = order
        try:
            self._ray = connect(show_output=False)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray has its own
            check_parts(order.asked, order.total, living_nodes())
            self._group = reserve(order.asked, order.count, "SPREAD", order.wait_s)
        except (ValueError, RuntimeError) as error:
            return str(error)
        self._places = [Place(number) for number in range(order.count)]
        return None

    def look(self) -> list[News]:
        """Return what is new of engines, and place those that have ended."""
        news = []
        for place in self._places:
            if place.actor is None:
                if time.monotonic() >= place.again_at:
                    self._begin(place)
            elif self._ray.wait([place.answer], timeout=0)[0]:
                told = self._hear(place)
                if told is not None:
                    news.append(told)
        return news

    def _begin(self, place: Place) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order = self._order
        assert order is not None
        others = {name: amount for name, amount in order.asked.items() if name not in ("CPU", "GPU")}
        made = self._ray.remote(EngineActor).options(
            num_cpus=order.asked["CPU"],
            num_gpus=order.asked.get("GPU", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, place.number),
        )
        place.actor, place.begun, place.has_server = made.remote(), time.monotonic(), False
        place.answer = place.actor.start.remote(order.model, order.settings, order.digest)

    def _hear(self, place: Place) -> News | None:
        ended: str | None = None
        output = ""
        try:
            answer = self._ray.get(place.answer)
            if place.has_server and answer is not None:
                ended, output = answer
        except self._ray.exceptions.RayTaskError as error:
            ended = str(error.cause)
        except self._ray.exceptions.ActorUnavailableError as error:  # its node may be back soon
            answer, ended = None, None if place.has_server else str(error)
        except self._ray.exceptions.RayError as error:
            ended = " ".join(str(error).split())
        if ended is not None:
            self._end(place)
            return News(place.number, ended=ended, output=output)
        place.answer = place.actor.look.remote()
        if place.has_server:
            return None
        place.has_server = True
        return News(place.number, *answer)

    def _end(self, place: Place) -> None:
        self._ray.kill(place.actor)
        place.actor = place.answer = None
        now = time.monotonic()
        if now - place.begun > LONG_S:
            place.again_s = AGAIN_S
        place.again_at, place.again_s = now + place.again_s, min(2 * place.again_s, MOST_AGAIN_S)

    def stop(self) -> None:
        """End all engines in good order."""
        stopped = [place.actor.stop.remote() for place in self._places if place.actor is not None]
        if stopped:
            self._ray.wait(stopped, num_returns=len(stopped), timeout=2 * END_S)
        self._places = []


def main(arguments: list[str]) -> None:
    """Serve the trainer until it closes the connection, or ends; Ray then ends the actors."""
    connection_fd, parent_pid, by_signal = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the trainer's to answer
    die_with_parent(parent_pid, by_signal=bool(by_signal))
    os.set_inheritable(connection_fd, False)
    driver = RayDriver()
    serve(Connection(connection_fd), {name: getattr(driver, name) for name in ("place", "look", "stop")})


if __name__ == "__main__":
    main(sys.argv[1:])
