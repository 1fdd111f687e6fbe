"""Child programs that answer requests. Each may crash, hang or talk nonsense: that costs its own state and no more.

A worker is a module that calls `serve` with its handler; `WorkerProcess` starts it under the guard of
`armature.components.machine.process` and calls the handler's methods. Requests and answers are data and nothing is
unpickled.
"""
