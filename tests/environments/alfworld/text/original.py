"""Play games with alfworld's own AlfredTWEnv and print each turn as JSON: python original.py FOLDER SPLIT...

Run this in a separate process, because fast-downward overwrites the arguments of its process.
"""

import contextlib
import json
import os
import random
import sys
from pathlib import Path

ROOT, SPLITS = Path(sys.argv[1]), sys.argv[2:]
CONFIG = {
    "env": {
        "type": "AlfredTWEnv",
        "domain_randomization": False,
        "task_types": [1, 2, 3, 4, 5, 6],
        "expert_type": "handcoded",
        "goal_desc_human_anns_prob": 0.0,
    },
    "dataset": {"num_train_games": -1, "num_eval_games": -1},
    "general": {"training_method": "dqn"},
    "rl": {"training": {"max_nb_steps_per_episode": 100}},
}


def play(split):  # type: ignore[no-untyped-def]
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    CONFIG["dataset"]["data_path"] = str(ROOT / split)
    environment = AlfredTWEnv(CONFIG, train_eval="train")
    games = environment.init_env(batch_size=1)
    for _ in range(environment.num_games):
        (feedback,), infos = games.reset()
        path = Path(infos["extra.gamefile"][0])
        plan = json.loads(path.read_text())["walkthrough"]
        rng = random.Random(str(path.relative_to(ROOT)))
        # Each plan begins with "go to", so a walk or a look before it does not invalidate it.
        aside = rng.choice([one for one in infos["admissible_commands"][0] if one.startswith(("go to", "look"))])
        commands = [rng.choice([aside, "go to nowhere"]), *plan]
        turns = [["", feedback, infos["admissible_commands"][0], infos["won"][0]]]
        for command in commands:
            if infos["won"][0]:
                break
            (feedback,), _, _, infos = games.step([command])
            turns.append([command, feedback, infos["admissible_commands"][0], infos["won"][0]])
        yield str(path.parent.relative_to(ROOT)), turns


with contextlib.redirect_stdout(sys.stderr):
    games = {name: turns for split in SPLITS for name, turns in play(split)}
print(json.dumps({"games": games, "cpu": sum(os.times()[:2])}))
