"""Views of the ranks, tables and settings of a node, under the names that Probing and other engines use."""

from __future__ import annotations

from probing.api.tables import probing, rdma
from probing.api.tables.schema import I32, I64, TEXT, TIME, Column, view
from probing.api.tables.views_columns import ROLE, chosen, identity, unknown

__all__ = ("VIEWS",)

_LAUNCHER = "only the launcher knows this value"

CLUSTER_NODES = view(
    "cluster.nodes",
    "The ranks that train now or ended recently, one row for each rank, from process.processes; cluster.members has the"
    " nodes.",
    (
        *identity("p"),
        Column("host", TEXT, "Name of the node.", sql="p.node"),
        Column("addr", TEXT, "Address at which the node's daemon is asked.", sql="m.address"),
        Column("local_rank", I32, "Rank on the node.", sql="p.local_rank"),
        Column("rank", I32, "Rank in the job.", sql="p.rank"),
        Column("world_size", I32, "Number of ranks of the job.", sql="p.world_size"),
        Column(
            "group_rank", I32, "Index of the node in the job; NULL if the launcher does not set it.", sql="p.node_rank"
        ),
        *unknown(I32, _LAUNCHER, "group_world_size"),
        *unknown(TEXT, _LAUNCHER, "role_name"),
        *unknown(I32, _LAUNCHER, "role_rank", "role_world_size"),
        ROLE,
        Column(
            "status",
            TEXT,
            "`running`, or `dead` for a process that has ended.",
            sql="CASE WHEN p.state IN ('exited', 'zombie') THEN 'dead' ELSE 'running' END",
        ),
        Column("timestamp", I64, "When the process was in this state, microseconds since 1970.", sql="epoch_us(p.ts)"),
    ),
    "process.processes AS p LEFT JOIN cluster.members AS m ON p.node = m.node AND p.node = m.member"
    " WHERE p.role = 'trainer'",
)

_CATALOG = Column("table_catalog", TEXT, "Always 'probe', Probing's name for the data of a node.", sql="'probe'")
_KINDS = "CASE WHEN t.live = 'view' THEN 'VIEW' ELSE 'BASE TABLE' END"
TABLES = view(
    "information_schema.tables",
    "Tables and views, from probing.table_docs.",
    (
        _CATALOG,
        Column("table_schema", TEXT, "Schema of the table, the part of the name before the dot.", sql="t.table_schema"),
        Column("table_name", TEXT, "Name of the table within its schema.", sql="t.table_name"),
        Column("table_type", TEXT, "BASE TABLE or VIEW.", sql=_KINDS),
        Column("node", TEXT, "Name of the node that answered.", sql="t.node"),
    ),
    "probing.table_docs AS t",
)

COLUMNS = view(
    "information_schema.columns",
    "Columns of all tables and views, from probing.column_docs.",
    (
        _CATALOG,
        Column("table_schema", TEXT, "Schema of the table, the part of the name before the dot.", sql="c.table_schema"),
        Column("table_name", TEXT, "Name of the table within its schema.", sql="c.table_name"),
        Column("column_name", TEXT, "Name of the column.", sql="c.column_name"),
        Column("data_type", TEXT, "Arrow type of the column.", sql="c.type"),
        Column("node", TEXT, "Name of the node that answered.", sql="c.node"),
    ),
    "probing.column_docs AS c",
)

DF_SETTINGS = view(
    "information_schema.df_settings",
    "Settings, from probing.settings, with Probing's prefix before their names.",
    (
        Column("name", TEXT, "Name of the setting, with the prefix `probing.`", sql="'probing.' || s.key"),
        Column("value", TEXT, "Value of the setting, written as in a configuration file.", sql="s.value"),
        Column("description", TEXT, "Description of the setting.", sql="s.doc"),
        Column("node", TEXT, "Name of the node.", sql="s.node"),
    ),
    f"{probing.SETTINGS.name} AS s",
)

MLX_HCA = view(
    "rdma.mlx_hca",
    "Ports of all RDMA devices, with their history, from rdma.ports.",
    (
        Column("node", TEXT, "Name of the node.", sql="r.node"),
        Column("ts", TIME, "When the values were read, UTC.", sql="r.ts"),
        Column("hca_name", TEXT, "Name of the RDMA device, e.g. mlx5_0.", sql="r.hca"),
        *chosen(rdma.PORTS, "r", "port", "port_rcv_packets"),
        *chosen(rdma.PORTS, "r", port_rcv_data="port_rcv_data_bytes"),
        *chosen(rdma.PORTS, "r", "port_xmit_packets", port_xmit_data="port_xmit_data_bytes"),
        *chosen(rdma.PORTS, "r", "link_downed", "np_cnp_sent", "np_ecn_marked_roce_packets"),
        *chosen(rdma.PORTS, "r", "rcv_pkts_rate", "snd_pkts_rate"),
    ),
    "rdma.ports AS r",
)

VIEWS = (CLUSTER_NODES, MLX_HCA, TABLES, COLUMNS, DF_SETTINGS)
