from fleetpipe.contrib.formats.convert import *
