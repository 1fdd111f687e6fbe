"""Program that forks the ranks of a trainer of robot policies and lets them carry out commands."""

from __future__ import annotations

import json
from pathlib import Path

from armature.components.robots.rl.worker import RobotRLWorker
from armature.components.training.ranks import joined
from armature.components.training.service_settings import ServiceSettings
from tests.training.forked import serve


def carry_out(file: str) -> None:
    read, commands = json.loads(Path(file).read_text())
    settings = ServiceSettings.model_validate(read)
    with joined(settings.processes, settings.seed) as ranks:
        worker = RobotRLWorker(settings, ranks)
        answers = [worker.run(command, worker.check(command)) for command in commands]
        if ranks.first:
            Path(file).with_name("answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    serve(carry_out)
