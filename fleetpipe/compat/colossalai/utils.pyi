from fleetpipe.contrib.compat.colossalai.utils import *
