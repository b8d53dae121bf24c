"""Groups of workers: specification, rank table, record, and how nodes agree on the record. Does no input or output."""
