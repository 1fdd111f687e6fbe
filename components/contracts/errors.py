"""Errors in three parts: what is wrong, where, and what to do."""

from __future__ import annotations

import sysconfig
import traceback
from base64 import b64encode
from html import escape
from json import dumps
from pathlib import Path
from urllib.parse import quote, quote_plus

# --- Secrets that this process has read. Error messages replace them by ***, also in text that others wrote. ---

SHORTEST = 4
"""Minimum number of characters of a secret that is replaced. Shorter values occur in too many texts by chance."""

_forms: set[str] = set()
"""All texts to replace: each secret as it is and in its escaped forms."""


def keep_secret(value: str) -> None:
    """Replace this value by *** in all later errors, also where it is escaped for JSON, HTML, URLs, base64 or
    Python."""
    for secret in {value, value.strip()}:  # a header is sent without the spaces around it
        if len(secret) >= SHORTEST:
            text = dumps(secret)[1:-1]
            _forms.update((secret, text, text.replace("/", r"\/"), repr(secret)[1:-1], escape(secret)))
            content = secret.encode(errors="surrogatepass")
            _forms.update((quote(content), quote(content, ""), quote_plus(content)))
            _forms.update(
                "".join(each if each.isalnum() else digits % ord(each) for each in secret) for digits in _JSON
            )
            _forms.update(form for form in map(_base64, (content,) * 3, range(3)) if len(form) >= 2 * SHORTEST)


_JSON = (r"\u%04x", r"\u%04X")
"""Formats of the escapes with which some JSON writers replace non-alphanumeric characters, such as + and &."""


def _base64(secret: bytes, before: int) -> str:
    """Return the part of a base64 text that shows that the encoded bytes contain the secret.

    Base64 encodes groups of 3 bytes, so the part depends on the position of the secret: it begins `before` (0, 1 or 2)
    bytes after the start of a group. Characters that also depend on neighboring bytes are left out.
    """
    content = b"\0" * before + secret
    return b64encode(content).decode()[(8 * before + 5) // 6 : 8 * len(content) // 6]


def blanked(text: str) -> str:
    """Return the text with *** in place of each secret that `keep_secret` has received.

    Errors call this for their messages. Call it before you shorten or quote a text, because a part of a secret is not
    recognized.
    """
    for form in sorted(_forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


class ArmatureError(Exception):
    """The base of every error that a user can act on.

    `code` is the stable name of the problem, the same in every version; `docs/errors.md` lists all codes. An error that
    is raised without a code has the code of its class. Programs and tests compare codes, because sentences may change.
    `what` is the problem in one sentence, `where` is the file, row, field or server that has it, and `remedy` says what
    to do about it.

    Example:
        >>> error = DataError("the file is empty", code="empty_file", where="prompts.jsonl")
        >>> error.code, error.where
        ('empty_file', 'prompts.jsonl')
    """

    code: str = "error"

    def __init__(self, what: str, *, code: str = "", where: str = "", remedy: str = "") -> None:
        what, where, remedy = blanked(what), blanked(where), blanked(remedy)
        self.what, self.where, self.remedy = what, where, remedy
        self.code = code or type(self).code
        parts = [what, f"  where: {where}" if where else "", f"  what to do: {remedy}" if remedy else ""]
        super().__init__("\n".join(part for part in parts if part))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.code, self.where, self.remedy))


def _rebuild(kind: type[ArmatureError], what: str, code: str, where: str, remedy: str) -> ArmatureError:
    """Return an unpickled error. Pickle calls this, because it cannot pass keyword arguments to the constructor."""
    return kind(what, code=code, where=where, remedy=remedy)


class ConfigurationError(ArmatureError):
    """A setting is unknown, missing, or contradicts another."""

    code = "invalid_configuration"


class InvalidName(ConfigurationError, ValueError):
    """Nothing has this name, or it cannot be loaded. Pydantic reports it with its key, since it is a ValueError."""


class DataError(ArmatureError):
    """A table, an image, an artifact or a checkpoint is not what it should be."""

    code = "invalid_data"


class StoreError(DataError):
    """The artifact store or its remote copy could not be read or written; finished artifacts are kept."""

    code = "store_failed"


class ServerError(ArmatureError):
    """A model server did not start, died, or sent an invalid answer."""

    code = "server_failed"


class WeightSyncError(ServerError):
    """The new weights did not reach every server; the run stops."""

    code = "weight_sync_failed"


class TrainerError(ArmatureError):
    """The trainer service failed or died."""

    code = "trainer_failed"


class TrackingError(ArmatureError):
    """MLflow could not be reached or written to; the artifacts of the run are kept."""

    code = "tracking_failed"


class DivergedError(ArmatureError):
    """The training diverged, so restarting the run would not help."""

    code = "diverged"


class MismatchError(ArmatureError):
    """Trainer and server compute different log-probs or texts; the training would fail silently."""

    code = "mismatch"


# --- Failed rollouts are counted and left out; the other rollouts of the group continue. ---

LONGEST_DETAIL = 2000
"""Maximum number of characters of `RolloutFailed.detail`."""


class RolloutFailed(Exception):
    """The error that ends one rollout. `reason` is a short slug under which failures are counted.

    environment_error     the environment raised, or returned what an environment may not return
    environment_timeout   a reset, step or close took longer than `environment_timeout`
    bad_image             an observation's image is damaged, too large, animated, without a conversion to RGB, or not of
                          its media type
    bad_text              a text of the environment or of the server is not valid Unicode
    bad_reward            a reward part has no weight, or the reward is not a finite number
    bad_answer            a reward cannot compare a completion with the answer of the task
    reward_timeout        a reward took longer than its time limit
    reward_died           the process of a reward ended
    reward_error          the code of a reward raised
    reward_invalid        a reward is not a finite number
    judge_timeout         a judge did not answer in time
    judge_unavailable     a judge could not be reached, or answered 429, 5xx, or anything but a chat completion
    judge_refused         a judge refused the question
    judge_unreadable      there is no grade in a judge's reply
    bad_logprobs          log-probs are missing or not finite
    bad_value             the value head of a robot policy returned a number that is not finite
    ...                   and the reasons of `armature.components.inference.client.GenerationFailure`

    `detail` is the readable message: valid Unicode, at most `LONGEST_DETAIL` characters, secrets replaced by ***.
    """

    def __init__(self, reason: str, detail: str) -> None:
        detail = blanked(detail)[:LONGEST_DETAIL].encode(errors="replace").decode()
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


LONGEST_PLACE = 300
"""Maximum number of characters of the place of an error, which `said` adds to the error's message."""
_INSTALLED = (str(Path(__file__).parents[2]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
"""Folders of code that is not the user's: this package, Python's standard library and installed packages."""


def said(error: BaseException) -> str:
    """Return a text that describes an error which is not one of ours.

    It has the class and the message of the error, and the place in the user's code where it was raised. The error's own
    methods may raise, so this function catches everything.
    """
    try:
        return f"{type(error).__name__}: {str(error)[: LONGEST_DETAIL - LONGEST_PLACE]}{_place(error)}"
    except BaseException:
        return f"{type(error).__name__}, whose message cannot be read{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the place in the user's code where an error was raised: file, line number and text of the line.

    It is the innermost frame of the traceback outside of `_INSTALLED`, or "" if there is no such frame.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_INSTALLED) and frame.line:
            return f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"[:LONGEST_PLACE]
    return ""
