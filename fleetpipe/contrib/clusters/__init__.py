"""A step on a cluster that is not there: from a description of it and of a model, nothing run.

Begin with ``estimate.py``: a job under a layout. ``cluster`` says what it runs on, ``transformer``
and ``workload`` what is trained, ``pipeline_time`` asks the simulator of schedules, ``search``
tries all layouts, ``sensitivity`` says what limits the best.
"""

from __future__ import annotations

from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.estimate import Memory, StepEstimate, TrainingJob
from fleetpipe.contrib.clusters.layout import JobLayout
from fleetpipe.contrib.clusters.transformer import Transformer

__all__ = ["Cluster", "StepEstimate", "TrainingJob", "JobLayout", "Memory", "Transformer"]
