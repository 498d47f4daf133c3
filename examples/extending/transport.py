"""A transport of weights of your own: files, for a trainer and a sampler that share nothing but a file system.

With ``PYTHONPATH=examples/extending`` and this overlay:

.. code-block:: yaml

    model:
      init_args:
        engine:
          init_args:
            weight_transfer: {class_path: transport.FileTransport, init_args: {directory: /dev/shm}}
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.base import Ask, Sent, Transport
from lightning_megatron_rl.weights.transports.host import SharedWeightsReceiver


class FileTransport(Transport):
    """Writes all weights to a file, which the workers read; it is removed when they have.

    Args:
        directory: Where the file is written.
    """

    name = "files"
    extension = "transport.FileReceiver"
    takes_host = True

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """Write the weights under their Hugging Face names, and let the workers sample with them from then on."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in source.tensors()}
        with TemporaryDirectory(dir=self.directory) as folder:
            path = Path(folder) / "model.safetensors"
            save_file(tensors, path)
            ask(("call", "load_weights_file", (str(path),), version))
        return Sent(sum(tensor.nbytes for tensor in tensors.values()), extra_bytes=0, replayed=False)


class FileReceiver(SharedWeightsReceiver):
    """Methods that vLLM adds to each of its workers."""

    def load_weights_file(self, path: str) -> None:
        """Load the weights as vLLM loads a checkpoint, layer by layer."""
        self.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))
