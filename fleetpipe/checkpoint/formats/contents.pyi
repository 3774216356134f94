from fleetpipe.contrib.formats.contents import *
