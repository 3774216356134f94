"""The user's model: ``PipelineLayer``, a list of layers of which each rank builds its own.

Start with ``pipeline_layer.py``; ``fleet_face.py`` has members that only users of Fleet's class
read.
"""
