"""Why a rollout can fail. One that does is counted and left out; the others of its group go on."""

from __future__ import annotations

from armature.components.contracts.secret_values import blanked

LONGEST_DETAIL = 2000


class RolloutFailed(Exception):
    """Ends one rollout. `reason` is a short slug that is counted.

    environment_error     the environment raised, or returned what an environment may not return
    environment_timeout   a reset, step or close took longer than `environment_timeout`
    bad_image             an observation's image is damaged, too large, animated, without a conversion to RGB, or not of
                          its media type
    bad_text              a text of the environment or of the server is not valid Unicode
    bad_reward            a reward part has no weight, or the reward is not a finite number
    bad_answer            a reward cannot compare anything with the answer of the task
    reward_timeout        a reward took longer than its time limit
    reward_died           the process of a reward ended
    reward_error          the code of a reward raised
    reward_invalid        a reward is not a finite number
    judge_timeout         a judge did not answer in time
    judge_unavailable     a judge could not be reached, or answered 429, 5xx, or what is no chat completion
    judge_refused         a judge refused the question
    judge_unreadable      there is no grade in a judge's reply
    bad_logprobs          log-probs are missing or not finite
    bad_value             of a robot policy: what its value head says is not finite
    ...                   and the reasons of `armature.components.inference.client.GenerationFailure`

    `detail` is kept readable and free of secrets: at most `LONGEST_DETAIL` characters, all of them valid Unicode.
    """

    def __init__(self, reason: str, detail: str) -> None:
        detail = blanked(detail)[:LONGEST_DETAIL].encode(errors="replace").decode()
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def said(error: BaseException) -> str:
    """The kind and the message of an error that is not ours, whose own methods may fail too."""
    try:
        return f"{type(error).__name__}: {str(error)[:LONGEST_DETAIL]}"
    except BaseException:
        return f"{type(error).__name__}, whose message cannot be read"
