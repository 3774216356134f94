from fleetpipe.contrib.compat.mindspore.train import *
