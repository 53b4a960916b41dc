"""Beam jobs that turn raw files into a dataset directory; `convert.py` is the command line."""

import logging


def _is_of_use(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("apitools not found")


# Beam warns on import about Google Cloud clients, which nothing here uses.
logging.getLogger().addFilter(_is_of_use)
