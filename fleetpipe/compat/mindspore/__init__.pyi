from fleetpipe.contrib.compat.mindspore import *
from fleetpipe.contrib.compat.mindspore import LossMonitor as LossMonitor
