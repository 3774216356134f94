from fleetpipe.contrib.compat.colossalai.pipeline import *
