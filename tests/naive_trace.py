"""What a trace job must not be: all rows as dicts, grouped, and one JSON of them.

python -m tests.naive_trace URL FILE   with the statements one after another in FILE, as JSON
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row


def main(url: str, file: str) -> None:
    """Read everything, and say how large it was."""
    asked = json.loads(Path(file).read_text("utf-8"))
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with psycopg.connect(url, row_factory=dict_row) as connection:
        for select in asked["selects"]:
            values = {"ids": asked["ids"], "as_of": "2026-12-01"}
            for row in connection.execute(select, values).fetchall():
                grouped[row["container_id"]].append(row)
    flat = [row for rows in grouped.values() for row in rows]
    print(len(json.dumps(flat, default=str)))  # noqa: T201 - it is a program


if __name__ == "__main__":
    main(*sys.argv[1:])
