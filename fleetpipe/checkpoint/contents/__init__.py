"""The state that a checkpoint has: model, optimizer, learning rate, random states and position.

Start with ``objects.Objects``, which describes the objects that a script passes to save or restore.
"""
