from fleetpipe.contrib.compat.colossalai.trainer import *
