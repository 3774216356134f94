from fleetpipe.contrib.compat.colossalai.core import *
