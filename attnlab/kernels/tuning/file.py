"""The table as JSON, a row in a few lines: read with errors that name the row, written as it was read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attnlab.checks import one_of, require
from attnlab.kernels.tuning.rows import CUDA, HIP, INTERPRETER, KERNELS, Measured, Row, Run, Table, conditions

_ROW = {"kernel", "on", "when", "config", "measured", "unmeasured", "why"}
_RUN = {"device", "versions", "commit", "when", "file"}


def parsed(content: Any, *, name: str) -> Table:
    """Return the table that JSON holds. Raises ValueError with the row's number and what is wrong with it.

    Which rows come before which, and what they leave out, is the affair of `checks.check`.
    """
    try:
        _known(content, {"about", "runs", "rows"})
        about = content["about"]
        if not isinstance(about, list) or not all(isinstance(line, str) for line in about):
            raise ValueError("about: expected a list of lines")
        runs = {key: _run(key, value) for key, value in content["runs"].items()}
        rows = tuple(_numbered(number, value, runs) for number, value in enumerate(content["rows"], start=1))
        return Table(about=tuple(about), runs=runs, rows=rows)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name}: {reason}; a table has about, runs and rows") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _numbered(number: int, content: Any, runs: Mapping[str, Run]) -> Row:
    try:
        return _row(content, runs)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"row {number}, {json.dumps(content)[:120]}: {reason}") from error


def _row(content: Any, runs: Mapping[str, Run]) -> Row:
    _known(content, _ROW)
    kernel = one_of("kernel", content["kernel"], list(KERNELS))
    about = KERNELS[kernel]
    on = tuple(content["on"].split(", "))
    for device in on:
        fits = device in (INTERPRETER, HIP, CUDA) or re.fullmatch(r"sm_\d+", device)
        require(bool(fits), f"on: expected interpreter, hip, cuda or such as sm_90, got {device!r}")
    when = conditions(content["when"])
    words = (*about.words, "widest") if {"qk_dim", "v_dim"} <= set(about.words) else about.words
    for one in when:
        require(one.word in words, f"when: shapes of {kernel} have {', '.join(words) or 'no words'}, got {one.word!r}")
    has_one = ("measured" in content) != ("unmeasured" in content)
    require(has_one, "expected either measured or unmeasured, which says why")
    measured = _measured(content["measured"], runs) if "measured" in content else None
    return Row(
        kernel=kernel,
        on=on,
        when=when,
        config=_config(content["config"], about.fields),
        measured=measured,
        unmeasured=_text("unmeasured", content.get("unmeasured")),
        why=_text("why", content.get("why")),
    )


def _config(content: Any, fields: tuple[str, ...]) -> dict[str, int | None]:
    """Return a config of the kernel's fields, in its order; `registers` alone may be null."""
    require(set(content) == set(fields), f"config: expected {', '.join(fields)}, got {', '.join(content)}")
    for field in fields:
        value = content[field]
        counts = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(
            counts or (value is None and field == "registers"),
            f"config: expected {field} to be a number from 1 on, got {value!r}",
        )
    return {field: content[field] for field in fields}


def _measured(content: Any, runs: Mapping[str, Run]) -> Measured:
    _known(content, {"run", "us"})
    run = one_of("run", content["run"], list(runs))
    require(len(content["us"]) > 0, "us: expected microseconds of a workload at least, got none; or say unmeasured")
    for work, us in content["us"].items():
        right = isinstance(us, int | float) and not isinstance(us, bool) and 0 < us < 1e9
        require(right, f"us: expected microseconds of {work}, got {us!r}")
    return Measured(run=run, us={work: float(us) for work, us in content["us"].items()})


def _run(name: str, content: Any) -> Run:
    _known(content, _RUN)
    for key in _RUN:
        optional = key in ("commit", "when")
        text = isinstance(content[key], str) or (optional and content[key] is None)
        require(text, f"run {name}, {key}: expected words, got {content[key]!r}")
    return Run(**content)


def _text(name: str, content: Any) -> str | None:
    require(content is None or (isinstance(content, str) and content != ""), f"{name}: expected words, got {content!r}")
    return content  # type: ignore[no-any-return]


def _known(content: Any, keys: set[str]) -> None:
    require(isinstance(content, dict), f"expected {', '.join(sorted(keys))}, got {content!r:.80}")
    unknown = set(content) - keys
    require(not unknown, f"expected {', '.join(sorted(keys))}, got {', '.join(sorted(unknown))}")


def written(table: Table) -> str:
    """Return a table as the text of a file: what it is for in a line, its config in a second, then the measurement."""
    about = ",\n".join(f"  {json.dumps(line)}" for line in table.about)
    runs = ",\n".join(
        f'  {json.dumps(name)}: {{"device": {json.dumps(run.device)}, "versions": {json.dumps(run.versions)},\n'
        f'   "commit": {json.dumps(run.commit)}, "when": {json.dumps(run.when)}, "file": {json.dumps(run.file)}}}'
        for name, run in table.runs.items()
    )
    rows = ",\n".join(_written_row(row) for row in table.rows)
    return f'{{\n "about": [\n{about}\n ],\n "runs": {{\n{runs}\n }},\n "rows": [\n{rows}\n ]\n}}\n'


def _written_row(row: Row) -> str:
    first = {"kernel": row.kernel, "on": ", ".join(row.on), "when": row.shapes}
    parts: list[dict[str, Any]] = [first, {"config": row.config}]
    if row.measured is not None:
        parts.append({"measured": {"run": row.measured.run, "us": row.measured.us}})
    else:
        parts.append({"unmeasured": row.unmeasured})
    if row.why is not None:
        parts.append({"why": row.why})
    return "  {" + ",\n   ".join(json.dumps(part)[1:-1] for part in parts) + "}"
