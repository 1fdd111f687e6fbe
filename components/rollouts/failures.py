"""Why a rollout can fail. One that does is counted and left out; the others of its group go on."""

from __future__ import annotations


class RolloutFailed(Exception):
    """Ends one rollout. `reason` is a short slug that is counted.

    environment_error     the environment raised, or returned what an environment may not return
    environment_timeout   a reset, step or close took longer than `environment_timeout`
    bad_image             an observation's image is damaged, too large, or not of its media type
    bad_text              an observation's text is not valid Unicode
    bad_reward            a reward part has no weight, or the reward is not a finite number
    bad_logprobs          log-probs are missing or not finite
    ...                   and the reasons of `components.inference.client.GenerationFailure`
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
