"""The files of a checkpoint: tensors in safetensors files, the manifest, the folder of a step."""
