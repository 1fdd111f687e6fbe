"""Why a rollout can fail. One that does is counted and left out; the others of its group go on."""

from __future__ import annotations

REASONS = {
    "environment_error": "the environment raised, or returned what an environment may not return",
    "environment_timeout": "a reset, step or close took longer than environment_timeout",
    "bad_image": "an observation's image is damaged, too large, or not of its media type",
    "bad_text": "an observation's text is not valid Unicode",
    "bad_reward": "a reward part has no weight or is not a finite number",
    "too_long": "the prompt leaves no room for a completion",
    "generation_timeout": "no server answered within generation_timeout",
    "server_error": "the servers answered with an error",
    "bad_logprobs": "log-probs are missing, not finite, or positive",
    "sampled_placeholder": "the policy sampled an image placeholder",
}


class RolloutFailed(Exception):
    """Ends one rollout. `reason` is a key of `REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
