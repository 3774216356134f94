from fleetpipe.contrib.experts import *
