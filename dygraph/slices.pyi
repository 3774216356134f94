from fleetpipe.contrib.slices import *
