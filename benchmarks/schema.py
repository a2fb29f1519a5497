"""Hold what is written against record.schema.json, where jsonschema is installed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.record import SCHEMA_FILE


class SchemaError(ValueError):
    """What was to be written is no record or run: a fault of this program."""


def validate(content: Mapping[str, Any]) -> bool:
    """Return whether the content could be checked; GPU nodes may lack jsonschema.

    Raises:
        SchemaError: it does not fit; names the field.
    """
    check = _checker()
    if check is None:
        return False
    problem = check(content)
    if problem is not None:
        raise SchemaError(problem)
    return True


@functools.cache
def _checker() -> Callable[[Mapping[str, Any]], str | None] | None:
    try:
        import jsonschema
    except ImportError:
        return None
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)

    def check(content: Mapping[str, Any]) -> str | None:
        error = jsonschema.exceptions.best_match(validator.iter_errors(content))
        return None if error is None else f"{error.json_path}: {error.message[:500]}"

    return check
