from fleetpipe.contrib.compat.colossalai.pipeline.pipelinable import *
