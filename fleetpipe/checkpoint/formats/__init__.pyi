from fleetpipe.contrib.formats import *
