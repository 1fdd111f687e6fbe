"""One process of a training: `python -m components.vla.run job.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from components.training.errors import describe
from components.training.launch import joined_ranks
from components.vla.job import TrainingJob
from components.vla.train import train


def main(job_file: str) -> None:
    """Train to the end. The exit code is 1 if an error ended it, which is then in the job's error file."""
    job = TrainingJob.model_validate_json(Path(job_file).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with joined_ranks(bool(job.gpus), job.threads, job.settings.training.seed, job.ready_timeout) as ranks:
        try:
            train(job, ranks)
        except BaseException as error:
            job.error(ranks.rank).write_text(json.dumps(describe(error)))
            raise


if __name__ == "__main__":
    main(sys.argv[1])
