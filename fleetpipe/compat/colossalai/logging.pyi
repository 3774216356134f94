from fleetpipe.contrib.compat.colossalai.logging import *
