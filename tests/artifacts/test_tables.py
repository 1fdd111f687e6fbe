"""Tables contain their name and version, and equal rows give equal bytes."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.artifacts.tables import TableSchema, read_table, write_table
from tests.refusals import refused

SCHEMA = TableSchema("numbers", 2, pa.schema([("name", pa.string()), ("values", pa.list_(pa.int32()))]))
ROWS = [{"name": "a", "values": [1, 2]}, {"name": "b", "values": []}]


def test_round_trip_for_arrow_and_pandas(tmp_path):
    write_table(tmp_path / "one.parquet", ROWS, SCHEMA)
    write_table(tmp_path / "two.parquet", ROWS, SCHEMA)
    assert read_table(tmp_path / "one.parquet", SCHEMA).to_pylist() == ROWS
    assert pd.read_parquet(tmp_path / "one.parquet")["name"].tolist() == ["a", "b"]
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_rejects_other_table_name_or_version(tmp_path):
    write_table(tmp_path / "t.parquet", ROWS, TableSchema("numbers", 1, SCHEMA.schema))
    with refused("table_version_mismatch", "numbers", 2, 1):
        read_table(tmp_path / "t.parquet", SCHEMA)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "plain.parquet")
    with refused("table_version_mismatch", "plain.parquet"):
        read_table(tmp_path / "plain.parquet", SCHEMA)


def test_rejects_unreadable_tables_and_unfit_rows(tmp_path):
    with refused("table_unreadable", "none.parquet"):
        read_table(tmp_path / "none.parquet", SCHEMA)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with refused("table_unreadable", "bad.parquet"):
        read_table(tmp_path / "bad.parquet", SCHEMA)
    with refused("row_schema_mismatch", "numbers"):
        write_table(tmp_path / "t.parquet", [{"name": "a", "values": ["x"]}], SCHEMA)
