from fleetpipe.contrib.compat.mindspore.train.callback import *
