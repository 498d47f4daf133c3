"""An engine that outlives the job of a gloo worker that started it: importing vLLM takes ten seconds."""

from pathlib import Path
from typing import Any

from lightning_megatron_rl.rollout import VLLMEngine


class KeptEngine(VLLMEngine):
    """Serves the next run, whose module takes it for its own; another model or stream mode starts it anew."""

    _model: Path | None = None

    def start(self, model_path: str | Path) -> None:
        """Start the process, unless it runs with this model."""
        if self.pid is None or self._model != Path(model_path):
            self.close()
            super().start(model_path)
            self._model = Path(model_path)


_kept: dict[str, KeptEngine] = {}  # of this process, one at most, by its settings


def kept_engine(**settings: Any) -> KeptEngine:
    """Return this process's engine if it has these settings, else another in its place."""
    key = repr(sorted(settings.items()))
    if key not in _kept:
        for other in _kept.values():
            other.close()
        _kept.clear()
        _kept[key] = KeptEngine(**settings)
    return _kept[key]
