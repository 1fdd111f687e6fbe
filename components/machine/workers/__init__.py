"""Child programs that answer requests. If one crashes, hangs or sends invalid data, only its own state is lost.

A worker is a module that calls `serve` with its handler; `WorkerProcess` starts it under the guard of
`armature.components.machine.process` and calls the handler's methods. Requests and answers are data and nothing is
unpickled.
"""
