from fleetpipe.contrib.compat.colossalai import *
