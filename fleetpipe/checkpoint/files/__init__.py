"""The files of a checkpoint: tensors in safetensors files, the manifest, the folder of a step.

Start with ``manifest``, which describes the folder of a step; ``writer`` writes one rank's part.
"""
