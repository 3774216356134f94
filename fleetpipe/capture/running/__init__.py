"""Repeats the calls of a capture stage by stage, on this process's tensors.

``replay`` makes functions of the nodes, ``variants`` has the captured runs, ``stages`` runs them,
``captured_state`` has the names, files and memory of the parameters.
"""
