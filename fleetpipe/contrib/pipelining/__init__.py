"""The schedules of ``paddle.distributed.auto_parallel.pipelining``, on the engine."""
