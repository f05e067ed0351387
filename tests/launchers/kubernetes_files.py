"""What is wrong with files for Kubernetes, by Kubernetes' own schemas and Kubeflow's own models, and what is in them.

    .tools/launchers/bin/python kubernetes_files.py FILE...

It runs in the environment of requirements/launchers.lock. It prints a list of documents as JSON, each with its
``file``, its ``content`` and its ``complaints``.

Kubeflow's models ignore fields that they do not know, where a cluster would warn or refuse: such a field is a
complaint here, too. What only a cluster's own rules (CEL, webhooks) refuse is not seen.
"""

import json
import sys
from pathlib import Path

import kubernetes_validate
import pydantic
import yaml
from kubeflow_trainer_api import models

KUBERNETES = "1.31"
"""Older than any version that is still supported: what it knows others do, too."""
KUBEFLOW = "trainer.kubeflow.org/v1alpha1"


def of_kubernetes(document):
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield error.message


def unknown(given, known, path=""):
    """What is in a document and not in the model that was made of it."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name in known:
                yield from unknown(value, known[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: there is no such field"
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for index, (value, other) in enumerate(zip(given, known, strict=True)):
            yield from unknown(value, other, f"{path}.{index}")
    elif given != known:
        yield f"{path}: {given!r} is read as {known!r}"


def of_kubeflow(document):
    model = getattr(models, f"TrainerV1alpha1{document['kind']}", None)
    if model is None:
        yield f"kind: Kubeflow Trainer has no {document['kind']}"
        return
    try:
        read = model.from_dict(document)
    except pydantic.ValidationError as error:
        yield from (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return
    yield from unknown(document, read.to_dict())


def documents(file):
    for content in yaml.safe_load_all(Path(file).read_text(encoding="utf-8")):
        complaints = of_kubeflow(content) if content["apiVersion"] == KUBEFLOW else of_kubernetes(content)
        yield {"file": Path(file).name, "content": content, "complaints": list(complaints)}


if __name__ == "__main__":
    json.dump([document for file in sys.argv[1:] for document in documents(file)], sys.stdout)
