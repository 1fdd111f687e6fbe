"""Trace a run or an artifact back to everything it was made from, through MLflow's records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mlflow.entities import DatasetInput, Run
from mlflow.exceptions import MlflowException

from armature.components.contracts.errors import DataError
from armature.tasks import mlflow_client as names
from armature.tasks.mlflow_client import client


@dataclass
class Node:
    """An artifact, or the run at the root of the tree, with the nodes that it was made from."""

    name: str
    digest: str
    path: str = ""
    made_by: str = ""
    """Id of the MLflow run that wrote the artifact; empty if MLflow has no such run."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts to show beside the name, such as the commit of the code."""
    parents: list[Node] = field(default_factory=list)
    """Nodes of the artifacts from which this one was made."""

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it, depth first."""
        yield self
        for parent in self.parents:
            yield from parent.walk()

    def lines(self, indent: str = "", most: int = 3) -> Iterator[str]:
        """Yield the tree below this node as lines of text.

        If a node has more than `most` + 2 parents, such as the artifacts of many steps, only the first `most` and the
        last one are shown.
        """
        facts = "".join(f"  {key}={value}" for key, value in self.facts.items())
        yield f"{indent}{self.name}  {self.digest}{facts}"
        shown = self.parents
        if len(shown) > most + 2:
            hidden = len(shown) - most - 1
            for parent in shown[:most]:
                yield from parent.lines(indent + "  ", most)
            yield f"{indent}  ... {hidden} more"
            shown = shown[-1:]
        for parent in shown:
            yield from parent.lines(indent + "  ", most)


def lineage(run_or_digest: str) -> Node:
    """Return the tree of everything that a run or an artifact was made from.

    Args:
        run_or_digest: id of an MLflow run, or digest of an artifact.

    Raises:
        DataError: MLflow has neither a run nor an artifact of this name.
    """
    walker = _Walker()
    run = _find_run(run_or_digest)
    if run is not None:
        return walker.run(run)
    node = walker.artifact(run_or_digest)
    if not node.made_by and not node.path:
        raise DataError(
            f"MLflow has no run and no artifact {run_or_digest!r}",
            code="unknown_run",
            where=names.shown_uri(),
            remedy="give a run id or a whole digest; `armature show` without an argument lists the latest runs",
        )
    return node


def code_commit(digest: str) -> str:
    """Return the git commit of the code that made an artifact; empty if MLflow has no run that made it."""
    run = _Walker().maker(digest)
    if run is not None and (parent := run.data.tags.get(names.PARENT_TAG)):
        run = client().get_run(parent)
    return str(run.data.tags.get(names.COMMIT_TAG, "")) if run is not None else ""


def _find_run(run_id: str) -> Run | None:
    """Return the MLflow run with this id, or None if there is no such run."""
    try:
        return client().get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


class _Walker:
    """Builds a tree of nodes from MLflow's records.

    Each artifact is looked up once. If it appears in the tree again, its further nodes have no parents.
    """

    def __init__(self) -> None:
        self._experiments = [each.experiment_id for each in client().search_experiments()]
        self._seen: set[str] = set()
        self._runs: dict[str, Run] = {}

    def run(self, run: Run) -> Node:
        """Return the node of a run. Its parents are the inputs of the run, and for a flow's run also the inputs of its
        stages."""
        node = Node(run.info.run_name or run.info.run_id, run.info.run_id, facts=_facts(run))
        stages = client().search_runs(self._experiments, f"tags.`{names.PARENT_TAG}` = '{run.info.run_id}'")
        for each in [run, *reversed(stages)]:
            for dataset in _with_context(each, "input"):
                if dataset.dataset.digest not in self._seen:
                    node.parents.append(self.dataset(dataset))
            for model in each.inputs.model_inputs if each.inputs else []:
                tags = client().get_logged_model(model.model_id).tags
                if (digest := tags["checkpoint.digest"]) not in self._seen:
                    node.parents.append(self.artifact(digest))
        return node

    def artifact(self, digest: str) -> Node:
        """Return the node of the artifact with this digest. It has no parents if MLflow has no record of it."""
        for context in ("output", "input"):
            condition = f"dataset.digest = '{digest}' and dataset.context = '{context}'"
            for run in client().search_runs(self._experiments, condition, order_by=["attributes.start_time ASC"]):
                self._runs[run.info.run_id] = run
                for dataset in _with_context(run, context):
                    if dataset.dataset.digest == digest:
                        return self.dataset(dataset)
        return Node("artifact", digest)

    def dataset(self, dataset: DatasetInput) -> Node:
        """Return the node of the artifact that an MLflow dataset describes.

        Its parents are the artifacts from which it was made. If it is the final output of a stage, the artifacts of the
        stage's steps are parents too.
        """
        digest = dataset.dataset.digest
        node = Node(dataset.dataset.name, digest, path=json.loads(dataset.dataset.source).get("uri", ""))
        if digest in self._seen:
            return node
        self._seen.add(digest)
        maker = self.maker(digest)
        if maker is not None:
            node.made_by = maker.info.run_id
            node.facts = {"run": maker.info.run_id, **_facts(maker)}
        made_from: list[str] = list(json.loads(_tags(dataset).get(names.INPUTS_TAG, "{}")).values())
        if maker is not None and maker.data.tags.get(names.DIGEST_TAG) == digest:
            # This is the stage's final output. The artifacts of its steps (rollouts, batches) belong to its history.
            outputs = _with_context(maker, "output")
            of_steps = sorted(
                (each for each in outputs if names.STEP_TAG in _tags(each)),
                key=lambda each: int(_tags(each)[names.STEP_TAG]),
            )
            used = {value for each in of_steps for value in json.loads(_tags(each)[names.INPUTS_TAG]).values()}
            node.parents += [self.dataset(each) for each in of_steps if each.dataset.digest not in used]
        node.parents += [self.artifact(each) for each in made_from]
        return node

    def maker(self, digest: str) -> Run | None:
        """Return the first run that wrote the artifact with this digest, or None if MLflow has no such run."""
        condition = f"dataset.digest = '{digest}' and dataset.context = 'output'"
        for run in client().search_runs(self._experiments, condition, order_by=["attributes.start_time ASC"]):
            if any(each.dataset.digest == digest for each in _with_context(run, "output")):
                return run
        return None


def _tags(dataset: DatasetInput) -> dict[str, str]:
    """Return the tags of an MLflow dataset as a dict."""
    return {tag.key: tag.value for tag in dataset.tags}


def _with_context(run: Run, context: str) -> list[DatasetInput]:
    """Return the artifacts that a run logged in the role `context`, "input" or "output"."""
    datasets: Iterable[DatasetInput] = run.inputs.dataset_inputs if run.inputs else []
    return [each for each in datasets if _tags(each).get(names.CONTEXT_TAG) == context]


def _facts(run: Run) -> dict[str, str]:
    """Return the first characters of the digest of a run's settings and of its git commit, if the run has them."""
    wanted = {"config": names.CONFIG_TAG, "commit": names.COMMIT_TAG}
    return {key: run.data.tags[tag][:12] for key, tag in wanted.items() if tag in run.data.tags}
