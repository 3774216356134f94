from fleetpipe.contrib.compat.mindspore.communication import *
