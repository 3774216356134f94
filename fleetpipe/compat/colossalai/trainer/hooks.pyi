from fleetpipe.contrib.compat.colossalai.trainer.hooks import *
