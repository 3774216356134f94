from fleetpipe.contrib.ray import PaddleConfig as PaddleConfig
from fleetpipe.contrib.ray import PaddleTrainer as PaddleTrainer
from fleetpipe.contrib.ray import RayCheckpointManager as RayCheckpointManager
from fleetpipe.contrib.ray import ReportCallback as ReportCallback
