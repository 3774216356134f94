from fleetpipe.contrib.compat.colossalai.nn.lr_scheduler import *
