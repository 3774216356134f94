from fleetpipe.contrib.vocabulary import *
