from fleetpipe.contrib.compat.colossalai.nn.metric import *
