from fleetpipe.contrib.compat import colossalai as colossalai
from fleetpipe.contrib.compat import mindspore as mindspore
