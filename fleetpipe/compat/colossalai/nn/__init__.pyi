from fleetpipe.contrib.compat.colossalai.nn import *
