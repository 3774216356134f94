from fleetpipe.contrib.clusters import *
