from fleetpipe.contrib.lora import *
