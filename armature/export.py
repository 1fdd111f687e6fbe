"""`armature export`: a checkpoint as other programs load it, with its card.

A vision-language model in the Hugging Face layout, its adapter in PEFT's, a robot policy in LeRobot's.
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
RELEASED = "allenai/MolmoAct2"
HAS_POLICY = "armature.components.robots.policies.source:has_policy"
EXPORT_POLICY = "armature.components.robots.policies.molmoact2.checkpoints.checkpoint:export_lerobot"
"""Functions that know checkpoints of robot policies, loaded on use."""


@dataclass(frozen=True)
class Export:
    """What is written: a checkpoint's folder, its form, what is known of it, and a policy's released checkpoint."""

    source: Path
    form: Form
    record: TrainingRecord | None
    base: str = RELEASED

    def write(self, out: Path, name: str, copy: Callable[[str, str], object] = shutil.copyfile) -> Path:
        """Make the folder `out`, or replace it; the card calls it `name`. `copy` puts a file elsewhere.

        Raises:
            ConfigurationError: the policy knows no statistics or cameras.
            DataError: there is no checkpoint.
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
        folder = locate(self.source)
        if self.form == "adapter":
            return folder / ADAPTER
        if not (folder / "config.json").is_file():
            raise DataError(
                "no checkpoint",
                code="checkpoint_missing",
                where=str(folder),
                remedy="give what a stage that trains has made",
            )
        return folder

    def _name_base(self, config: Path) -> None:
        assert self.record is not None and self.record.base is not None
        facts = json.loads(config.read_text())
        if self.record.base.commit is not None:
            facts |= {"base_model_name_or_path": self.record.base.source, "revision": self.record.base.commit}
        config.unlink()  # it may be a link
        config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")

    def _write_policy(self, out: Path) -> None:
        resolve_name(EXPORT_POLICY)(self.source, out, self.base)


def read_export(source: str, store: Path, adapter: bool = False, base: str = RELEASED) -> Export:
    """What `source` is (see `export`), and what is known of it.

    Raises:
        ConfigurationError: there is no such adapter.
        DataError: there is no such checkpoint, or its files are not as they were made.
    """
    folder = find_checkpoint(source, store)
    record = read_record(folder, store)
    policy = resolve_name(HAS_POLICY)(folder)
    if adapter:
        _refuse_other_adapters(folder, record)
        return Export(folder, "adapter", record)
    return Export(folder, "lerobot" if policy else "merged", record, base)


def export(source: str, out: Path, store: Path, *, adapter: bool = False, base: str = RELEASED) -> Path:
    """Write a checkpoint to the new folder `out`.

    Args:
        source: Folder of an artifact or a checkpoint, models:/NAME@ALIAS of MLflow, or the digest of an artifact in
            `store`, or its first characters.
        adapter: The adapters alone, not the weights that have them merged in.
        base: Of a policy: hub name or folder of the released checkpoint, from which LeRobot takes tokenizer and image
            processor.

    Raises:
        ConfigurationError: `out` exists, there is no adapter, or the policy knows no statistics or cameras.
        DataError: there is no such checkpoint, or its files are not as they were made.
    """
    if out.exists():
        raise ConfigurationError(
            "there is something already", code="output_exists", where=str(out), remedy="name a folder to be made"
        )
    return read_export(source, store, adapter, base).write(out, str(out))


def link(source: str, target: str) -> None:
    """A symbolic link in place of a copy, for a folder that is read once and removed."""
    Path(target).symlink_to(source)


def find_checkpoint(source: str, store: Path) -> Path:
    """The folder of a checkpoint or an artifact; see `export` for what `source` may be.

    Raises:
        DataError: there is none.
    """
    if is_folder(source):
        return Path(source)
    if source.startswith("models:/"):
        from armature.tasks.checkpoints import aliased_artifact

        return aliased_artifact(source, Machine(store=str(store))).path
    from armature.components.artifacts.store import ArtifactStore

    found = ArtifactStore(store).find_digest(source) if is_folder(store) else None
    if found is None:
        raise DataError(
            "neither a folder, nor an alias, nor the digest of an artifact",
            code="unknown_checkpoint",
            where=f"{source}, store {store}",
            remedy="give what a run's last lines name, e.g. .armature/store/train-vlm/...; --store names another store",
        )
    return found.path


def _refuse_other_adapters(folder: Path, record: TrainingRecord | None) -> None:
    if not (locate(folder) / ADAPTER / "adapter_config.json").is_file():
        raise ConfigurationError(
            "the checkpoint has no adapter",
            code="adapter_missing",
            where=str(folder),
            remedy="leave out --adapter, or train with model.lora",
        )
    if record is None or not record.adapter_stands_on_base:
        raise ConfigurationError(
            "the adapter belongs to weights that nobody can fetch: those of a warm start, of a tiny model, or of a "
            "training that is not in the store",
            code="adapter_base_unavailable",
            where=str(folder),
            remedy="leave out --adapter: the merged weights are whole",
        )


def _remote_code(folder: Path) -> bool:
    return (
        "auto_map" in json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else False
    )


# `armature push`: an export to a repository of the Hugging Face hub.

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

    A missing repository is created. Large files that it has already are not sent again.

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
    """The folder to upload: an export as it is, or one that is made of a checkpoint."""
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
