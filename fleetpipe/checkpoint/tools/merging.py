"""Makes one safetensors file of a checkpoint's model, as single-device tools take it."""

from __future__ import annotations

from pathlib import Path

from fleetpipe.atomic_file import replacing
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.reader import StepReader


def merge(reader: StepReader, target: Path) -> None:
    """Writes the parameters and buffers of the model under their names, one tensor at a time.

    Args:
        reader: The checkpoint.
        target: The file, which is new or whole at any moment.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        OSError: The file cannot be written.
    """
    order = reader.manifest.order
    layout = tensors.laid_out(
        {n: reader.manifest.tensors[TensorName(MODEL, n)].tensor for n in order}
    )
    with (
        replacing(target.parent) as draft,
        (draft / target.name).open("wb", buffering=0) as file,
        reader.opened() as read,
    ):
        tensors.write_at(file, 0, layout.header)
        for name, stored in layout.tensors.items():
            memory = memoryview(bytearray(stored.tensor.nbytes))
            read(TensorName(MODEL, name), None, memory)
            tensors.write(file, stored, None, memory)
