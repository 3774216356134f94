"""Estimates a training step on a cluster that one does not have, without running anything.

Begin with ``estimate.py``: a job under a layout. ``cluster`` describes the machines,
``transformer`` and ``workload`` the model, ``pipeline_time`` simulates schedules, ``layout_search``
tries all layouts, ``sensitivity`` finds what limits the best one.
"""

from __future__ import annotations

from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.estimate import Memory, StepEstimate, TrainingJob
from fleetpipe.contrib.clusters.layout import JobLayout
from fleetpipe.contrib.clusters.transformer import Transformer

__all__ = ["Cluster", "StepEstimate", "TrainingJob", "JobLayout", "Memory", "Transformer"]
