"""`armature export` and `armature push`: write a checkpoint in the layout of other programs, with a model card.

A vision-language model is written in the Hugging Face layout, its adapter in PEFT's, and a robot policy in LeRobot's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from huggingface_hub import HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from armature.components.artifacts.disk import atomic_replacement
from armature.components.artifacts.manifest import MANIFEST
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError
from armature.components.contracts.files import is_folder
from armature.components.contracts.machine import Machine
from armature.components.machine.hub import HUB
from armature.components.machine.process import Scratch
from armature.components.models.source import ADAPTER, locate
from armature.model_card import Form, TrainingRecord, model_card, read_record

CARD = "README.md"
"""File name of the model card."""
HAS_POLICY = "armature.components.robots.policies.source:has_policy"
EXPORT_POLICY = "armature.components.robots.policies.family:export_lerobot"
"""Names "module:function" of the functions for checkpoints of robot policies. They are imported when they are called,
because only code for robots may import the robots package."""


@dataclass(frozen=True)
class Export:
    """A checkpoint to export."""

    source: Path
    """Folder of the checkpoint or its artifact."""
    form: Form
    """Layout to write."""
    record: TrainingRecord | None
    """The record of its training; None if the folder is not an artifact."""
    base: str | None = None
    """For a robot policy: hub name or folder that LeRobot takes tokenizer and image processor from; None for the
    policy's own."""

    def write(self, out: Path, name: str, copy: Callable[[str, str], object] = shutil.copyfile) -> Path:
        """Write the export to the folder `out`, which is replaced if it exists, and return the folder.

        Args:
            name: name of the model in its card.
            copy: function that puts one file into the export, called with the paths of the source and of the target.
                The default copies it. `link` makes a symbolic link, for an export that is deleted after its upload.

        Raises:
            ConfigurationError: the policy has no statistics or no cameras.
            DataError: the folder has no checkpoint.
        """
        if self.form == "lerobot":
            self._write_policy(out)
            (out / CARD).write_text(model_card(self.record, name, self.form))
            return out
        folder = self._folder()
        with atomic_replacement(out) as new:
            for path in sorted(folder.rglob("*")):
                below = path.relative_to(folder)
                if path.is_file() and (self.form == "adapter" or ADAPTER not in below.parts) and below.name != CARD:
                    (new / below).parent.mkdir(parents=True, exist_ok=True)
                    copy(str(path.resolve()), str(new / below))
            if self.form == "adapter":
                self._name_base(new / "adapter_config.json")
            (new / CARD).write_text(model_card(self.record, name, self.form, _remote_code(folder)))
        return out

    def _folder(self) -> Path:
        """Return the folder with the files to export: the checkpoint's folder, or its adapter's folder."""
        folder = locate(self.source)
        if self.form == "adapter":
            return folder / ADAPTER
        if not (folder / "config.json").is_file():
            raise DataError(
                "the folder has no checkpoint",
                code="checkpoint_missing",
                where=str(folder),
                remedy="give the artifact of a training stage, or a checkpoint folder",
            )
        return folder

    def _name_base(self, config: Path) -> None:
        """Write the hub name and the commit of the base model into the adapter's configuration file."""
        assert self.record is not None and self.record.base is not None
        facts = json.loads(config.read_text())
        if self.record.base.commit is not None:
            facts |= {"base_model_name_or_path": self.record.base.source, "revision": self.record.base.commit}
        config.unlink()  # it may be a link
        config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")

    def _write_policy(self, out: Path) -> None:
        """Write a robot policy to the folder `out` in LeRobot's layout."""
        resolve_name(EXPORT_POLICY)(self.source, out, self.base)


def read_export(source: str, store: Path, adapter: bool = False, base: str | None = None) -> Export:
    """Find the checkpoint called `source`, choose the layout of its export, and read the record of its training.

    The function `export` describes the arguments.

    Raises:
        ConfigurationError: `adapter` is set, and the checkpoint has no adapter that stands on a public base.
        DataError: the checkpoint does not exist, or its files have changed since it was made.
    """
    folder = find_checkpoint(source, store)
    record = read_record(folder, store)
    policy = resolve_name(HAS_POLICY)(folder)
    if adapter:
        _refuse_other_adapters(folder, record)
        return Export(folder, "adapter", record)
    return Export(folder, "lerobot" if policy else "merged", record, base)


def export(source: str, out: Path, store: Path, *, adapter: bool = False, base: str | None = None) -> Path:
    """Write a checkpoint to the new folder `out`.

    Args:
        source: folder of an artifact or a checkpoint, models:/NAME@ALIAS of MLflow, or the digest of an artifact in
            `store` (the first characters suffice).
        adapter: write the LoRA adapter alone, not the weights with the adapter merged in.
        base: for a policy: hub name or folder that LeRobot takes tokenizer and image processor from; None for
            allenai/MolmoAct2, or for the VLM that a SmolVLA names.

    Raises:
        ConfigurationError: `out` exists, there is no adapter, or the policy has no statistics or no cameras.
        DataError: the checkpoint does not exist, or its files have changed since it was made.
    """
    if out.exists():
        raise ConfigurationError(
            "the output folder exists already", code="output_exists", where=str(out), remedy="name a new folder"
        )
    return read_export(source, store, adapter, base).write(out, str(out))


def link(source: str, target: str) -> None:
    """Make `target` a symbolic link to the file `source`.

    `push` passes this function to `Export.write`, because its export is removed after the upload.
    """
    Path(target).symlink_to(source)


def find_checkpoint(source: str, store: Path) -> Path:
    """Return the folder of a checkpoint or an artifact; `export` describes the forms of `source`.

    Raises:
        DataError: it does not exist.
    """
    if is_folder(source):
        return Path(source)
    if source.startswith("models:/"):
        from armature.tasks.checkpoints import aliased_artifact

        return aliased_artifact(source, Machine(store=str(store))).path
    from armature.components.artifacts.store import ArtifactStore

    artifact = ArtifactStore(store).find_digest(source) if is_folder(store) else None
    if artifact is None:
        raise DataError(
            "this is neither a folder, nor an MLflow alias, nor the digest of an artifact",
            code="unknown_checkpoint",
            where=f"{source}, store {store}",
            remedy="copy the folder or digest from a run's last lines; --store names another store",
        )
    return artifact.path


def _refuse_other_adapters(folder: Path, record: TrainingRecord | None) -> None:
    """Raise ConfigurationError if the checkpoint has no adapter, or if the adapter's base model is not public."""
    if not (locate(folder) / ADAPTER / "adapter_config.json").is_file():
        raise ConfigurationError(
            "the checkpoint has no adapter",
            code="adapter_missing",
            where=str(folder),
            remedy="leave out --adapter, or train with model.lora",
        )
    if record is None or not record.adapter_stands_on_base:
        raise ConfigurationError(
            "the weights that the adapter belongs to are not public: they come from a warm start, a tiny model, or a "
            "training that is not in the store",
            code="adapter_base_unavailable",
            where=str(folder),
            remedy="leave out --adapter to export the merged weights",
        )


def _remote_code(folder: Path) -> bool:
    """Check whether the model in `folder` brings its own code, so that users have to pass `trust_remote_code`."""
    return (
        "auto_map" in json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else False
    )


# --- Upload to the Hugging Face hub ---

STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Patterns of the weight files that an upload deletes if only an earlier upload has them. A loader would take them for
parts of the new checkpoint."""


def push(
    source: str,
    repo_id: str,
    store: Path,
    *,
    public: bool = False,
    branch: str = "main",
    adapter: bool = False,
    base: str | None = None,
) -> str:
    """Upload a checkpoint to the hub in the layout of `export`, and return the address of the commit.

    An exported folder is uploaded unchanged. A missing repository is created. Large files that the repository has
    already are not sent again.

    Raises:
        ConfigurationError: there is no token, `repo_id` is not a hub name, or the repository has another kind or
            visibility.
        ArmatureError: the hub refuses the upload or cannot be reached.
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
def _folder(source: str, name: str, store: Path, adapter: bool, base: str | None) -> Iterator[Path]:
    """Provide the folder to upload: an exported folder itself, or a temporary export of a checkpoint."""
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
    """Create the repository if it does not exist.

    Raises:
        ConfigurationError: it exists with another kind, visibility or library.
    """
    info = _info(api, repo_id)
    if info is None:
        if api.repo_exists(repo_id, repo_type="dataset"):
            raise ConfigurationError(
                "a dataset has this name", code="repository_is_a_dataset", where=repo_id, remedy="choose another name"
            )
        api.create_repo(repo_id, private=not public)
        return
    if bool(info.private) == public:
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
    if info.library_name not in (None, ours):
        raise ConfigurationError(
            f"the repository holds a checkpoint for {info.library_name}, this one is for {ours}",
            code="repository_library_mismatch",
            where=repo_id,
            remedy="choose another name, or another --branch",
        )


def _info(api: HfApi, repo_id: str) -> ModelInfo | None:
    """Return the hub's description of a model repository, or None if there is no such repository."""
    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn errors of the hub client in this block into errors that say what to do."""
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
    except (HTTPError, OSError, ValueError) as error:  # network failures, and answers that the hub client cannot read
        raise ArmatureError(
            f"the upload failed: {str(error)[:300] or repr(error)}",
            code="upload_failed",
            where=where,
            remedy="run the same command again: files that have arrived are not sent again",
        ) from error
