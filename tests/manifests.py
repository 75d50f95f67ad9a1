"""Changes of a data set's manifest by a test that is about something else than its checksum."""

import json

from hostdev.core.checksums import json_checksum
from hostdev.data import manifest


def write_manifest(folder, content):
    """Write a manifest that says this, with the right checksum where it has one."""
    if "sha256" in content:
        del content["sha256"]
        content["sha256"] = json_checksum(content)
    (folder / manifest.FILE_NAME).write_text(json.dumps(content))


def edit_manifest(folder, change):
    """Change what the manifest says, given to `change` as it is in the file."""
    content = json.loads((folder / manifest.FILE_NAME).read_text())
    change(content)
    write_manifest(folder, content)


def as_version_1(content):
    """A manifest's content as version 1 had it."""
    schema = content.pop("schema")
    names = [column["name"] for column in schema["columns"]]
    del content["sha256"], content["rejected_sha256"]
    return {
        **content,
        "version": 1,
        "vocabulary_size": schema["rows"],
        "dense_names": schema["dense"],
        "categorical_names": names,
    }
