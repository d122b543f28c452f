"""What a rank reports, and where it goes.

log: log lines, and one record for each event, which goes to Python loggers, to the manager server (metrics
and dashboard) and to OpenTelemetry. phases: how long the phases of a heal take, and of the time after a
failure. trace: a trace of each step. exporters: which OpenTelemetry exporters are on; torchft.otel has them.
hangs: what a rank that hangs does, and the stacks of its threads. own_time: ranges in the profiler, and how
long a rank works in a step without waiting for others.
"""
