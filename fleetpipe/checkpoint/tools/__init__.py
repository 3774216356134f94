"""The command ``fleetpipe checkpoint``: looks at checkpoints, compares and converts them."""
