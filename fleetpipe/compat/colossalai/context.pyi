from fleetpipe.contrib.compat.colossalai.context import *
