"""`armature push`: an export to a repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from armature.components.artifacts.manifest import MANIFEST
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.hub import HUB
from armature.components.process import Scratch
from armature.export import CARD, RELEASED, link, read_export

STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Files of an earlier upload that a loader would take for parts of this one."""


def push(
    source: str,
    repo_id: str,
    store: Path,
    *,
    public: bool = False,
    branch: str = "main",
    adapter: bool = False,
    base: str = RELEASED,
) -> str:
    """Upload a checkpoint as `export` writes it, or a folder that it wrote as it is; returns the commit's address.

    The repository is made where there is none. Large files that arrived before are not sent again.

    Raises:
        ConfigurationError: no token, not a name of the hub, or a repository of another kind or visibility.
        ArmatureError: the hub refuses, or cannot be reached.
        DataError: see `read_export`.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigurationError(
            f"not a name on the hub: {error}", code="invalid_repository_name", where=repo_id, remedy="write OWNER/NAME"
        ) from error
    if not HUB.fullmatch(repo_id):
        raise ConfigurationError(
            "not a name on the hub", code="invalid_repository_name", where=repo_id, remedy="write OWNER/NAME"
        )
    if get_token() is None:
        raise ConfigurationError(
            "no token for the hub",
            code="hub_token_missing",
            remedy="hf auth login, or set HF_TOKEN to a token that may write to it",
        )
    with _folder(source, repo_id, store, adapter, base) as folder, _hub_errors(repo_id):
        api = HfApi()
        _make_repository(api, repo_id, folder, public)
        if branch != constants.DEFAULT_REVISION:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=branch,
            commit_message="Upload a checkpoint with Armature",
            delete_patterns=STALE,
        )
    return str(done.commit_url)


@contextmanager
def _folder(source: str, name: str, store: Path, adapter: bool, base: str) -> Iterator[Path]:
    """What is uploaded: an export as it is, else one that is made for it."""
    if (Path(source) / CARD).is_file() and not (Path(source) / MANIFEST).is_file():
        if adapter:
            raise ConfigurationError(
                "an export is uploaded as it is", code="export_has_no_parts", where=source, remedy="leave out --adapter"
            )
        yield Path(source)
        return
    with Scratch() as folder:
        yield read_export(source, store, adapter, base).write(Path(folder, "export"), name, link)


def _make_repository(api: HfApi, repo_id: str, folder: Path, public: bool) -> None:
    """
    Raises:
        ConfigurationError: there is one of another kind or visibility.
    """
    found = _info(api, repo_id)
    if found is None:
        if api.repo_exists(repo_id, repo_type="dataset"):
            raise ConfigurationError(
                "a dataset has this name", code="repository_is_a_dataset", where=repo_id, remedy="choose another name"
            )
        api.create_repo(repo_id, private=not public)
        return
    if bool(found.private) == public:
        raise ConfigurationError(
            f"the repository is {'private' if public else 'public'}",
            code="repository_visibility_mismatch",
            where=repo_id,
            remedy=(
                "leave out --public, or make it public on its page" if public else "write --public if this is meant"
            )
            + ", or choose another name",
        )
    ours = ModelCard.load(folder / CARD).data.library_name
    if found.library_name not in (None, ours):
        raise ConfigurationError(
            f"the repository holds a checkpoint for {found.library_name}, this one is for {ours}",
            code="repository_library_mismatch",
            where=repo_id,
            remedy="choose another name, or another --branch",
        )


def _info(api: HfApi, repo_id: str) -> ModelInfo | None:
    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    where = f"{repo_id} at {constants.ENDPOINT}"
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigurationError(
                "the hub rejects the token" if status == 401 else "the token may not write there",
                code="hub_access_denied",
                where=where,
                remedy="hf auth login, or set HF_TOKEN to a token that may write to this repository",
            ) from error
        if isinstance(error, RevisionNotFoundError):
            raise ConfigurationError(
                "there is no such branch", code="hub_branch_missing", where=where, remedy="name a branch"
            ) from error
        raise ArmatureError(
            f"the hub answers {status}: {str(error).splitlines()[0]:.300}",
            code="hub_failed",
            where=where,
            remedy="run the same command again: files that have arrived are not sent again",
        ) from error
    except (HTTPError, OSError, ValueError) as error:  # the network's, and answers that are not the hub's
        raise ArmatureError(
            f"the upload did not go through: {str(error)[:300] or repr(error)}",
            code="upload_failed",
            where=where,
            remedy="run the same command again: files that have arrived are not sent again",
        ) from error
