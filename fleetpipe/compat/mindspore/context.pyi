from fleetpipe.contrib.compat.mindspore.context import *
