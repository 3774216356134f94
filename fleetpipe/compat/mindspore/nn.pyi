from fleetpipe.contrib.compat.mindspore.nn import *
