from fleetpipe.contrib.sequences import *
